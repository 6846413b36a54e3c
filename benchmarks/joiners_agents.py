"""The process that plays the hosts of one launch for :mod:`benchmarks.joiners`, and the engine that starts it.

Each host is an agent at the end of a link of its own, without kernels: it comes in with the launch's key as the agent
of a real host does, starts the node that it is asked for at once, runs the cell that trains without an end, and says
its memory and that its node lives once a second. It says that it is on this machine, so the nodes that train do not
dial its node: what is measured is the coordinator.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from notebook_cluster.agent.machine import machine_id
from notebook_cluster.launchers import HostState, Launch, LaunchError, LaunchOrder, LaunchState
from notebook_cluster.link import Listener, Session
from notebook_cluster.pairing import enlist
from notebook_cluster.protocol import PROTOCOL_VERSION, VERSION, encode
from notebook_cluster.protocol.launches import LaunchKey
from notebook_cluster.protocol.node import Heartbeat, NodeHello
from notebook_cluster.protocol.peer import (
    Device,
    FromNode,
    Inventory,
    NodeEnded,
    NodeSample,
    NodeStarted,
    PeerInfo,
    PeerSample,
    Release,
    Released,
    StartNode,
    StopNode,
)
from notebook_cluster.protocol.wire import Message
from notebook_cluster.security import Gate, new_identity

ENGINE = "players"
WITHIN_S = 2.0
"""In which all of them begin to dial."""
GB = 10**9
_SOCKETS = 8192


class Players:
    """The engine: one process that plays all hosts of a launch."""

    period = 1.0

    def __init__(self) -> None:
        self._started: dict[str, asyncio.subprocess.Process] = {}

    def hosts(self, where: str) -> int:
        if where:
            raise LaunchError(f"--on {ENGINE}:{where}: it knows no hosts, say --hosts N")
        return 0

    async def start(self, order: LaunchOrder) -> Launch:
        dial = order.argv[order.argv.index("--dial") + 1]
        command = [sys.executable, "-m", "benchmarks.joiners_agents", "--key", str(order.secret), "--dial", dial]
        with (order.folder / "players.log").open("wb") as log:
            self._started[order.name] = await asyncio.create_subprocess_exec(
                *command, "--agents", str(order.hosts), stdout=log, stderr=log
            )
        return Launch(order.name, "here", order.hosts, order.folder)

    async def state(self, launch: Launch) -> LaunchState:
        code = self._started[launch.name].returncode
        state = HostState("running") if code is None else HostState("ended", f"exit code {code}", failed=True)
        return LaunchState(dict.fromkeys(range(launch.hosts), state))

    async def stop(self, launch: Launch, places: Sequence[int] = ()) -> None:
        process = self._started[launch.name]
        if not places and process.returncode is None:
            process.terminate()
            await process.wait()


def install(folder: Path) -> None:
    """Make the engine known below ``folder``, which is on sys.path, as pip does."""
    known = folder / "notebook_cluster_players-1.0.dist-info"
    known.mkdir(parents=True)
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: notebook-cluster-players\nVersion: 1.0\n")
    (known / "entry_points.txt").write_text(
        f"[notebook_cluster.launchers]\n{ENGINE} = benchmarks.joiners_agents:Players\n"
    )


class Host:
    """One agent, with at most one node."""

    def __init__(self, context: "zmq.Context[Any]", gate: Gate, key: LaunchKey, place: int, machine: str) -> None:
        self._context, self._key, self._place, self._machine = context, key, place, machine
        self._name = f"h{place}"
        self._identity = new_identity()
        self._session: Session | None = None
        self._node: NodeStarted | None = None
        self._listener = Listener(
            context, "tcp://127.0.0.1:0", self._identity, gate=gate,
            authorise=lambda known: key.owner if known == key.server_key else None, on_session=self._open,
        )  # fmt: skip

    async def come_in(self, addresses: Sequence[str]) -> None:
        """Take the place in the launch and dial."""
        self._listener.start()
        await enlist(
            self._context, addresses[0], self._key, self._name, place=self._place, start=0,
            key=self._identity.public_key,
        )  # fmt: skip
        self._listener.dial_out(addresses[0], self._key.server_key)

    def _open(self, session: Session) -> None:
        self._session = session
        session.on_message = self._on_message
        session.on_restart = self._introduce
        self._introduce()

    def _send(self, message: Message) -> None:
        if self._session is not None:
            self._session.send(message)

    def _introduce(self) -> None:
        self._send(Inventory(nodes=[self._node] if self._node is not None else []))
        self._send(
            PeerInfo(
                name=self._name, machine=self._machine, hosts=["127.0.0.1"], python="3.12.0", platform=sys.platform,
                devices=[Device(id="cpu", kind="cpu", name="cpu", memory_bytes=8 * GB)], version=VERSION,
                protocol=PROTOCOL_VERSION,
            )
        )  # fmt: skip

    def _on_message(self, message: Message, buffers: list[bytes]) -> None:
        match message:
            case StartNode() if self._node is None or self._node.incarnation < message.incarnation:
                self._node = NodeStarted(
                    node=message.node, incarnation=message.incarnation, device=message.device, pid=1
                )
                self._send(self._node)
                self._say(
                    NodeHello(
                        node=message.node, incarnation=message.incarnation, pid=1, mesh_ipc="",
                        mesh_key=new_identity().public_key, mesh_port=9, master_port=9,
                    )
                )  # fmt: skip
            case StopNode() if self._node is not None and message.node == self._node.node:
                self._node = None
                self._send(NodeEnded(node=message.node, incarnation=message.incarnation, asked=True, reason="stopped"))
            case Release():
                self._node = None
                self._send(Released())

    def _say(self, body: Message) -> None:
        if self._node is not None:
            self._send(FromNode(node=self._node.node, incarnation=self._node.incarnation, body=encode(body)))

    def speak(self) -> None:
        """What an agent and its node say once a second."""
        if self._node is None:
            return
        samples = [NodeSample(node=self._node.node, rss=GB, rss_peak=GB, cpu=0.7)]
        self._send(PeerSample(time=time.time(), cpu=0.5, ram_used=GB, ram_total=8 * GB, devices=[], nodes=samples))
        self._say(Heartbeat())

    async def close(self) -> None:
        await self._listener.close()


async def play(key: LaunchKey, addresses: Sequence[str], agents: int) -> None:
    """Play them until SIGTERM."""
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _SOCKETS)
    ended, gate = asyncio.Event(), Gate(context)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    hosts = [Host(context, gate, key, place, machine_id()) for place in range(agents)]

    async def live(host: Host, late: float) -> None:
        await asyncio.sleep(late)
        await host.come_in(addresses)
        while True:
            await asyncio.sleep(1.0)
            host.speak()

    lives = [asyncio.ensure_future(live(host, WITHIN_S * place / agents)) for place, host in enumerate(hosts)]
    ending = asyncio.ensure_future(ended.wait())
    try:
        done, _ = await asyncio.wait([ending, *lives], return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()  # one that could not come in ends all
    finally:
        for one in lives:
            one.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        await asyncio.gather(*(host.close() for host in hosts))
        gate.close()
        context.destroy(linger=0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joiners_agents", description="hosts without kernels")
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--dial", required=True)
    parser.add_argument("--agents", type=int, required=True)
    arguments = parser.parse_args()
    key = msgspec.json.decode(arguments.key.read_bytes(), type=LaunchKey)
    asyncio.run(play(key, arguments.dial.split(","), arguments.agents))


if __name__ == "__main__":
    main()
