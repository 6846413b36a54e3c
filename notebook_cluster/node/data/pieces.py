"""Messages between ledgers in pieces that the mesh takes, and back."""

from collections.abc import Iterator

from notebook_cluster.protocol.mesh import SHARD_JOB, JobFrame
from notebook_cluster.protocol.wire import MAX_MESSAGE_BYTES

PIECE = 128 << 10
_MAX_PARTS = 256


class ShardPieces:
    """Of all senders. Not for several threads at once."""

    def __init__(self) -> None:
        self._tickets = 0
        self._pieces: dict[tuple[str, int, int], dict[int, bytes]] = {}

    def cut(self, data: bytes, incarnation: int) -> Iterator[tuple[JobFrame, bytes]]:
        self._tickets += 1
        for offset in range(0, len(data), PIECE):
            header = JobFrame(
                job=SHARD_JOB, incarnation=incarnation, kind="shard", ticket=self._tickets, offset=offset,
                total=len(data),
            )  # fmt: skip
            yield header, data[offset : offset + PIECE]

    def assemble(self, sender: str, header: JobFrame, payload: memoryview) -> bytes | None:
        """The whole message, once its last piece has come."""
        if len(payload) == header.total:
            return bytes(payload)
        if header.total > MAX_MESSAGE_BYTES or len(self._pieces) >= _MAX_PARTS:
            self._pieces.clear()  # of messages whose rest was lost: what is missing is asked for again
            return None
        which = (sender, header.incarnation, header.ticket)
        pieces = self._pieces.setdefault(which, {})
        pieces[header.offset] = bytes(payload)
        if sum(map(len, pieces.values())) < header.total:
            return None
        del self._pieces[which]
        return b"".join(pieces[offset] for offset in sorted(pieces))
