"""What the nodes of a cluster have trained, kept before their kernels end without being asked to by their coordinator;
and what was kept here, told to each coordinator that comes.
"""

import asyncio
import glob
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from notebook_cluster.agent.kernels.control_socket import ControlSocket
from notebook_cluster.link import Session
from notebook_cluster.protocol.node import KeepCheckpoint, Kept
from notebook_cluster.protocol.peer import KeptCheckpoint, KeptCheckpoints
from notebook_cluster.protocol.wire import ProtocolError, decode, encode

log = logging.getLogger(__name__)

KEEP_S = 20.0
"""For a node to write its checkpoint."""
_MAX_FOLDERS = 100
_MAX_TEXT = 500
_TOLD_S = 30 * 86400.0
"""For how long coordinators are told what is kept here. It is not deleted then."""
_MOST_TOLD = 16


def import_checkpoints() -> None:
    """Import the package of checkpoints, with which numpy comes, before a part of it is imported: another thread may
    import it at the same time, and each of the two would wait for a part of the other's."""
    import notebook_cluster.checkpoints  # noqa: F401


def kept_checkpoints(work: Path, cluster: str = "*") -> list[KeptCheckpoint]:
    """What nodes have kept in the folders of clusters below ``work``, newest first; of each name the newest.

    ``cluster``: a pattern for the name of such a folder.
    """
    if next(work.glob(f"{cluster}/checkpoints/*-kept"), None) is None:
        return []
    import_checkpoints()
    from notebook_cluster.checkpoints.reading import kept_below

    try:
        found = kept_below(work, cluster)
    except OSError as error:
        log.warning("cannot look what is kept below %s: %s", work, error)
        return []
    return [
        KeptCheckpoint(
            name=kept.folder.parent.name,
            job=kept.manifest.job[:_MAX_TEXT],
            round=kept.manifest.round,
            time=kept.manifest.saved_at,
            folder=str(kept.folder)[:_MAX_TEXT],
        )
        for kept in found[:_MOST_TOLD]
        if time.time() - kept.manifest.saved_at < _TOLD_S
    ]


class CheckpointKeeper:
    """Asks the runtimes of one cluster's kernels; ``control`` is their socket."""

    def __init__(self, control: ControlSocket) -> None:
        self._control = control
        self._waiting: dict[tuple[str, int], asyncio.Future[Kept]] = {}

    async def keep(self, nodes: Iterable[tuple[str, int]], reason: str, jobs: Sequence[str] = ()) -> dict[str, Kept]:
        """Let every one of ``nodes`` (name, incarnation) save its training; node -> what it says, or why it does not.
        ``jobs``: only these.

        Takes at most :data:`KEEP_S` seconds. Kernels without a runtime have no training and are left out.
        """
        body = encode(KeepCheckpoint(reason=reason, jobs=list(jobs)))
        asked = [node for node in nodes if node not in self._waiting and self._control.has_dialled(*node)]
        for node in asked:
            self._waiting[node] = asyncio.get_running_loop().create_future()
            self._control.send(*node, body)
        answers = await asyncio.gather(*(self._answer(node) for node in asked))
        return {name: answer for (name, _), answer in zip(asked, answers, strict=True)}

    def take(self, node: str, incarnation: int, body: bytes) -> bool:
        """Whether ``body``, from a runtime, was the answer that is waited for. Other messages are not read."""
        answer = self._waiting.get((node, incarnation))
        if answer is None or answer.done():
            return False
        try:
            kept: Kept = decode(body, Kept)
        except ProtocolError:
            return False
        folders = [folder[:_MAX_TEXT] for folder in kept.folders[:_MAX_FOLDERS]]
        answer.set_result(Kept(folders=folders, error=kept.error[:_MAX_TEXT]))
        return True

    def gone(self, node: str, incarnation: int) -> None:
        """The kernel is gone."""
        answer = self._waiting.get((node, incarnation))
        if answer is not None and not answer.done():
            answer.set_result(Kept(folders=[], error="its kernel ended"))

    async def _answer(self, node: tuple[str, int]) -> Kept:
        try:
            return await asyncio.wait_for(self._waiting[node], KEEP_S)
        except TimeoutError:
            return Kept(folders=[], error=f"it did not answer within {KEEP_S:.0f} s")
        finally:
            del self._waiting[node]


class KeptNews:
    """Tells the coordinator of ``session``, which may go on with it, what was kept here; ``work``: the folders of all
    clusters, also of those that are no more."""

    def __init__(self, session: Session, work: Path) -> None:
        self._session = session
        self._work = work
        self._told: set[Path] = set()

    async def tell(self, folder: Path | None = None) -> None:
        """Of all clusters; or once what lies in ``folder``, in which its owner has nodes work."""
        if folder is None:
            rows = await asyncio.to_thread(kept_checkpoints, self._work)
        elif folder not in self._told:
            self._told.add(folder)
            rows = await asyncio.to_thread(kept_checkpoints, folder.parent, glob.escape(folder.name))
        else:
            return
        if rows:
            self._session.send(KeptCheckpoints(checkpoints=rows))
