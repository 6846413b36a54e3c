"""The process that ``benchmarks.fuzz`` attacks: a real agent, a real node's runtime inside a training round, a real
pairing host with an open code, the reception where agents dial in to a cluster, and the server of a cluster's views.

Commands on standard input, one JSON array a line, each answered with one JSON line on standard output:

``["roster", rows]``  the node's roster, as dictionaries of NodeAddress; then its job is in a round with all of them
``["agents", keys]``  the public keys of the agents that the reception lets in and has a link for
``["next"]``          a new cell and a new attempt of the round, as a cluster would come to
``["counts"]``        frames dropped so far, by port
"""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from notebook_cluster.agent import AgentReady, AgentSettings
from notebook_cluster.agent.service import Agent
from notebook_cluster.codecs import WireFormat
from notebook_cluster.coordinator.view_server import View, ViewServer
from notebook_cluster.link import Dialer
from notebook_cluster.link.inbound_listener import InboundListener
from notebook_cluster.node.runtime.node_runtime import NodeRuntime
from notebook_cluster.node.runtime.world import CellInfo
from notebook_cluster.pairing import PairingHost
from notebook_cluster.protocol import PROTOCOL_VERSION, decode, encode
from notebook_cluster.protocol.node import FromNodeBody, NodeAddress, NodeHello, Roster
from notebook_cluster.protocol.pairing import Here
from notebook_cluster.protocol.rounds import Member, OuterSettings, Seal, Slice
from notebook_cluster.protocol.runs import Register, Registered
from notebook_cluster.protocol.views import Ping, RequestError
from notebook_cluster.protocol.wire import Message
from notebook_cluster.rounds.member import events_effects as member_types
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.outer import float_bits, state_hash
from notebook_cluster.rounds.numerics.vectors import TensorLayout
from notebook_cluster.security import new_identity
from notebook_cluster.security.codes import OpenCode, new_code
from notebook_cluster.sockets import Pump
from notebook_cluster.training.background.job import Job
from notebook_cluster.training.checkpointing.saving import Description

JOB = "model"
ELEMENTS = 4096
NODE = "node"
IN_ROUND_TIMEOUT = 15.0


class TrainingNode:
    """A node as inside a kernel, with this process as its agent and coordinator."""

    def __init__(self, folder: Path, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        control = f"ipc://{folder}/control"
        router.bind(control)
        self._pump = Pump(router, self._from_node)
        self._routing_id = b""
        self.hello: asyncio.Future[NodeHello] = asyncio.get_running_loop().create_future()
        self.runtime = NodeRuntime(NODE, 1, device="cpu", control=control, sockets=None, directory=folder)
        self._job = Job(self.runtime, JOB)
        self._roster: Roster | None = None
        self._number = 0
        self._admitted = False

    def _from_node(self, frames: list[bytes]) -> None:
        self._routing_id = frames[0]
        message = decode(frames[1], FromNodeBody)
        if isinstance(message, NodeHello) and not self.hello.done():
            self.hello.set_result(message)

    def _tell(self, message: Message) -> None:
        self._pump.send([self._routing_id, encode(message)])

    def begin(self, rows: list[dict[str, Any]]) -> None:
        """The cluster is there; a job is made, which goes into its first round in :meth:`in_round`."""
        self._roster = Roster(cluster="fuzz", generation=1, nodes=msgspec.convert(rows, list[NodeAddress]))
        self._tell(self._roster)
        theta, momentum = np.zeros(ELEMENTS, np.float32), np.zeros(ELEMENTS, np.float32)
        digest = state_hash(theta, momentum)
        job = self._job
        self.runtime.attach_job(JOB, job)
        layout = TensorLayout.of([("weight", [ELEMENTS], "float32")], [])
        register = Register(
            job=JOB, cell=1, strategy="DiLoCo", codec="float32", schema_hash="s", schema=layout.schema,
            parameters=ELEMENTS, every="100 steps", state_hash=digest,
        )  # fmt: skip
        job.register(register, Fragments("float32", ELEMENTS), theta, momentum, Description(layout, {}))
        self._base = digest

    def _go_on(self) -> None:
        """Bring the job to its first round, step by step: a message before its time would be dropped."""
        phase = self._job.member.phase
        if phase == "registering" and not self._admitted:
            self._admitted = True
            self._tell(Registered(job=JOB, round=0, state_hash=self._base, source=None))
            self._job.post_event(member_types.Boundary(bytes(ELEMENTS * 4), 1.0, 10))
        elif phase == "arrived":
            self.next()

    def next(self) -> None:
        """The cell ends and another one begins; the round is tried again."""
        assert self._roster is not None
        self._number += 1
        if self._number > 1:
            self.runtime.end_cell("ok")
        self.runtime.begin_cell(CellInfo(cell=self._number, generation=1))
        names = [row.name for row in self._roster.nodes]
        blocks = WireFormat("float32", ELEMENTS).blocks
        cuts = [blocks * index // len(names) for index in range(len(names) + 1)]
        weight = float_bits(1 / len(names))
        self._tell(
            Seal(
                job=JOB, round=1, attempt=self._number, base_hash=self._base, outer=OUTER,
                members=[Member(name=name, incarnation=1, weight_bits=weight, contribution=1) for name in names],
                slices=[Slice(owner=n, start=a, stop=b) for n, a, b in zip(names, cuts, cuts[1:], strict=False)],
            )
        )  # fmt: skip

    async def in_round(self) -> None:
        """Returns when the job has taken up the last SEAL: frames for it are dropped unread before.

        Raises:
            RuntimeError: it does not; what is sent to the mesh port then tests nothing.
        """
        deadline = time.monotonic() + IN_ROUND_TIMEOUT
        while not self._number or self._job.member.seen_attempt != (1, self._number):
            if not self._number:
                self._go_on()
            if time.monotonic() > deadline:
                phase = self._job.member.phase
                raise RuntimeError(f"the job is {phase!r}, not in round 1 and attempt {self._number}")
            await asyncio.sleep(0.01)

    def dropped(self) -> int:
        runtime, of_job = self.runtime, self._job.member.dropped
        return runtime._mesh.dropped + runtime.collectives.receiver.dropped + runtime._jobs.dropped + of_job


OUTER = OuterSettings(lr_bits=float_bits(0.5), momentum_bits=float_bits(0.9))


class Pairing:
    """A pairing host with a code that is always open: a dead one is followed by another."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", key: str, port: int) -> None:
        here = Here(protocol=PROTOCOL_VERSION, role="peer", name="mini", owner="ada@mini", key=key, port=port)
        self.host = PairingHost(
            context, "tcp://127.0.0.1:0", gate=None, here=lambda: here, on_paired=lambda partner: None,
            on_attempt=lambda line: None,
        )  # fmt: skip
        self.host.on_closed = self._open_again
        self.port = self.open()

    def open(self) -> int:
        return self.host.open(OpenCode(new_code(), single_use=False, valid_s=None))

    def _open_again(self, reason: str) -> None:
        asyncio.get_running_loop().call_soon(self.open)


class Reception:
    """Where agents dial in, with a coordinator's link over what each of them opened."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._context = context
        self._identity = new_identity()
        self._names: dict[str, str] = {}
        self._dialers: list[Dialer] = []
        self.inbound = InboundListener(
            context, "tcp://127.0.0.1:0", self._identity, authorise=self._names.get,
            on_arrival=lambda key, address: None,
        )  # fmt: skip
        self.port, self.key = self.inbound.start(), self._identity.public_key
        self.handled = 0
        """Messages of agents that were taken."""

    def let_in(self, keys: list[str]) -> None:
        for number, key in enumerate(keys):
            name = self._names[key] = f"agent{number}"
            dialer = Dialer(
                self._context, "", key, self._identity, cluster=f"fuzz{number}", epoch=1, sender="fuzz", peer=name,
                on_message=self._handle, on_condition=lambda condition, reason: None, reception=self.inbound,
            )  # fmt: skip
            dialer.start()
            self._dialers.append(dialer)

    def _handle(self, message: Message, buffers: list[bytes]) -> None:
        self.handled += 1

    def dropped(self) -> dict[str, int]:
        counts = dict(self.inbound.dropped)
        for dialer in self._dialers:
            for cause, count in dialer.dropped.items():
                counts[cause] = counts.get(cause, 0) + count
        return counts

    async def close(self) -> None:
        for dialer in self._dialers:
            await dialer.close(flush=0)
        self.inbound.close()


class Views:
    """The server of views, with one kind of question that has an answer."""

    def __init__(self) -> None:
        self.refused = 0
        self._server = ViewServer(self._answer, lambda view, clean: None)
        self.address = self._server.start()
        self.server_key, self.identity = self._server.socket.server.public_key, self._server.socket.view_identity
        self._tidying = asyncio.get_running_loop().create_task(self._tidy_up())

    async def _answer(self, view: View, body: Any) -> Any:
        if isinstance(body, Ping):
            return "pong"
        self.refused += 1
        raise RequestError("only a ping is answered here")

    async def _tidy_up(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            self._server.drop_silent()

    async def close(self) -> None:
        self._tidying.cancel()
        await self._server.close()


async def serve(folder: Path) -> None:
    """All of them until standard input ends."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # Private: it announces nothing on the network and opens no code of its own.
    agent = Agent(AgentSettings(name="local", directory=folder / "agent", private=True, bind="127.0.0.1"))
    ready: asyncio.Future[AgentReady] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(agent.run(ready.set_result))
    link = await ready
    node = TrainingNode(folder, context)
    hello = await asyncio.wait_for(node.hello, 20)
    pairing = Pairing(context, link.public_key, link.port)
    reception, views = Reception(zmq.Context()), Views()
    answer(
        reception_port=reception.port, reception_key=reception.key, views_address=views.address,
        views_key=views.server_key, views_identity=[views.identity.public_key, views.identity.secret_key],
        link_port=link.port, link_key=link.public_key, mesh_port=hello.mesh_port, mesh_key=hello.mesh_key,
        pairing_port=pairing.port,
    )  # fmt: skip

    def counts() -> None:
        dropped = {"link": dict(agent._listener.dropped), "mesh": node.dropped(), "pairing": dict(pairing.host.dropped)}
        answer(dropped=dropped | {"reception": reception.dropped(), "views": views.refused}, handled=reception.handled)

    commands: dict[str, Callable[..., None]] = {"roster": node.begin, "next": node.next, "counts": counts}
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, *arguments = json.loads(line)
        if name == "agents":
            reception.let_in(*arguments)
            answer(done=name)
            continue
        commands[name](*arguments)
        if name != "counts":
            await node.in_round()
            answer(done=name)
    agent.stop("the fuzzer has ended")
    await running
    pairing.host.close()
    await reception.close()
    await views.close()
    node.runtime.close()
    context.destroy(linger=0)


def answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    logging.basicConfig(filename=place / "log.txt", level=logging.WARNING)
    asyncio.run(serve(place))
