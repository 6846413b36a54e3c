"""A cluster for tests of the magics: the client's methods, fed from scripts; the cell's first line names its script.

It runs inside a real kernel, so that what the magics publish is what a frontend gets.
"""

import time
from types import SimpleNamespace

from notebook_cluster.client import ClusterError
from notebook_cluster.protocol.state import CellView, ClusterView, NodeView
from notebook_cluster.protocol.views import CellChanged, CellEnded, CellOutput, NodeResult, Output

NODES = ("mini", "desk")


def stream_text(node, text):
    return Output(node=node, rank=NODES.index(node), kind="stream", content={"name": "stdout", "text": text})


def result_text(node, text):
    content = {"data": {"text/plain": text}, "metadata": {}}
    return Output(node=node, rank=NODES.index(node), kind="execute_result", content=content)


def ended(cell, status, **changed):
    """The end of a cell; ``changed`` replaces the results of single nodes."""
    each = "ok" if status == "error" else status
    return CellEnded(cell=cell, status=status, results={node: NodeResult(status=each) for node in NODES} | changed)


class ScriptedCluster:
    name = "digits"
    attached = False
    connected = True

    def __init__(self):
        self.asked = []
        self.interrupts = []
        self.closed = False
        self.running = None
        self.latest = self.state()

    def state(self):
        nodes = [
            NodeView(name=name, rank=rank, peer=name, device="cpu", device_name="cpu", incarnation=1, condition="ok")
            for rank, name in enumerate(NODES)
        ]
        return ClusterView(
            name=self.name, epoch=1, generation=2, started=0.0, now=0.0, nodes=nodes, peers=[], jobs=[],
            cell=self.running, queued=0, events=[], directory="", run_log="",
        )  # fmt: skip

    def text_file(self, cell, node):
        return f"/run/cells/{cell:06d}/{node}.txt"

    def series(self):
        return []

    def execute(self, source, targets=(), **options):
        self.asked.append((source, list(targets), options))
        if source.startswith("# refuse"):
            raise ClusterError("node 'desk' is starting: try again in a second")
        return ScriptedStream(self, source, len(self.asked))

    def watch(self, cell, **options):
        return ScriptedStream(self, "# forever", cell)

    def interrupt(self, force=False, cell=0):
        self.interrupts.append(force)
        return ["desk"]

    def subscribe(self, callback):
        return lambda: None

    def close(self, *, clean=False):
        self.closed = True


class ScriptedStream:
    def __init__(self, cluster, source, cell):
        self.cell = cell
        self._cluster = cluster
        self._events = SCRIPTS.get(source.partition("\n")[0].removeprefix("# "), answers)(cluster, cell)

    def get(self, timeout):
        event = next(self._events)
        if event is None:
            time.sleep(timeout)
        return event

    def wake(self):
        """A look at Stop comes with the next event."""

    def close(self):
        self._events.close()


def answers(cluster, cell):
    for node in reversed(NODES):
        yield CellOutput(cell=cell, outputs=[result_text(node, "2")])
    yield ended(cell, "ok")


def fails(cluster, cell):
    traceback = ["\x1b[31mTraceback of mini\x1b[0m", "ValueError: bad"]
    content = {"ename": "ValueError", "evalue": "bad", "traceback": traceback}
    yield CellOutput(cell=cell, outputs=[Output(node="mini", rank=0, kind="error", content=content)])
    lost = NodeResult(status="error", error_name="PeerLost", error_value="mini raised ValueError: bad")
    yield ended(cell, "error", desk=lost, mini=NodeResult(status="error", error_name="ValueError", error_value="bad"))


def fails_everywhere(cluster, cell):
    bad = NodeResult(status="error", error_name="ValueError", error_value="bad")
    yield ended(cell, "error", desk=bad, mini=bad)


def loses(cluster, cell):
    reason = NodeResult(status="lost", reason="killed by SIGKILL (out of memory?)", log_tail=["last words"])
    yield ended(cell, "error", desk=reason)


def misses_a_name(cluster, cell):
    value = "name 'made_here' is not defined"
    yield ended(cell, "error", mini=NodeResult(status="error", error_name="NameError", error_value=value))


def forever(cluster, cell):
    yield CellChanged(cell=cell, nodes=dict.fromkeys(NODES, "running"))
    yield CellOutput(cell=cell, outputs=[stream_text("mini", "working\n")])
    while not cluster.interrupts:
        yield None
    yield ended(cell, "interrupted")


def stubborn(cluster, cell):
    yield CellChanged(cell=cell, nodes={"mini": "interrupted", "desk": "running"})
    yield CellOutput(cell=cell, outputs=[stream_text("desk", "working\n")])
    while True not in cluster.interrupts:
        yield None
    yield ended(cell, "interrupted", desk=NodeResult(status="lost", reason="killed after the second Stop"))


def detaches(cluster, cell):
    yield ended(cell, "detached")


def dies(cluster, cell):
    yield CellOutput(cell=cell, outputs=[stream_text("mini", "half\n")])
    raise ClusterError("cluster 'digits' has ended: its coordinator was killed")


SCRIPTS = SimpleNamespace(
    fails=fails,
    fails_everywhere=fails_everywhere,
    loses=loses,
    misses_a_name=misses_a_name,
    forever=forever,
    stubborn=stubborn,
    detaches=detaches,
    dies=dies,
).__dict__


def running_cell():
    return CellView(id=7, source="train()", status="running", nodes={})
