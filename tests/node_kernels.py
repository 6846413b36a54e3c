"""Real kernels with the node side loaded; the test plays the agent and the coordinator."""

import os
import queue
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from notebook_cluster.protocol import decode, encode
from notebook_cluster.protocol.node import FromNodeBody, NodeAddress, NodeHello, Roster, ToNodeBody
from tests.conftest import wait_until
from tests.ipc_kernels import start_kernel

ARGUMENTS = [
    sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--HistoryManager.enabled=False",
    "--IPKernelApp.extra_extensions=notebook_cluster.node",
]  # fmt: skip


class NodeKernel:
    """One kernel and what its runtime has said."""

    def __init__(self, cluster: "NodeKernels", name: str, incarnation: int) -> None:
        self.name, self.incarnation = name, incarnation
        self.messages: list[Any] = []
        self._cluster = cluster
        sockets = cluster.directory / f"k-{name}-{incarnation}"
        self.manager, self.client = start_kernel(
            sockets,
            ARGUMENTS,
            ready=None,
            env=os.environ | cluster.environment(name, incarnation),
            cwd=str(cluster.directory),
        )

    def said(self, kind: type) -> list[Any]:
        """Messages of this kind from the runtime, oldest first."""
        self._cluster.pump()
        return [message for message in self.messages if isinstance(message, kind)]

    def start(self, code: str, metadata: dict[str, Any] | None = None, silent: bool = False) -> str:
        """Send an execute_request with the coordinator's metadata; returns its message id."""
        content = {
            "code": code, "silent": silent, "store_history": not silent, "user_expressions": {}, "allow_stdin": False,
            "stop_on_error": False,
        }  # fmt: skip
        message = self.client.session.msg("execute_request", content)
        if metadata is not None:
            message["metadata"] = {"notebook_cluster": metadata}
        self.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def finish(self, message_id: str, timeout: float = 60) -> dict[str, Any]:
        """The content of the reply to ``message_id``, with ``text``: all that it printed and its result."""
        reply: dict[str, Any] = {}

        def replied() -> bool:
            self._cluster.pump()
            while not reply and self.client.shell_channel.msg_ready():
                message = self.client.get_shell_msg(timeout=1)
                if message["parent_header"].get("msg_id") == message_id:
                    reply.update(message["content"])
            return bool(reply)

        wait_until(replied, timeout, lambda: f"the reply of {self.name}")
        text = ""
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return reply | {"text": text}
            if kind == "stream":
                text += content["text"]
            elif kind == "execute_result":
                text += content["data"]["text/plain"]

    def hears(self) -> bool:
        """True once the kernel's output reaches this client: a subscription takes effect some time after connecting."""
        self.client.kernel_info()
        try:
            self.client.get_iopub_msg(timeout=0.2)
        except queue.Empty:
            return False
        return True

    def run(self, code: str, metadata: dict[str, Any] | None = None, silent: bool = False) -> dict[str, Any]:
        return self.finish(self.start(code, metadata, silent))

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


class NodeKernels:
    """Starts kernels, answers their runtimes, runs cells on all of them."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="nbk-", dir="/tmp"))
        self.nodes: dict[str, NodeKernel] = {}
        self.roster = Roster(cluster="test", generation=0, nodes=[])
        self.cells = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(f"ipc://{self.directory}/agent")

    def environment(self, name: str, incarnation: int) -> dict[str, str]:
        return {
            "NOTEBOOK_CLUSTER_CONTROL": f"ipc://{self.directory}/agent",
            "NOTEBOOK_CLUSTER_NODE": name,
            "NOTEBOOK_CLUSTER_INCARNATION": str(incarnation),
            "NOTEBOOK_CLUSTER_DEVICE": "cpu",
            "NOTEBOOK_CLUSTER_SOCKETS": str(self.directory),
            "IPYTHONDIR": str(self.directory / "ipython"),
        }

    def start(self, *names: str, incarnation: int = 1) -> None:
        """Start kernels and wait until each has said NodeHello."""
        for name in names:
            self.nodes[name] = NodeKernel(self, name, incarnation)
        for name in names:
            wait_until(lambda name=name: self.nodes[name].said(NodeHello), 60, f"NodeHello of {name}")  # type: ignore[misc]
            wait_until(self.nodes[name].hears, 60, f"output of {name}")

    def pump(self) -> None:
        """Take in what the runtimes have said."""
        while self._router.poll(0):
            routing_id, body = self._router.recv_multipart()
            name, _, incarnation = routing_id.decode().rpartition("/")
            node = self.nodes.get(name)
            if node is not None and str(node.incarnation) == incarnation:
                node.messages.append(decode(body, FromNodeBody))

    def tell(self, name: str, message: ToNodeBody) -> None:
        node = self.nodes[name]
        self._router.send_multipart([f"{name}/{node.incarnation}".encode(), encode(message)])

    def tell_all(self, message: ToNodeBody) -> None:
        for name in self.nodes:
            self.tell(name, message)

    def publish(self, *names: str, generation: int | None = None, peers: dict[str, str] | None = None) -> Roster:
        """A new roster of ``names`` (default: all) in this order, sent to every kernel."""
        rows = []
        for rank, name in enumerate(names or self.nodes):
            hello = self.nodes[name].said(NodeHello)[-1]
            peer = (peers or {}).get(name, "one")
            rows.append(
                NodeAddress(
                    name=name, incarnation=hello.incarnation, rank=rank, local_rank=rank, peer=peer, machine="here",
                    device="cpu", hosts=["10.1.2.3", "127.0.0.1"], mesh_key=hello.mesh_key,
                    mesh_port=hello.mesh_port, mesh_ipc=hello.mesh_ipc, master_port=hello.master_port,
                )
            )  # fmt: skip
        self.roster = Roster(cluster="test", generation=generation or self.roster.generation + 1, nodes=rows)
        self.tell_all(self.roster)
        return self.roster

    def metadata(self, **more: Any) -> dict[str, Any]:
        """What the coordinator would write into the next cell's execute_request."""
        self.cells += 1
        names = [node.name for node in self.roster.nodes]
        return {"cell": self.cells, "generation": self.roster.generation, "nodes": names} | more

    def run(self, code: str, **more: Any) -> list[dict[str, Any]]:
        """Run a cell on every node of the roster; replies in rank order."""
        metadata = self.metadata(**more)
        started = [(self.nodes[row.name], self.nodes[row.name].start(code, metadata)) for row in self.roster.nodes]
        return [node.finish(message_id) for node, message_id in started]

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def node_kernels(*names: str) -> Iterator[NodeKernels]:
    """Kernels with these names, in one roster, on one peer."""
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    kernels = NodeKernels()
    try:
        kernels.start(*names)
        kernels.publish()
        yield kernels
    finally:
        kernels.close()


def changed(roster: Roster, name: str, **fields: Any) -> Roster:
    """``roster`` with other ``fields`` in the row of ``name``."""
    rows = [msgspec.structs.replace(row, **fields) if row.name == name else row for row in roster.nodes]
    return msgspec.structs.replace(roster, nodes=rows)
