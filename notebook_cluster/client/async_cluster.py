"""``AsyncCluster``: what :class:`.cluster.Cluster` does, with ``await``."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from notebook_cluster.client.benching import MEGABYTES, BenchedWay
from notebook_cluster.client.cluster import Cluster
from notebook_cluster.client.collecting import HandedIn
from notebook_cluster.client.files import Destination
from notebook_cluster.client.requests import add_request
from notebook_cluster.client.values import Pulled
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.hand_over import HandOver
from notebook_cluster.protocol.interaction import AnswerInput, ListVariables, NodeVariables
from notebook_cluster.protocol.launches import LaunchView
from notebook_cluster.protocol.state import ClusterView, Series


class AsyncCluster:
    """The same methods as :class:`Cluster`, as coroutines: ``state = await cluster.state()``."""

    def __init__(self, cluster: Cluster) -> None:
        self.blocking = cluster

    @classmethod
    async def start(cls, name: str = "cluster", **options: Any) -> "AsyncCluster":
        return cls(await asyncio.to_thread(Cluster.start, name, **options))

    @classmethod
    async def attach(cls, name: str | None = None, **options: Any) -> "AsyncCluster":
        return cls(await asyncio.to_thread(Cluster.attach, name, **options))

    @classmethod
    async def take_over(cls, name: str, **options: Any) -> "AsyncCluster":
        return cls(await asyncio.to_thread(Cluster.take_over, name, **options))

    async def _request(self, body: Any, kind: Any = Any) -> Any:
        return await asyncio.wrap_future(self.blocking.connection.request(body, kind))

    async def state(self) -> ClusterView:
        return await self._request(v.GetState(), ClusterView)  # type: ignore[no-any-return]

    async def series(self) -> list[Series]:
        return await self._request(v.GetSeries(), list[Series])  # type: ignore[no-any-return]

    async def run(self, source: str, targets: Sequence[str] = (), **options: Any) -> tuple[v.CellEnded, list[v.Output]]:
        return await asyncio.to_thread(self.blocking.run, source, targets, **options)

    async def interrupt(self, force: bool = False, cell: int = 0) -> list[str]:
        return await self._request(v.Interrupt(force=force, cell=cell), list[str])  # type: ignore[no-any-return]

    async def push(self, variables: Mapping[str, Any], targets: Sequence[str] = ()) -> None:
        await asyncio.to_thread(self.blocking.push, variables, targets)

    async def pull(self, names: Sequence[str], targets: Sequence[str] = ()) -> dict[str, dict[str, Pulled]]:
        return await asyncio.to_thread(self.blocking.pull, names, targets)

    async def send_files(self, path: str, targets: Sequence[str] = ()) -> list[Destination]:
        return await asyncio.to_thread(self.blocking.send_files, path, targets)

    async def collect_files(self, pattern: str, into: str | Path, targets: Sequence[str] = ()) -> list[HandedIn]:
        return await asyncio.to_thread(self.blocking.collect_files, pattern, into, targets)

    async def answer_input(self, question: int, value: str = "", *, end: bool = False) -> None:
        await self._request(AnswerInput(id=question, value=value, end=end))

    async def variables(self, pattern: str = "", *, everything: bool = False) -> list[NodeVariables]:
        request = ListVariables(pattern=pattern, everything=everything)
        return await self._request(request, list[NodeVariables])  # type: ignore[no-any-return]

    async def detach(self) -> None:
        await self._request(v.Detach())

    async def add(self, peer: str, count: int = 0, *, code: str = "") -> list[str]:
        return await self._request(add_request(peer, count, code), list[str])  # type: ignore[no-any-return]

    async def invite(self, code: str = "", minutes: float = 120.0) -> v.Invitation:
        return await self._request(v.Invite(code=code, minutes=minutes), v.Invitation)  # type: ignore[no-any-return]

    async def close_invitation(self) -> None:
        await self._request(v.Invite(close=True))

    async def examine(self, packages: Sequence[str] = ()) -> list[v.Finding]:
        return await self._request(v.Examine(packages=list(packages)), list[v.Finding])  # type: ignore[no-any-return]

    async def bench(self, megabytes: int = MEGABYTES, **options: Any) -> list[BenchedWay]:
        return await asyncio.to_thread(self.blocking.bench, megabytes, **options)

    async def grow(self, on: str, hosts: int = 0, **options: Any) -> LaunchView:
        return await asyncio.to_thread(self.blocking.grow, on, hosts, **options)

    async def shrink(self, hosts: int) -> list[str]:
        return await asyncio.to_thread(self.blocking.shrink, hosts)

    async def hand_over(self, to: str, *, code: str = "", survive: bool = False) -> str:
        return await self._request(HandOver(to=to, code=code, survive=survive), str)  # type: ignore[no-any-return]

    async def remove(self, node: str) -> None:
        await self._request(v.RemoveNode(node=node))

    async def restart(self, node: str | Sequence[str], replay: bool = True, *, all_cells: bool = False) -> None:
        await asyncio.to_thread(self.blocking.restart, node, replay, all_cells=all_cells)

    async def skip(self, node: str) -> int:
        return await self._request(v.SkipReplay(node=node), int)  # type: ignore[no-any-return]

    async def checkpoint(self, name: str, job: str = "") -> str:
        return await self._request(v.SaveCheckpoint(name=name, job=job), str)  # type: ignore[no-any-return]

    async def stop(self) -> None:
        await asyncio.to_thread(self.blocking.stop)

    async def close(self) -> None:
        await asyncio.to_thread(self.blocking.close)
