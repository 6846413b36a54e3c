"""What a person clicked, done through the client."""

import asyncio
import concurrent.futures
import logging
from typing import Any

from notebook_cluster.client import Cluster, ClusterError, how_to_join
from notebook_cluster.client.requests import add_request
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.hand_over import HandOver
from notebook_cluster.protocol.launches import LAUNCH_OPTIONS
from notebook_cluster.protocol.sidebar import Action, Done
from notebook_cluster.server import sharing
from notebook_cluster.server.hub import Hub, run_slow
from notebook_cluster.server.kept import LOG_LINES, MOST_LOG_LINES, log_node, readable_log
from notebook_cluster.server.watching import WatchedCluster

log = logging.getLogger(__name__)

_OF_A_NODE = ("remove", "restart", "log")


async def perform(hub: Hub, action: Action) -> Done:
    """Do it and say what became of it; never raises because of what was asked."""
    try:
        value = await _perform(hub, action)
    except (ClusterError, OSError, ValueError) as error:
        return Done(id=action.id, error=str(error))
    except Exception as error:
        log.exception("notebook-cluster: action %s failed", action.action)
        return Done(
            id=action.id, error=f"{action.action} failed ({type(error).__name__}: {error}): see the server's log"
        )
    finally:
        hub.look_soon()
    return Done(id=action.id, error="", value=value)


async def _perform(hub: Hub, action: Action) -> Any:
    match action.action:
        case "start":
            return await run_slow(lambda: _start(action, hub.root))
        case "share_on":
            if action.code:
                raise ClusterError(
                    "a code of your own is for a terminal: notebook-cluster share --code; leave it out here and one "
                    "is made up"
                )
            return await run_slow(sharing.share_on)
        case "share_off":
            return await run_slow(sharing.share_off)
        case "dismiss":
            return await hub.dismiss(action.cluster)
        case _:
            return await _on_cluster(hub, action)


def _start(action: Action, root: str) -> list[str]:
    """The lines that are said meanwhile, but for how its launch stands: that is in the overview, and changes."""
    said: list[str] = []
    local = _count(action, None)
    peers = [name for part in action.target.split(",") if (name := part.strip())]
    hosts = _hosts(action)
    with Cluster.start(
        action.cluster or "cluster", local=local, peers=peers, code=action.code, head=action.head, directory=root,
        on_progress=said.append, **hosts,
    ) as cluster:  # fmt: skip
        names = tuple(f"{launch.name}: " for launch in cluster.launches()) if hosts else ()
        return [line for line in said if not line.startswith(names)]


def _hosts(action: Action) -> dict[str, Any]:
    """Those that an engine is to start, as the client takes it; empty where none is."""
    if action.launch is None:
        return {}
    if not action.launch.on:
        raise ClusterError("start with launch needs the name of an engine in on: slurm, ssh:HOST,HOST")
    return {name: getattr(action.launch, name) for name in LAUNCH_OPTIONS}


async def _on_cluster(hub: Hub, action: Action) -> Any:
    cluster = await hub.running(action.cluster)
    if action.action in _OF_A_NODE and not action.target:
        raise ClusterError(f"{action.action} needs the name of a node as target")
    match action.action:
        case "add":
            if not action.target:
                raise ClusterError("add needs a peer as target: its name, HOST:PORT, local or all")
            request = add_request(action.target, _count(action, 0) or 0, action.code)
            return await _ask(cluster, request, list[str])
        case "hand_over":
            if not action.target:
                raise ClusterError("hand_over needs a peer as target: its name, HOST:PORT or local")
            return await _ask(cluster, HandOver(to=action.target, code=action.code), str)
        case "remove":
            return await _ask(cluster, v.RemoveNode(node=action.target))
        case "restart":
            return await _ask(cluster, v.RestartNode(node=action.target))
        case "interrupt":
            return await _ask(cluster, v.Interrupt(force=action.value is True), list[str])
        case "detach":
            return await _ask(cluster, v.Detach())
        case "checkpoint":
            return await _ask(cluster, _checkpoint(cluster, action), str)
        case "log":
            return await _log(cluster, action)
        case "invite":
            return await _invite(cluster, action)
        case _:
            return await _stop(cluster)


async def _ask(cluster: WatchedCluster, body: Any, kind: Any = Any) -> Any:
    asked: concurrent.futures.Future[Any] = cluster.connection.request(body, kind)
    return await asyncio.wrap_future(asked)


def _count(action: Action, default: int | None) -> int | None:
    if action.value is None:
        return default
    if isinstance(action.value, int) and not isinstance(action.value, bool) and 0 <= action.value <= 64:
        return action.value
    raise ClusterError(f"{action.action} with value {action.value!r}: use a number of nodes from 0 to 64")


def _checkpoint(cluster: WatchedCluster, action: Action) -> v.SaveCheckpoint:
    jobs = cluster.state.jobs if cluster.state is not None else []
    job = next((job for job in jobs if not action.target or job.name == action.target), None)
    name = action.value
    if name in (None, "") and job is not None:
        name = f"{job.name}-round-{job.round}"
    if name is None:
        name = "checkpoint"
    if not isinstance(name, str):
        raise ClusterError(f"checkpoint with value {name!r}: use a name")
    return v.SaveCheckpoint(name=name, job=action.target)


async def _log(cluster: WatchedCluster, action: Action) -> list[str]:
    node, lines = log_node(cluster.state, action.target), action.value
    if lines is None:
        lines = LOG_LINES
    if not isinstance(lines, int) or isinstance(lines, bool) or not 1 <= lines <= MOST_LOG_LINES:
        raise ClusterError(f"log with value {lines!r:.100}: use a number of lines from 1 to {MOST_LOG_LINES}")
    try:
        return readable_log(await _ask(cluster, v.ReadNodeLog(node=node.name, lines=lines), list[str]))
    except ClusterError:
        # Nobody answers for it any more; its last lines came with the news that it is gone.
        if not node.log_tail:
            raise
        return readable_log(node.log_tail)


async def _invite(cluster: WatchedCluster, action: Action) -> str | None:
    if action.value is False:
        await _ask(cluster, v.Invite(close=True))
        return None
    return how_to_join(await _ask(cluster, v.Invite(code=action.code), v.Invitation))


async def _stop(cluster: WatchedCluster) -> None:
    await _ask(cluster, v.Stop())
    await run_slow(cluster.connection.wait_closed)
