"""Pairing with a short code that people read to each other: the codes, how few wrong ones are allowed, and SPAKE2.

A code is a password of SPAKE2, bound to the CURVE keys of both sides: nobody who hears the network can try codes on his
own machine, so it may be short. What is left is asking the host, and :class:`OpenCode` limits that. Messages and their
order: :mod:`notebook_cluster.protocol.pairing`. An exchange takes about 5 ms of computing on each side. No I/O.
"""

import hashlib
import hmac
import re
import secrets
import time
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from notebook_cluster.security.identity import Identity

MIN_CHARACTERS = 6
MAX_CHARACTERS = 64
MAX_WRONG = 20
"""Wrong codes, from all sources together, until the code is dead."""
MAX_A_MINUTE = 5
"""Wrong codes of one source in :data:`WINDOW` seconds."""
WINDOW = 60.0
_BUSY = 0.3
"""Seconds after which a guest may ask again when others are in the middle of their attempts."""
_SEPARATORS = re.compile(r"[\s_\-\u2010-\u2015\u2212.,+/]+")
_TOO_EASY = ("01234567890", "09876543210", "abcdefghijklmnopqrstuvwxyz", "qwertyuiop")

_WORDS = """
acorn album alley almond amber anchor apple april apron arrow atlas attic autumn badge bagel bakery bamboo banana
banjo barn basil basket beacon beaver bottle bread brick bronze brush bubble buffet butter button cabin cactus camel
camera candle canoe canvas carpet carrot chalk cherry chess cider cinema circle circus cliff cloud clover cocoa coffee
collar comet copper coral cotton crater crayon cube dahlia daisy dance delta denim desert diary dinner domino dragon
dream eagle easel echo elbow engine fabric falcon farmer fennel fiddle finger flag flute forest fox galaxy garden
garlic globe grape gravel guitar hammer harbor hazel helmet heron hiker hockey husky icicle igloo indigo island ivy
jacket jaguar jigsaw jungle kayak kernel kettle kimono kiosk kiwi koala ladder lagoon lamp laptop laurel lemon lentil
lilac lizard llama lobby locket lotus lunch magnet mango maple marsh meadow melon mitten mosaic moss motor muffin
museum napkin nectar needle nickel north novel nutmeg oasis ocean olive omelet onion orange orchid otter owl oxygen
paddle palace panda parade pencil pepper piano picnic pigeon pillow pilot pizza planet poppy potato prism puppet
purple quartz quilt rabbit radar radio raft ranger raven ribbon river rubber safari sailor salad salmon sandal saturn
scarf shadow shark shelf signal silver skate sketch snow sofa spider sponge spoon spring square squid statue stone
storm studio subway summer sunset table teapot temple tennis thumb ticket tiger toast tomato topaz torch towel trail
tulip tundra tunnel turtle tuxedo urchin velvet violin voyage waffle wagon walnut water window wolf wombat yellow yeti
yogurt zebra zenith zigzag zipper
"""
WORDS = tuple(_WORDS.split())
"""256 words: short, easy to say, no two that look or sound alike."""


def new_code() -> str:
    """A random code of two words and a number, like ``tiger-lamp-42``: one of 65 million."""
    first = secrets.choice(WORDS)
    second = secrets.choice([word for word in WORDS if word != first])
    return f"{first}-{second}-{10 + secrets.randbelow(990)}"


def is_a_new_code(text: str) -> bool:
    """Whether ``text`` could be what :func:`new_code` made: typed where a name belongs."""
    parts = text.casefold().split("-")
    return len(parts) == 3 and parts[0] in WORDS and parts[1] in WORDS and parts[2].isdigit()


def read_code(text: str) -> str:
    """``text`` as somebody typed or read it, in the form of :func:`new_code`: lower case, one ``-`` between parts.

    Raises:
        ValueError: under 6 or over 64 letters and digits, other characters, or easy to guess.
    """
    parts = [part for part in _SEPARATORS.split(unicodedata.normalize("NFKC", text[:1000]).casefold()) if part]
    characters = "".join(parts)
    shown = text[:MAX_CHARACTERS]
    if not MIN_CHARACTERS <= len(characters) <= MAX_CHARACTERS:
        raise ValueError(
            f"code {shown!r} has {len(characters)} letters and digits: use {MIN_CHARACTERS} to {MAX_CHARACTERS}, "
            "like tiger-lamp-42"
        )
    if not characters.isalnum():
        raise ValueError(
            f"code {shown!r} has other characters than letters, digits and '-': use some like tiger-lamp-42"
        )
    if len(set(characters)) < 3 or any(characters in row for row in _TOO_EASY):
        raise ValueError(f"code {shown!r} is too easy to guess: use some like tiger-lamp-42")
    return "-".join(parts)


@dataclass(frozen=True)
class Attempt:
    """A try at a code that has begun: it counts as wrong until :meth:`OpenCode.right` is called with it."""

    source: str
    time: float


class TooManyAttempts(Exception):
    """This attempt is not checked. ``retry_after``: seconds until it makes sense to try again, None for never."""

    def __init__(self, reason: str, retry_after: float | None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class OpenCode:
    """A code that can be used now: once (``single_use``), or by many for ``valid_s`` seconds (None: until closed).

    An attempt counts as wrong from :meth:`begin` on, so trying at the same time gains nothing. What is remembered is at
    most :data:`MAX_WRONG` attempts, whatever is sent.

    Attributes:
        checked: attempts that were let through to the check of the code.
        right_count: attempts that were right.
    """

    def __init__(
        self,
        code: str,
        single_use: bool = True,
        valid_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """ValueError for an unusable ``code`` (:func:`read_code`) or a time that is not above zero."""
        if valid_s is not None and not valid_s > 0:
            raise ValueError(f"a code cannot be valid for {valid_s} seconds: use a time above zero")
        self.code = read_code(code)
        self.single_use = single_use
        self._clock = clock
        self._end = None if valid_s is None else clock() + valid_s
        self._running: list[Attempt] = []
        self._wrong: list[Attempt] = []
        self.checked = 0
        self.right_count = 0

    @property
    def tries_left(self) -> int:
        """Wrong attempts until the code is dead; attempts that have begun are counted."""
        return MAX_WRONG - len(self._wrong) - len(self._running)

    @property
    def seconds_left(self) -> float | None:
        """Time until the code expires, at least 0; None when it does not."""
        return None if self._end is None else max(self._end - self._clock(), 0.0)

    @property
    def over(self) -> str | None:
        """Why the code can be used no more, or None while it can."""
        if self.single_use and self.right_count:
            return "it was used"
        if len(self._wrong) >= MAX_WRONG:
            return f"{MAX_WRONG} wrong codes were tried"
        if self.seconds_left == 0:
            return "its time is over"
        return None

    def begin(self, source: str) -> Attempt:
        """Count an attempt of ``source`` (an IP address) that is about to be checked.

        Raises:
            TooManyAttempts: it must not be checked.
        """
        now = self._clock()
        if (over := self.over) is not None:
            raise TooManyAttempts(f"the code is closed: {over}", None)
        if self.tries_left <= 0:
            raise TooManyAttempts("others are trying codes at this moment: try again in a second", _BUSY)
        running = sum(attempt.source == source for attempt in self._running)
        recent = [attempt.time for attempt in self._wrong if attempt.source == source and attempt.time > now - WINDOW]
        if len(recent) >= MAX_A_MINUTE:
            wait = max(min(recent) + WINDOW - now, 0.1)
            raise TooManyAttempts(f"{MAX_A_MINUTE} wrong codes a minute are allowed: try again in {wait:.0f} s", wait)
        if len(recent) + running >= MAX_A_MINUTE:
            raise TooManyAttempts(f"others at {source} are trying codes: try again in a second", _BUSY)
        attempt = Attempt(source, now)
        self._running.append(attempt)
        self.checked += 1
        return attempt

    def right(self, attempt: Attempt, *, used: bool = True) -> None:
        """The attempt was proven right; ``used=False`` when it was refused for another reason and uses nothing up."""
        self._forget(attempt)
        self.right_count += used

    def wrong(self, attempt: Attempt) -> None:
        """The attempt was wrong, or given up."""
        if self._forget(attempt):
            self._wrong.append(attempt)

    def _forget(self, attempt: Attempt) -> bool:
        for index, running in enumerate(self._running):
            if running is attempt:
                del self._running[index]
                return True
        return False


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
