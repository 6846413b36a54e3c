"""What the panel of a large cluster and the strip of a training cost: processor time, traffic and redraws of the
notebook, and the coordinator.

A real coordinator has nodes that are played by one process, ``benchmarks.panel_nodes``: each says its memory, step and
losses once a second, over a real link. The panel is shown in the kernel of a notebook whose frontend reads everything.
Their first words are ten minutes of training, because long curves cost more than short ones.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import zmq

from benchmarks.common import private_folders
from benchmarks.notebook import Notebook, notebook

DELIMITER = b"<IDS|MSG>"
STRIP: dict[str, Any] = {"strip": True}
"""Stands for an output that changed: the strip is the only one."""
SETTLED = 3
"""Curves drawn since the last node came in: then the figure is loaded, and the past is shown."""
TIMEOUT = 60.0


class Traffic:
    """Reads what the kernel publishes, as a Jupyter server does that passes it on to a browser."""

    def __init__(self, opened: Notebook) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(opened.manager._make_url("iopub"))

    def _messages(self, seconds: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """(bytes, changed state) of the comm messages of the next ``seconds``, and of outputs that change."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not self._socket.poll(int(left * 1000)):
                return
            frames = self._socket.recv_multipart()
            parts = frames[frames.index(DELIMITER) + 2 :]
            kind = json.loads(parts[0])["msg_type"]
            if kind == "comm_msg":
                yield sum(len(part) for part in parts), json.loads(parts[3])["data"].get("state", {})
            elif kind == "update_display_data":
                yield sum(len(part) for part in parts), STRIP

    def settle(self) -> None:
        """Return when the panel only shows what is new any more."""
        drawn = 0
        for _, state in self._messages(TIMEOUT):
            if state.get("_py2js_addTraces"):
                drawn = 0
            drawn += bool(state.get("_py2js_update"))
            if drawn >= SETTLED:
                return
        raise RuntimeError(f"the panel drew no curves within {TIMEOUT:g} s")

    def count(self, seconds: float) -> tuple[int, int]:
        """(bytes, redraws) of what changes in the next ``seconds``."""
        size, redraws = 0, 0
        for length, state in self._messages(seconds):
            size += length
            redraws += _redraws(state)
        return size, redraws

    def close(self) -> None:
        self._context.destroy(linger=0)


def _redraws(state: dict[str, Any]) -> bool:
    """True for a message that makes the browser draw: cards, or curves. Plotly also sends numbers of its messages."""
    return (
        "state" in state or state is STRIP or any(name.startswith("_py2js_") and value for name, value in state.items())
    )


def measure(nodes: int, seconds: float) -> dict[str, float]:
    """Figures of ``seconds`` with ``nodes`` nodes."""
    with private_folders(), notebook() as opened:
        player = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.panel_nodes", "--nodes", str(nodes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert player.stdout is not None
        assert player.stdin is not None
        traffic = Traffic(opened)
        try:
            port = int(player.stdout.readline())
            opened.run(
                "from notebook_cluster.client import Cluster\n"
                "from benchmarks.panel_strip import show_strip, show_training_panel\n"
                f"cluster = Cluster.start('benchmark', local=0)\ncluster.add('127.0.0.1:{port}', {nodes})"
            )
            coordinator = psutil.Process(int(_printed(opened, "print(cluster.connection.file.pid)")))
            opened.run(
                "import time\nwhile len(cluster.series()) < 3 * len(cluster.state().nodes):\n    time.sleep(0.2)\n"
                "show_training_panel(cluster)"
            )
            opened.run("strip = show_strip(cluster, get_ipython())")
            traffic.settle()
            figures = _watch(psutil.Process(opened.pid), coordinator, traffic, seconds)
            opened.run("cluster.stop()")
        finally:
            traffic.close()
            player.stdin.close()
            player.wait(20)
    return figures


def _watch(kernel: psutil.Process, coordinator: psutil.Process, traffic: Traffic, seconds: float) -> dict[str, float]:
    before, began = [_busy(process) for process in (kernel, coordinator)], time.monotonic()
    size, redraws = traffic.count(seconds)
    took = time.monotonic() - began
    after = [_busy(process) for process in (kernel, coordinator)]
    return {
        "kernel_cpu": round((after[0] - before[0]) / took, 3),
        "websocket_kb_s": round(size / took / 1000, 1),
        "redraws_per_s": round(redraws / took, 2),
        "coordinator_cpu": round((after[1] - before[1]) / took, 3),
        "coordinator_mb": round(coordinator.memory_info().rss / 1e6, 1),
    }


def _busy(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _printed(opened: Notebook, cell: str) -> str:
    """What ``cell`` prints."""
    request = opened.start(cell)
    text = ""
    while True:
        message = opened.client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != request:
            continue
        if message["msg_type"] == "stream":
            text += message["content"]["text"]
        elif message["content"].get("execution_state") == "idle":
            return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.panel", description="what the panel costs")
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to measure")
    arguments = parser.parse_args()
    result: dict[str, object] = {"benchmark": "panel", "nodes": arguments.nodes}
    print(json.dumps(result | measure(arguments.nodes, arguments.seconds)))


if __name__ == "__main__":
    main()
