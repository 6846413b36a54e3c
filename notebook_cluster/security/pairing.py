"""SPAKE2 between a guest that was told a code and the host that has it open, bound to the CURVE keys of both. No I/O.

Messages and their order: :mod:`notebook_cluster.protocol.pairing`. About 5 ms of computing for each side.
"""

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

from notebook_cluster.security.identity import Identity

MESSAGE_BYTES = 33
"""A side letter and a point of the curve."""

PAIRING_IDENTITY = Identity("GyWg?.dB84d/)wqV/e)8ms[j.hQ-*#Nar/VmtIN%", "d{6iiPyxH-3Vs?B}Cxj1Mu)wi)90<%oDVkPrhp{h")
"""The CURVE pair of every pairing socket. It is public, secret half included: it encrypts against who only listens, and
says nothing about who is at the other end. That is what the code is for."""


class BadElement(ValueError):
    """The other side's SPAKE2 message is not one; it was not computed with."""


class GuestExchange:
    """The guest's side of one attempt. ``message`` goes into Begin."""

    def __init__(self, code: str, guest_key: str, host_key: str) -> None:
        from spake2 import SPAKE2_A

        self._side = SPAKE2_A(_password(code), idA=guest_key.encode(), idB=host_key.encode())
        self.message: bytes = self._side.start()

    def finish(self, challenge: bytes) -> bytes:
        """The secret, from the host's message; the same as the host's only when both have the same code and keys.

        Raises:
            BadElement: ``challenge`` is no SPAKE2 message of a host.
        """
        return _finish(self._side.finish, challenge, b"B")


def answer(code: str, guest_key: str, host_key: str, begin: bytes) -> tuple[bytes, bytes]:
    """The host's side of one attempt: (message for Challenge, secret), from the guest's message in Begin.

    Raises:
        BadElement: ``begin`` is no SPAKE2 message of a guest.
    """
    from spake2 import SPAKE2_B

    side = SPAKE2_B(_password(code), idA=guest_key.encode(), idB=host_key.encode())
    message: bytes = side.start()
    return message, _finish(side.finish, begin, b"A")


def has_form(message: bytes, side: bytes) -> bool:
    """True when ``message`` has the length and the letter of a SPAKE2 message of ``side`` (``b"A"`` guest, ``b"B"``
    host): looks before anything is computed or counted."""
    return len(message) == MESSAGE_BYTES and message[:1] == side


def guest_proof(secret: bytes, here: bytes, begin: bytes) -> bytes:
    """What only a guest with the right code can say about ``here`` and ``begin`` as they were on the wire."""
    return _proof(secret, b"A", here, begin)


def host_proof(secret: bytes, here: bytes, begin: bytes) -> bytes:
    """The host's answer to a right proof of the guest."""
    return _proof(secret, b"B", here, begin)


def is_proof(given: bytes, expected: bytes) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(given, expected)


def _password(code: str) -> bytes:
    """Dashes are for reading: ``tigerlamp42`` is the same code as ``tiger-lamp-42``."""
    return b"notebook-cluster pairing 1:" + code.replace("-", "").encode()


def _proof(secret: bytes, letter: bytes, here: bytes, begin: bytes) -> bytes:
    # Hashes have one length, so that no byte can move from one message to the other.
    text = letter + hashlib.sha256(here).digest() + hashlib.sha256(begin).digest()
    return hmac.new(secret, text, hashlib.sha256).digest()


def _finish(finish: Callable[[bytes], Any], message: bytes, side: bytes) -> bytes:
    from spake2 import SPAKEError
    from spake2.ed25519_basic import NotOnCurve

    if not has_form(message, side):
        raise BadElement(f"a SPAKE2 message has {MESSAGE_BYTES} bytes and begins with {side!r}")
    try:
        return bytes(finish(message))
    except (SPAKEError, NotOnCurve, ValueError) as error:
        raise BadElement(f"not a SPAKE2 message: {error or type(error).__name__}") from None
