"""The hosts of :mod:`benchmarks.links`: a cluster across network namespaces, and the cells that train on it."""

import contextlib
import functools
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import last_answer
from benchmarks.links import Case, bits_per_second
from benchmarks.slept import MODEL
from tests.conftest import wait_until
from tests.hosts import CLUSTER, HostNotebook, Share, notebook_on
from tests.namespaces import Host, Network

CODE = "tiger-lamp-42"
_QUEUE = "50ms"
"""How long a packet waits for a slow cable before it is dropped: about what home routers have."""

SET_UP = (
    "\n%%on_all --no-replay"
    + MODEL
    + """
STEP = {step}

def work(model, gradients, number):
    "What step `number` changes: gradients of all, or one part of the parameters."
    if gradients:
        for parameter, gradient in zip(model, noise):
            parameter.grad = gradient
    else:
        change(model, number)

class Meter:
    "Counts what happens between its making and `show`, and how much of it is in steps."
    def __init__(self):
        self.steps = self.busy_in_steps = 0.0
        self.began, self.busy, self.sent = time.perf_counter(), time.process_time(), sent()

    def step(self, *what):
        "Work, then sleep."
        began, busy = time.perf_counter(), time.thread_time()
        work(*what)
        sleep_until(began + STEP)
        self.steps += time.perf_counter() - began
        self.busy_in_steps += time.thread_time() - busy

    def show(self):
        busy = time.process_time() - self.busy - self.busy_in_steps
        print(json.dumps([self.steps, time.perf_counter() - self.began, busy, sent() - self.sent]))

def sent():
    "Bytes that this host's network card has sent."
    with open("/proc/net/dev") as lines:
        return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("eth0:"))
"""
)

PREPARE = """
%%on_all --no-replay
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sync = {source}
for number in range({every}):
    work(model, {gradients}, number)
    sync.step()
sync.finish()
"""
"""The start (all take over the model of rank 0) and a first round, while the cables are fast."""

TRAIN = """
%%on_all --no-replay
nc.barrier()
for number in range({lead}):
    work(model, {gradients}, number)
    sync.step()
meter = Meter()
for number in range({steps}):
    meter.step(model, {gradients}, number)
    sync.step()
meter.show()
sync.finish()
"""
"""``lead``: two rounds without sleep, so that time is taken from one contribution under way to another, and in memory
that was used before."""

GLOO = """
%%on_all --no-replay
import torch.distributed
nc.torch_distributed("gloo")
gradients = torch.cat(noise)
torch.distributed.all_reduce(gradients[:1])
torch.distributed.barrier()
meter = Meter()
for number in range({steps}):
    meter.step(noise, False, number)
    torch.distributed.all_reduce(gradients)
    gradients /= world_size
meter.show()
"""


@dataclass(frozen=True)
class Measurement:
    """``compute_share``, ``seconds`` and ``busy`` (the processor's seconds on one node, all threads, without those of
    steps): means over the nodes; ``megabytes``: sent by the host that sent most."""

    compute_share: float
    seconds: float
    busy: float
    megabytes: float


class TrainingHosts:
    """A running cluster, one node on each host, and the cells that train on it."""

    def __init__(self, network: Network, notebook: HostNotebook, parameters: int, step: float) -> None:
        self._network, self._notebook = network, notebook
        self._nodes = ["local", *(name for name in network.hosts if name != notebook.host.name)]
        run_cell(self._notebook, SET_UP.format(parameters=parameters, step=step), 120)

    def train(self, case: Case, rate: str, rounds: int, expected: float) -> Measurement:
        """Train ``rounds`` rounds over cables of ``rate``, which should take about ``expected`` seconds.

        Raises:
            RuntimeError: a cell failed; with its error.
        """
        steps = rounds * case.every
        if case.source:
            gradients = case.strategy == "DataParallel"
            run_cell(self._notebook, PREPARE.format(source=case.source, every=case.every, gradients=gradients), 120)
            source = TRAIN.format(lead=2 * case.every, steps=steps, gradients=gradients)
        else:
            source = GLOO.format(steps=steps)
        try:
            for host in self._network.hosts.values():
                slow_down(self._network, host, rate)
            found = answers(self._notebook, self._nodes, source, 120 + 3 * expected)
        finally:
            for host in self._network.hosts.values():
                speed_up(self._network, host)
        return Measurement(
            statistics.mean(in_steps / total for in_steps, total, _, _ in found),
            statistics.mean(total for _, total, _, _ in found),
            statistics.mean(busy for _, _, busy, _ in found),
            max(sent for _, _, _, sent in found) / 1e6,
        )


def run_cell(notebook: HostNotebook, source: str, timeout: float) -> None:
    """Raises RuntimeError with the error of a cell that failed."""
    cell = notebook.until(notebook.start(source), timeout=timeout)
    if cell.error is not None:
        raise RuntimeError(f"{source}failed: {cell.error.name}: {cell.error.value}")


def answers(notebook: HostNotebook, nodes: Sequence[str], source: str, timeout: float) -> list[Any]:
    """Run a cell; what the last line of JSON that each of ``nodes`` printed in it says.

    Raises:
        RuntimeError: it failed.
    """
    before = {node: len(notebook.printed(node)) for node in nodes}
    run_cell(notebook, source, timeout)

    def answer(node: str) -> list[Any]:
        return last_answer(notebook.printed(node)[before[node] :])

    # the coordinator may still be writing down what was printed last
    return [wait_until(functools.partial(answer, node), what=f"the answer of {node}")[0] for node in nodes]


@contextlib.contextmanager
def notebook_and_hosts(nodes: int) -> Iterator[tuple[Network, HostNotebook, list[str]]]:
    """A cluster across ``nodes`` hosts that is gone afterwards, its notebook, and its nodes in rank order."""
    names = [f"host-{number}" for number in range(nodes)]
    with Network(*names) as network:
        for name in names[1:]:
            Share(network[name], "--code", CODE)
        with notebook_on(network[names[0]]) as notebook:
            notebook.works(f"%cluster start {CLUSTER} --peers all --code {CODE} --no-panel")
            members = ["local", *names[1:]]
            notebook.wait_for_nodes(set(members))
            yield network, notebook, members


@contextlib.contextmanager
def training_hosts(nodes: int, parameters: int, step: float) -> Iterator[TrainingHosts]:
    """:func:`notebook_and_hosts`, for a model of ``parameters`` parameters."""
    with notebook_and_hosts(nodes) as (network, notebook, _):
        yield TrainingHosts(network, notebook, parameters, step)


def slow_down(network: Network, host: Host, rate: str) -> None:
    """From now on ``host`` sends and receives at most ``rate`` (as tc takes it)."""
    # What may leave at once: tbf needs a tick of the kernel's clock (4 ms at most) of it to reach the rate.
    burst = max(16_000, int(bits_per_second(rate) / 8 * 0.005))
    for namespace, device in _ends(network, host):
        _tc(namespace, "replace", device, "tbf", "rate", rate, "burst", str(burst), "latency", _QUEUE)


def speed_up(network: Network, host: Host) -> None:
    """The cable is as fast as the machine again."""
    for namespace, device in _ends(network, host):
        _tc(namespace, "delete", device)


def _ends(network: Network, host: Host) -> list[tuple[str, str]]:
    return [(host.namespace, "eth0"), (network.lan, host.port)]


def _tc(namespace: str, verb: str, device: str, *words: str) -> None:
    command = ["tc", "-n", namespace, "qdisc", verb, "dev", device, "root", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
