"""Answers the coordinator of a new cluster that asks what the one before it, of the same owner and name, has left here.

Only what the owner's own cluster of that name has kept is told, and only its kernels are ended: of others nobody hears.
A coordinator that is still heard keeps its kernels, and nodes whose training could not be kept are left as they are.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from notebook_cluster.agent.host import ClusterHost
from notebook_cluster.agent.keeping import import_checkpoints
from notebook_cluster.protocol.kept import MOST_LINES, MOST_STATES, MOST_TEXT, QUIET, AskKept, KeptAnswer, KeptState


class Predecessors:
    """Give :meth:`on_ask_kept` to every :class:`.host.ClusterHost`.

    Args:
        directory: the agent's data folder.
        hosts: the clusters that are served now.
        is_own: whether the coordinator with this key came in as this user's own.
        end: :meth:`.clusters.Clusters.end_cluster`.
        end_grant: takes the grant back that the owner of a cluster has given to a head of it, if there is one.
    """

    def __init__(
        self,
        directory: Path,
        hosts: Callable[[], list[ClusterHost]],
        is_own: Callable[[str], bool],
        end: Callable[..., Awaitable[None]],
        end_grant: Callable[[ClusterHost], None],
    ) -> None:
        self._directory = directory
        self._hosts = hosts
        self._is_own = is_own
        self._end = end
        self._end_grant = end_grant
        self._tasks: set[asyncio.Task[None]] = set()

    def on_ask_kept(self, host: ClusterHost, message: AskKept) -> None:
        """The coordinator of ``host`` asks; the answer may take as long as nodes write."""
        task = asyncio.get_running_loop().create_task(self._answer(host, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _before(self, host: ClusterHost) -> list[ClusterHost]:
        return [
            other
            for other in self._hosts()
            if other is not host and not other.is_window and (other.owner_id, other.name) == (host.owner_id, host.name)
        ]

    async def _answer(self, host: ClusterHost, message: AskKept) -> None:
        before = self._before(host)
        nodes = sum(len(other.kernels) for other in before)
        states: list[KeptState] = []
        damaged: list[str] = []
        if message.end:
            is_asked_again, host.session.has_taken_over = host.session.has_taken_over, True
            is_kept = await asyncio.gather(*(self._keep(other, damaged) for other in before))
            states, lines = await asyncio.to_thread(self._kept, host, message.directory)
            damaged += lines
            may_end = bool(states) or is_asked_again
            kept = zip(before, is_kept, strict=True)
            await asyncio.gather(*(self._replace(other) for other, how in kept if how or (may_end and how is None)))
            before = self._before(host)
            if not before:
                self._end_grant(host)  # its head may come back: it leads nothing here any more
        silent = min((_silence(other) for other in before), default=None)
        damaged = [line[:MOST_TEXT] for line in damaged[:MOST_LINES]]
        host.session.send(KeptAnswer(ticket=message.ticket, states=states, damaged=damaged, nodes=nodes, silent=silent))

    async def _keep(self, before: ClusterHost, errors: list[str]) -> bool | None:
        """Whether its nodes have kept their training just now; None: there was nothing to keep."""
        if _silence(before) < QUIET:
            return False
        failed: list[str] = []
        folders = await before.keep_checkpoints("a new cluster of its name takes over", failed)
        errors += failed
        return True if folders else False if failed else None

    async def _replace(self, before: ClusterHost) -> None:
        if _silence(before) >= QUIET:
            reason = f"a new cluster {before.name} of {before.owner} has taken over"
            await self._end(before, reason, asked=False, told=False)

    def _kept(self, host: ClusterHost, directory: str) -> tuple[list[KeptState], list[str]]:
        import_checkpoints()
        from notebook_cluster.checkpoints.kept import kept_states

        states, damaged = kept_states(self._directory / "work" / host.folder / "checkpoints")
        if directory and self._is_own(host.session.key):
            more = kept_states(Path(directory) / "checkpoints", host.name)
            states, damaged = states + more[0], damaged + more[1]
        return states[:MOST_STATES], damaged


def _silence(host: ClusterHost) -> float:
    """Seconds of awake time, as of the lease."""
    return asyncio.get_running_loop().time() - host.session.last_heard
