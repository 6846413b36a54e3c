"""How an agent that an engine started comes into its cluster, with the key of its launch.

The messages: :mod:`notebook_cluster.protocol.launches`. The other side is the cluster's
:class:`~notebook_cluster.link.InboundListener`.
"""

import asyncio
from typing import Any

import zmq

from notebook_cluster.link.connection import DialledConnection
from notebook_cluster.pairing.guest import PairingError
from notebook_cluster.protocol import PROTOCOL_VERSION, ProtocolError, decode, encode
from notebook_cluster.protocol.launches import Enlist, Enlisted, LaunchKey, NotEnlisted
from notebook_cluster.protocol.wire import mismatch
from notebook_cluster.security import Identity
from notebook_cluster.security.sanitise import safe_name
from notebook_cluster.sockets import plain_context

ANSWER_S = 10.0
"""For the answer of one address, the first contact included."""
_MOST_REASON = 500


class NobodyThere(PairingError):
    """Nothing answers at this address that has the cluster's key: it may be another one, or come back."""


async def enlist(
    context: "zmq.Context[Any]", address: str, launch: LaunchKey, name: str, *, place: int, start: int, key: str
) -> None:
    """Have the cluster at ``address`` (``HOST:PORT``, where peers dial in) let ``key`` in, for this start of this place
    of the launch; ``name`` is that of this host.

    Raises:
        NobodyThere: try another address, or this one later.
        PairingError: the launch is over, or the place is taken.
    """
    answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    message = Enlist(protocol=PROTOCOL_VERSION, name=name, place=place, start=start, key=key)

    def fail(error: PairingError) -> None:
        if not answer.done():
            answer.set_exception(error)

    def received(frames: list[bytes]) -> None:
        if not answer.done():
            answer.set_result(frames[0])

    def say() -> None:
        connection.send([encode(message)])

    connection = DialledConnection(
        plain_context(context), f"tcp://{address}", launch.server_key, Identity(launch.public_key, launch.secret_key),
        on_frames=received, on_up=say,
        on_down=lambda trouble, answered: fail(NobodyThere(f"cluster {launch.cluster} at {address}: {trouble}")),
        on_refused=lambda: fail(
            PairingError(f"cluster {launch.cluster} at {address} refuses this launch's key: the launch is over")
        ),
    )  # fmt: skip
    try:
        frame = await asyncio.wait_for(answer, ANSWER_S)
        said = decode(frame, Enlisted | NotEnlisted)
    except TimeoutError:
        raise NobodyThere(f"cluster {launch.cluster} at {address} did not answer within {ANSWER_S:g} s") from None
    except ProtocolError as error:
        raise PairingError(f"cluster {launch.cluster} at {address} gave no answer that can be read: {error}") from None
    finally:
        connection.close()
    if isinstance(said, NotEnlisted):
        versions = mismatch(launch.cluster, said.protocol)
        raise PairingError(versions or f"cluster {launch.cluster} refuses: {safe_name(said.reason, _MOST_REASON)}")
