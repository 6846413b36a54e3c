"""At which of its addresses does somebody who pairs answer?"""

from collections.abc import Sequence

import zmq

from notebook_cluster.link import PairingError, ask


async def first_that_answers(
    context: "zmq.Context[zmq.Socket[bytes]]", hosts: Sequence[str], port: int, key: str
) -> str:
    """The first ``HOST:PORT`` at which whoever says to have ``key`` answers.

    Raises:
        PairingError: none does.
    """
    trouble: PairingError | None = None
    for host in hosts:
        place = f"{host}:{port}"
        try:
            here = await ask(context, place)
        except PairingError as error:
            trouble = trouble or error
            continue
        if here.key == key:
            return place
        trouble = PairingError(f"somebody else answers at {place}")
    raise trouble or PairingError("it said no address: use HOST:PORT")
