"""Agents that were paired and lie: they speak for their own nodes only, and what others are told of them is checked."""

import asyncio
import json
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from notebook_cluster.client import ClusterError
from notebook_cluster.link import Listener, Session
from notebook_cluster.protocol import PROTOCOL_VERSION, VERSION, Message, encode
from notebook_cluster.protocol import peer as p
from notebook_cluster.protocol.node import NodeHello
from notebook_cluster.security import Trusted, new_identity, trusted_peers
from tests.cluster import node, run, running_cluster
from tests.conftest import wait_until

pytestmark = pytest.mark.usefixtures("work")


class Liar:
    """An agent in this process that is trusted as ``liar``; ``answer`` says what it does with a StartNode."""

    def __init__(self, answer: Callable[["Liar", p.StartNode], None]) -> None:
        self._answer = answer
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.running: list[p.NodeStarted] = []
        """What it says when it is asked, and only then."""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="liar")
        self._thread.start()
        identity = new_identity()
        self._listener = Listener(
            self._context, "tcp://127.0.0.1:0", identity, authorise=lambda key: "somebody", on_session=self._session
        )
        port = asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(10)
        trusted_peers().add(Trusted("liar", identity.public_key, "liar@there", f"127.0.0.1:{port}"))

    async def _start(self) -> int:
        return self._listener.start()

    def _session(self, session: Session) -> None:
        self.session = session
        session.on_message = self._heard
        session.send(p.Inventory(nodes=[]))
        cpu = p.Device(id="cpu", kind="cpu", name="cpu", memory_bytes=1 << 30)
        hosts = ["127.0.0.1", "not an address", "<b>"]
        session.send(
            p.PeerInfo(
                name="local", machine="m" * 5000, devices=[cpu] * 500, hosts=hosts, python="3", platform="p",
                version=VERSION, protocol=PROTOCOL_VERSION,
            )
        )  # fmt: skip

    def _heard(self, message: Message, buffers: list[bytes]) -> None:
        if isinstance(message, p.StartNode):
            self._answer(self, message)
        elif isinstance(message, p.AskInventory):
            self.session.send(p.Inventory(nodes=self.running))
        elif isinstance(message, p.Release):
            self.session.send(p.Released())

    def hello(self, start: p.StartNode, **changed: object) -> None:
        """Say that the kernel of ``start`` is up."""
        fields: dict[str, object] = {
            "node": start.node, "incarnation": start.incarnation, "pid": 1, "mesh_key": new_identity().public_key,
            "mesh_port": 9, "mesh_ipc": "", "master_port": 9,
        }  # fmt: skip
        body = encode(NodeHello(**(fields | changed)))  # type: ignore[arg-type]
        self.session.send(p.FromNode(node=start.node, incarnation=start.incarnation, body=body))

    def say(self, message: Message, parts: list[bytes] | None = None) -> None:
        """From the test's thread."""
        self.loop.call_soon_threadsafe(self.session.send, message, parts or [])

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._listener.close(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()
        self._context.destroy(linger=0)


@contextmanager
def liar(answer: Callable[[Liar, p.StartNode], None]) -> Iterator[Liar]:
    agent = Liar(answer)
    try:
        yield agent
    finally:
        agent.close()


def printed(text: str, cell: str) -> list[bytes]:
    """The parts of a Jupyter message with which a kernel prints, in answer to ``cell``."""
    header = {"msg_id": secrets.token_hex(8), "msg_type": "stream", "session": "s", "username": "u", "version": "5.3"}
    content = {"name": "stdout", "text": text}
    return [json.dumps(part).encode() for part in (header, {"msg_id": cell}, {}, content)]


def test_an_agent_speaks_for_its_own_nodes_only() -> None:
    with liar(lambda agent, start: agent.hello(start)) as agent, running_cluster(local=1) as cluster:
        assert cluster.add("liar") == ["liar"]
        stream = cluster.execute("import time\nfor _ in range(40): time.sleep(0.05)\nprint('mine')", ("local",))
        agent.say(p.NodeEnded(node="local", incarnation=1, asked=False, reason="forged"))
        agent.say(p.NodeRefused(node="local", incarnation=1, reason="forged"))
        forged = p.FromKernel(node="local", incarnation=1, channel="iopub")
        agent.say(forged, printed("forged", f"{stream.cell}-local-1"))
        agent.say(p.FromNode(node="local", incarnation=1, body=encode(NodeHello(
            node="local", incarnation=1, pid=1, mesh_key=new_identity().public_key, mesh_port=1, mesh_ipc="",
            master_port=1,
        ))))  # fmt: skip
        # Messages of one link are in order: when this one has an effect, those before it had none.
        agent.say(p.Slept(seconds=77.0))
        wait_until(lambda: any("liar slept for 77 s" in event.text for event in cluster.state().events), 60, "its end")
        row = node(cluster.state(), "local")
        assert (row.condition, row.incarnation) == ("ok", 1)
        outputs = []
        while (event := stream.get(10)) is not None:
            if hasattr(event, "results"):
                assert event.results["local"].status == "ok"
                break
            outputs += getattr(event, "outputs", [])
        assert [output.content["text"] for output in outputs] == ["mine\n"]


@pytest.mark.parametrize(
    "changed",
    [
        {"mesh_key": "k" * 41},
        {"mesh_key": "\n" * 40},
        {"mesh_port": 0},
        {"mesh_port": 1 << 40},
        {"master_port": -1},
        {"mesh_ipc": "ipc:///" + "x" * 5000},
    ],
    ids=["long key", "odd key", "port 0", "port over", "negative port", "long path"],
)
def test_a_mesh_address_that_cannot_be_used_is_told_to_nobody(changed: dict[str, object]) -> None:
    with liar(lambda agent, start: agent.hello(start, **changed)), running_cluster(local=1) as cluster:
        with pytest.raises(ClusterError, match="mesh address that cannot be used"):
            cluster.add("liar")
        assert run(cluster, "print(world_size)") == {"local": "1\n"}


def test_a_machine_that_did_not_notice_its_silence_is_asked_what_it_holds() -> None:
    awake = threading.Event()
    with liar(lambda agent, start: agent.hello(start)) as agent, running_cluster(local=0) as cluster:
        cluster.add("liar")
        agent.running = [p.NodeStarted(node="liar", incarnation=1, device="cpu", pid=1)]

        def condition() -> str:
            return node(cluster.state(), "liar").condition

        agent.loop.call_soon_threadsafe(awake.wait, 120)
        try:
            wait_until(lambda: condition() == "lost", 60, "the loss")
        finally:
            awake.set()
        wait_until(lambda: condition() == "ok", 60, lambda: f"the return: {cluster.state()}")
