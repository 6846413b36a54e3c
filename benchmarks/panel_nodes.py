"""The process that plays many nodes for ``benchmarks.panel``: an agent at the end of a real link, without kernels.

Each node that a coordinator asks for starts at once, then says its memory, step and loss once a second. Prints the
port at which it can be added, then goes on until its input is closed.
"""

import argparse
import asyncio
import math
import sys
import time
from typing import Any

import zmq

from notebook_cluster.link import Listener, Session
from notebook_cluster.pairing import PairingHost
from notebook_cluster.protocol import PROTOCOL_VERSION, VERSION, encode
from notebook_cluster.protocol.node import NodeHello, Telemetry
from notebook_cluster.protocol.pairing import Here
from notebook_cluster.protocol.peer import (
    Device,
    DeviceSample,
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
from notebook_cluster.security.codes import OpenCode, new_code
from notebook_cluster.security.identity import announce, same_user_keys, withdraw

NAME = "players"
GB = 1e9
STEPS_PER_SECOND = 20
PAST_S = 600
"""Seconds of training that every node tells at once in the beginning: long curves cost more than short ones."""
TOTAL = 12 * 10**9


class Players:
    """The nodes of one cluster."""

    def __init__(self, session: Session, devices: int) -> None:
        self._session = session
        self._devices = devices
        self._nodes: dict[str, NodeStarted] = {}
        self._began = time.monotonic() - PAST_S
        self._past_told = False
        session.on_message = self._on_message
        session.on_restart = self._introduce
        self._introduce()

    def _introduce(self) -> None:
        self._session.send(Inventory(nodes=list(self._nodes.values())))
        devices = [
            Device(id=f"cuda:{index}", kind="cuda", name="NVIDIA RTX 4070", memory_bytes=TOTAL)
            for index in range(self._devices)
        ]
        self._session.send(
            PeerInfo(
                name=NAME, machine=NAME,
                devices=[*devices, Device(id="cpu", kind="cpu", name="cpu", memory_bytes=TOTAL)], hosts=["127.0.0.1"],
                python="3.12.0", platform=sys.platform, version=VERSION,
                protocol=PROTOCOL_VERSION,
            )
        )  # fmt: skip

    def _on_message(self, message: Message, buffers: list[bytes]) -> None:
        match message:
            case StartNode():
                self._start(message)
            case StopNode() if message.node in self._nodes:
                del self._nodes[message.node]
                self._session.send(
                    NodeEnded(node=message.node, incarnation=message.incarnation, asked=True, reason="stopped")
                )
            case Release():
                self._nodes.clear()
                self._session.send(Released())

    def _start(self, message: StartNode) -> None:
        started = NodeStarted(node=message.node, incarnation=message.incarnation, device=message.device, pid=1)
        self._nodes[message.node] = started
        self._session.send(started)
        hello = NodeHello(
            node=message.node, incarnation=message.incarnation, pid=1, mesh_key=new_identity().public_key,
            mesh_port=40000 + len(self._nodes), mesh_ipc="", master_port=50000 + len(self._nodes),
        )  # fmt: skip
        self._session.send(FromNode(node=message.node, incarnation=message.incarnation, body=encode(hello)))

    def speak(self) -> None:
        """What every node and the agent say once a second; the first time, with all nodes there, also their past."""
        seconds = time.monotonic() - self._began
        if not self._past_told and len(self._nodes) == self._devices:
            self._past_told = True
            for second in range(PAST_S):
                self._speak(float(second))
        self._speak(seconds)

    def _speak(self, seconds: float) -> None:
        nodes = list(self._nodes.values())
        memory = [int((2 + 0.5 * math.sin(seconds / 9 + rank)) * GB) for rank in range(len(nodes))]
        devices = [
            DeviceSample(id=node.device, memory_used=used, memory_total=TOTAL, load=0.9, temperature=61.0)
            for node, used in zip(nodes, memory, strict=True)
        ]
        samples = [
            NodeSample(node=node.node, rss=used, rss_peak=int(2.5 * GB), device_memory=used, cpu=0.7)
            for node, used in zip(nodes, memory, strict=True)
        ]
        self._session.send(
            PeerSample(time=time.time(), cpu=0.5, ram_used=TOTAL // 2, ram_total=TOTAL, devices=devices, nodes=samples)
        )
        for rank, node in enumerate(nodes):
            self._session.send(
                FromNode(
                    node=node.node, incarnation=node.incarnation, body=encode(_telemetry(rank, seconds, memory[rank]))
                )
            )


def _telemetry(rank: int, seconds: float, memory: int) -> Telemetry:
    """A second of training: STEPS_PER_SECOND new losses."""
    last, now = int(seconds * STEPS_PER_SECOND), time.time()
    history = [
        (step, now - (last - step) / STEPS_PER_SECOND, 2.3 * math.exp(-step / 900) + 0.05 * math.sin(step + rank))
        for step in range(last - STEPS_PER_SECOND + 1, last + 1)
    ]
    accuracy = 1 - math.exp(-last / 900)
    return Telemetry(
        step=last, loss=history[-1][2], scalars={"accuracy": accuracy}, samples_per_s=900.0 + rank,
        memory_used=memory, memory_peak=int(2.5 * GB), waiting=f"round {last // 500}",
        history={"loss": history, "accuracy": [(last, now, accuracy)]}, sent=now,
    )  # fmt: skip


async def serve(nodes: int) -> None:
    """Play up to ``nodes`` nodes until the input is closed."""
    identity, context, clusters = new_identity(), zmq.Context[Any](), list[Players]()
    announcement = announce("agent", identity.public_key, NAME)
    gate = Gate(context)
    listener = Listener(
        context, "tcp://127.0.0.1:0", identity, gate=gate,
        authorise=lambda key: same_user_keys("coordinator").get(key),
        on_session=lambda session: clusters.append(Players(session, nodes)),
    )  # fmt: skip
    port = listener.start()
    host = PairingHost(
        context, "tcp://127.0.0.1:0", gate=gate, on_paired=lambda partner: None, on_attempt=lambda line: None,
        here=lambda: Here(
            protocol=PROTOCOL_VERSION, role="peer", name=NAME, owner="benchmark", key=identity.public_key, port=port
        ),
    )  # fmt: skip
    print(host.open(OpenCode(new_code(), single_use=False)), flush=True)
    ending = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    try:
        while not ending.done():
            for players in clusters:
                players.speak()
            await asyncio.wait([ending], timeout=1.0)
    finally:
        withdraw(announcement)
        host.close()
        await listener.close()
        gate.close()
        context.destroy(linger=0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.panel_nodes", description="nodes without kernels")
    parser.add_argument("--nodes", type=int, required=True)
    asyncio.run(serve(parser.parse_args().nodes))
