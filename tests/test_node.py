"""A kernel as a node: real kernels with the extension loaded, the test plays agent and coordinator."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from notebook_cluster.protocol.node import CellDone, NodeHello, NodeLog, NodeLost, Telemetry
from notebook_cluster.protocol.rounds import Finished, LeftRounds
from notebook_cluster.protocol.runs import RegisterRefused
from tests.conftest import wait_until
from tests.node_kernels import NodeKernel, NodeKernels, changed, node_kernels


@pytest.fixture(scope="module")
def kernels() -> Iterator[NodeKernels]:
    with node_kernels("mini", "desk") as kernels:
        yield kernels


@pytest.fixture(autouse=True)
def whole(kernels: NodeKernels) -> None:
    """Every test begins with both nodes in the roster."""
    if [row.name for row in kernels.roster.nodes] != ["mini", "desk"]:
        kernels.publish("mini", "desk")


def test_the_runtime_says_hello_first(kernels: NodeKernels) -> None:
    for name in ("mini", "desk"):
        hello = kernels.nodes[name].messages[0]
        assert isinstance(hello, NodeHello)
        assert (hello.node, hello.incarnation) == (name, 1)
        assert len(hello.mesh_key) == 40
        assert hello.mesh_ipc.startswith(f"ipc://{kernels.directory}/")
        assert hello.mesh_port != hello.master_port


def test_start_up_imports_neither_numpy_nor_torch(kernels: NodeKernels) -> None:
    late = _start_late(kernels)
    try:
        loaded = late.run("import sys; print(sorted({'numpy', 'torch', 'mlx', 'zeroconf', 'nh3'} & set(sys.modules)))")
        assert loaded["text"] == "[]\n"
    finally:
        kernels.nodes.pop("late").close()


def _start_late(kernels: NodeKernels) -> NodeKernel:
    kernels.start("late")
    return kernels.nodes["late"]


def test_the_roster_sets_names_of_the_next_cell_and_no_launchers_variables(kernels: NodeKernels) -> None:
    code = (
        "import os; names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', "
        "'JAX_COORDINATOR_ADDRESS', 'JAX_PROCESS_ID', 'JAX_NUM_PROCESSES')\n"
        "print(rank, world_size, device, nc.rank(), nc.world_size(), nc.device(), nc.node())\n"
        "print([name for name in names if name in os.environ])"
    )
    for rank, reply in enumerate(kernels.run(code)):
        name = ("mini", "desk")[rank]
        assert reply["text"].splitlines() == [f"{rank} 2 cpu {rank} 2 cpu {name}", "[]"]


def test_the_variables_of_jax_stand_until_the_end_of_the_cell_that_asks_for_them(kernels: NodeKernels) -> None:
    port = kernels.roster.nodes[0].master_port
    code = "import os; nc.jax_distributed(); print(*(os.environ[f'JAX_{name}'] for name in names))"
    kernels.run("names = ('COORDINATOR_ADDRESS', 'PROCESS_ID', 'NUM_PROCESSES')")
    for rank, reply in enumerate(kernels.run(code)):
        assert reply["text"] == f"127.0.0.1:{port} {rank} 2\n"
    for reply in kernels.run("print([name for name in os.environ if name.startswith('JAX_')])"):
        assert reply["text"] == "[]\n"


def test_ranks_follow_the_roster(kernels: NodeKernels) -> None:
    kernels.publish("desk", "mini")
    assert [reply["text"] for reply in kernels.run("print(nc.node(), rank)")] == ["desk 0\n", "mini 1\n"]


def test_names_that_the_user_took_stay_theirs(kernels: NodeKernels) -> None:
    kernels.run("rank = 'mine'")
    assert kernels.run("print(rank, nc.rank())")[1]["text"] == "mine 1\n"
    kernels.run("rank = nc.rank()")


def test_what_reset_takes_away_is_there_in_the_next_cell(kernels: NodeKernels) -> None:
    kernels.run("mine = 1\n%reset -f")
    assert kernels.run("print('mine' in globals(), nc.rank() == rank, world_size, device)")[0]["text"].startswith(
        "False True"
    )
    kernels.run("nc = 5")
    assert kernels.run("print(nc)")[0]["text"] == "5\n"
    kernels.run("import notebook_cluster as nc")


def test_pip_may_be_piped(kernels: NodeKernels) -> None:
    listed = kernels.run("%pip list | wc -l")[0]["text"]
    assert int(listed) > 10


def test_the_names_are_hidden_from_who(kernels: NodeKernels) -> None:
    assert "world_size" not in kernels.run("%who")[0]["text"]


def test_a_request_without_our_metadata_changes_nothing(kernels: NodeKernels) -> None:
    reply = kernels.nodes["mini"].run("print(nc.rank()); nc.barrier()")
    assert reply["text"].startswith("0\n")
    assert reply["evalue"] == "barrier works while a cell runs: use it in a %%on_all cell"


def test_a_cell_waits_for_its_roster(kernels: NodeKernels) -> None:
    metadata = kernels.metadata()
    metadata["generation"] += 1
    started = {name: kernels.nodes[name].start("print(rank)", metadata) for name in ("mini", "desk")}
    kernels.publish("desk", "mini")
    assert kernels.nodes["desk"].finish(started["desk"])["text"] == "0\n"
    assert kernels.nodes["mini"].finish(started["mini"])["text"] == "1\n"


def test_a_cell_whose_roster_never_comes_is_not_run(kernels: NodeKernels) -> None:
    reply = kernels.nodes["mini"].run("print('ran')", kernels.metadata(generation=10_000))
    assert reply["status"] == "error"
    assert "the roster of generation 10000 did not reach 'mini' within 5 s" in reply["evalue"]
    assert kernels.nodes["mini"].run("print('next')", kernels.metadata())["text"] == "next\n"


def test_an_interrupt_while_waiting_for_the_roster_ends_the_cell(kernels: NodeKernels) -> None:
    mini = kernels.nodes["mini"]
    message_id = mini.start("print('ran')", kernels.metadata(generation=10_000))
    wait_until(lambda: _is_busy(mini, message_id))
    os.kill(mini.said(NodeHello)[0].pid, signal.SIGINT)
    reply = mini.finish(message_id)
    assert reply["evalue"] == "interrupted before the cell began"


def _is_busy(node: NodeKernel, message_id: str) -> bool:
    """Whether the kernel has taken up the request and, a moment later, is inside of it."""
    channel = node.client.iopub_channel
    while channel.msg_ready():
        message = channel.get_msg(timeout=1)
        if message["parent_header"].get("msg_id") == message_id and message["msg_type"] == "execute_input":
            return True
    return False


ARRAYS = """
import numpy as np, torch
checks = [
    torch.equal(nc.all_reduce(torch.full((2, 3), rank + 1.0)), torch.full((2, 3), 3.0)),
    nc.all_reduce(np.array([2**53 + 1, rank])).tolist() == [2**54 + 2, 1],
    nc.all_reduce(torch.tensor([1.5, 2.0], dtype=torch.bfloat16)).dtype == torch.bfloat16,
    nc.all_reduce(torch.arange(300_000) + rank).sum().item() == 2 * sum(range(300_000)) + 300_000,
    nc.all_gather({"rank": rank}) == [{"rank": 0}, {"rank": 1}],
    nc.broadcast(np.arange(3) if rank == 1 else None, src=1).tolist() == [0, 1, 2],
    nc.reduce_scatter(torch.ones(4, 2)).tolist() == [[2.0, 2.0]] * 2,
    nc.barrier() is None,
]
nc.send(torch.tensor([rank]), dst=1 - rank)
checks.append(nc.recv(src=1 - rank).item() == 1 - rank)
print(checks)
"""


@pytest.mark.parametrize("peers", [{}, {"desk": "two"}], ids=["ipc", "tcp"])
def test_two_kernels_exchange_arrays(kernels: NodeKernels, peers: dict[str, str]) -> None:
    kernels.publish("mini", "desk", peers=peers)
    for reply in kernels.run(ARRAYS):
        assert reply["text"] == f"{[True] * 9}\n", reply
    kernels.publish("mini", "desk")


def test_a_node_that_raised_ends_the_collective_of_the_other(kernels: NodeKernels) -> None:
    metadata = kernels.metadata()
    waiting = kernels.nodes["mini"].start("nc.all_reduce(1.0)", metadata)
    kernels.nodes["desk"].run("raise ValueError('no data')", metadata)
    kernels.tell(
        "mini", CellDone(cell=metadata["cell"], node="desk", status="error", reason="raised ValueError: no data")
    )
    reply = kernels.nodes["mini"].finish(waiting)
    assert (reply["ename"], reply["evalue"]) == ("PeerLost", "desk raised ValueError: no data")


def test_a_lost_node_ends_the_collective_of_the_other(kernels: NodeKernels) -> None:
    metadata = kernels.metadata()
    waiting = kernels.nodes["mini"].start("nc.barrier()", metadata)
    kernels.publish("mini")
    kernels.tell("mini", NodeLost(node="desk", incarnation=1, reason="killed by SIGKILL"))
    reply = kernels.nodes["mini"].finish(waiting)
    assert (reply["ename"], reply["evalue"]) == ("PeerLost", "desk was lost: killed by SIGKILL")


def test_a_stop_ends_a_waiting_recv_and_the_node_goes_on(kernels: NodeKernels) -> None:
    mini = kernels.nodes["mini"]
    message_id = mini.start("nc.recv(src=1)", kernels.metadata())
    wait_until(lambda: any("message #1 for desk" in told.waiting for told in mini.said(Telemetry)))
    os.kill(mini.said(NodeHello)[0].pid, signal.SIGINT)
    assert mini.finish(message_id)["ename"] == "KeyboardInterrupt"
    assert [reply["text"] for reply in kernels.run("print(nc.all_reduce(1))")] == ["2\n", "2\n"]


def test_a_cell_on_some_nodes_has_collectives_among_those(kernels: NodeKernels) -> None:
    metadata = kernels.metadata(nodes=["desk"])
    reply = kernels.nodes["desk"].run(
        "print(rank, nc.all_gather('x'), list(nc.shard([5, 6], shuffle=False)))", metadata
    )
    assert reply["text"] == "1 ['x'] [5, 6]\n"


def test_a_node_that_joined_a_running_cell_is_told_why_it_cannot_reduce(kernels: NodeKernels) -> None:
    reply = kernels.nodes["desk"].run("nc.all_reduce(1)", kernels.metadata(joined=True, nodes=["desk"]))
    assert "'desk' joined while cell" in reply["evalue"]


def test_a_joined_node_takes_its_share_of_the_data(kernels: NodeKernels) -> None:
    metadata = kernels.metadata(joined=True, nodes=["desk"])
    reply = kernels.nodes["desk"].run("print(list(nc.shard([5, 6], shuffle=False)))", metadata)
    assert reply["text"] == "[6]\n"


def test_a_replayed_cell_passes_barriers_and_refuses_the_rest(kernels: NodeKernels) -> None:
    metadata = kernels.metadata(replay=True, nodes=["desk"])
    reply = kernels.nodes["desk"].run("nc.barrier(); print('past'); nc.all_reduce(1)", metadata)
    assert reply["text"].startswith("past\n")
    assert "is replayed on 'desk' alone" in reply["evalue"]


CELL_END = """
from notebook_cluster.training import current_runtime
runtime = current_runtime()
runtime.at_cell_end(lambda status: ended.append((runtime.cell(), status)))
"""


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("1 + 1", "ok"),
        ("raise KeyError('x')", "error: KeyError: 'x'"),
        ("raise KeyboardInterrupt", "interrupted"),
        ("await asyncio.sleep(0); 1 / 0", "error: ZeroDivisionError: division by zero"),
    ],
)
@pytest.mark.parametrize("silent", [False, True])
def test_the_end_of_a_cell_is_told_once(kernels: NodeKernels, code: str, status: str, silent: bool) -> None:
    mini = kernels.nodes["mini"]
    mini.run("import asyncio; ended = []")
    metadata = kernels.metadata()
    mini.run(CELL_END + code, metadata, silent)
    mini.run("2 + 2", kernels.metadata())
    assert mini.run("print(ended)")["text"] == f"{[(metadata['cell'], status)]}\n"


RUNS_OTHER_CELLS = """
get_ipython().run_cell("inner = nc.world_size()")
get_ipython().run_cell("")
get_ipython().run_cell("1 / 0", silent=True)
get_ipython().run_line_magic("run", {notebook!r})
"""


@pytest.mark.parametrize("last", ["", "await asyncio.sleep(0)"])
@pytest.mark.parametrize("silent", [False, True])
def test_a_cell_goes_on_after_the_cells_that_it_runs(
    kernels: NodeKernels, tmp_path: Path, last: str, silent: bool
) -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(code) for code in ("", "from_file = rank", "")]
    )
    nbformat.write(notebook, tmp_path / "prepare.ipynb")
    kernels.run("import asyncio; ended = []; total = 0")
    code = CELL_END + RUNS_OTHER_CELLS.format(notebook=str(tmp_path / "prepare.ipynb"))
    metadata = kernels.metadata()
    started = [
        node.start(f"{code}total = nc.all_reduce(from_file + inner); nc.barrier()\n{last}", metadata, silent)
        for node in kernels.nodes.values()
    ]
    for node, message_id in zip(kernels.nodes.values(), started, strict=True):
        node.finish(message_id)
    for reply in kernels.run("print(total, ended)"):
        assert reply["text"] == f"5 {[(metadata['cell'], 'ok')]}\n"


def test_an_interrupt_waits_for_the_end_of_a_protected_block(kernels: NodeKernels) -> None:
    code = (
        "import os, signal\n"
        "from notebook_cluster.training import current_runtime\n"
        "with current_runtime().deferred_interrupts():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('whole')\n"
        "print('never')"
    )
    reply = kernels.nodes["mini"].run(code, kernels.metadata())
    assert reply["ename"] == "KeyboardInterrupt"
    assert reply["text"] == "whole\n"


def test_reported_values_reach_the_coordinator(kernels: NodeKernels) -> None:
    mini = kernels.nodes["mini"]
    code = (
        "import torch\nfor step in range(500): nc.report(step=step, loss=torch.tensor(1.0 / (step + 1)), accuracy=0.5)"
    )
    mini.run(code, kernels.metadata())
    wait_until(lambda: mini.said(Telemetry) and mini.said(Telemetry)[-1].step == 499)
    told = [telemetry for telemetry in mini.said(Telemetry) if telemetry.step is not None]
    assert told[-1].loss == pytest.approx(1 / 500)
    assert told[-1].scalars == {"accuracy": 0.5}
    history = [point for telemetry in told for point in telemetry.history.get("loss", [])]
    assert history[-1][0] == 499
    assert all(len(points) <= 50 for telemetry in told for points in telemetry.history.values())
    assert len(told) <= 20


def test_each_reported_number_is_told_with_its_own_step(kernels: NodeKernels) -> None:
    mini = kernels.nodes["mini"]
    before = len(mini.said(Telemetry))
    mini.run(
        "nc.report(step=3, own=0.25)\nnc.report(step=4, other=1.5)\nnc.report(step=5, own=0.75, loss=2.0)",
        kernels.metadata(),
    )
    told: dict[str, list[tuple[int, float]]] = {}

    def points() -> int:
        told.clear()
        for telemetry in mini.said(Telemetry)[before:]:
            for name, history in telemetry.history.items():
                told.setdefault(name, []).extend((step, value) for step, _, value in history)
        return sum(map(len, told.values()))

    wait_until(lambda: points() == 4)
    assert told == {"own": [(3, 0.25), (5, 0.75)], "other": [(4, 1.5)], "loss": [(5, 2.0)]}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("nc.report(accuracy='high')", "report: accuracy is a str: a number is needed"),
        ("nc.report(loss=torch.ones(3))", "report: loss has 3 elements: a single number is needed"),
        ("nc.report(waiting=1)", "report: the name 'waiting' is taken"),
    ],
)
def test_what_is_no_number_is_refused_by_name(kernels: NodeKernels, call: str, text: str) -> None:
    assert text in kernels.nodes["mini"].run(f"import torch; {call}", kernels.metadata())["evalue"]


JOB = """
from notebook_cluster.training import current_runtime
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.rounds import LeftRounds
class Handler:
    def __init__(self): self.seen, self.rosters, self.ticks = [], [], 0
    def on_control(self, message): self.seen.append(type(message).__name__)
    def on_mesh(self, sender, header, payload): self.seen.append((sender, header.kind, bytes(payload)))
    def on_tick(self, now): self.ticks += 1
    def on_roster(self, roster): self.rosters.append(roster.generation)
handler, runtime = Handler(), current_runtime()
import time
def soon(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline: time.sleep(0.01)
"""


def test_messages_of_a_job_wait_until_the_job_is_there(kernels: NodeKernels) -> None:
    kernels.run(JOB)
    kernels.tell("desk", RegisterRefused(job="early", reason="x"))
    kernels.tell("desk", Finished(job="early", round=1))
    send = "runtime.send_mesh('desk', JobFrame(job='early', incarnation=1, kind='mean'), b'bytes')"
    kernels.nodes["mini"].run(send, kernels.metadata())
    code = (
        "runtime.attach_job('early', handler)\n"
        "soon(lambda: len(handler.seen) >= 3 and handler.ticks > 1)\n"
        "print(handler.seen[:2], handler.seen[2:], len(handler.rosters), runtime.job('early') is handler)"
    )
    reply = kernels.nodes["desk"].run(code, kernels.metadata())
    assert reply["text"].startswith("['RegisterRefused', 'Finished'] [('mini', 'mean', b'bytes')] 1 True")


def test_control_messages_keep_their_order(kernels: NodeKernels) -> None:
    kernels.run(JOB)
    kernels.nodes["mini"].run(
        "for n in range(500): runtime.send_control(LeftRounds(job='order', reason=str(n)))", kernels.metadata()
    )
    mini = kernels.nodes["mini"]
    wait_until(lambda: len([leave for leave in mini.said(LeftRounds) if leave.job == "order"]) == 500)
    assert [leave.reason for leave in mini.said(LeftRounds) if leave.job == "order"] == [str(n) for n in range(500)]


def test_a_job_that_fails_in_the_background_is_said(kernels: NodeKernels) -> None:
    kernels.run(JOB)
    code = "handler.on_control = lambda message: 1 / 0\nruntime.attach_job('broken', handler)"
    kernels.nodes["mini"].run(code, kernels.metadata())
    kernels.tell("mini", Finished(job="broken", round=1))
    mini = kernels.nodes["mini"]
    wait_until(lambda: mini.said(NodeLog))
    assert "job 'broken' failed in the background: ZeroDivisionError" in mini.said(NodeLog)[-1].text


def test_a_node_that_was_removed_says_so(kernels: NodeKernels) -> None:
    kernels.publish("mini")
    kernels.tell("desk", kernels.roster)
    reply = kernels.nodes["desk"].run("nc.rank()", kernels.metadata())
    assert reply["evalue"] == "'desk' is not in the cluster: it was removed"


def test_an_older_roster_is_ignored(kernels: NodeKernels) -> None:
    old = kernels.roster
    kernels.publish("desk", "mini")
    kernels.tell_all(changed(old, "mini", rank=7))
    assert [reply["text"] for reply in kernels.run("print(nc.rank())")] == ["0\n", "1\n"]


def test_a_refusal_does_not_outlive_its_cell(kernels: NodeKernels) -> None:
    mini = kernels.nodes["mini"]
    assert mini.run("a b", kernels.metadata(generation=10_000))["ename"] == "SyntaxError"
    assert mini.run("print('plain')")["text"] == "plain\n"


def test_a_kernel_that_is_shut_down_removes_its_socket(kernels: NodeKernels) -> None:
    late = _start_late(kernels)
    try:
        path = Path(late.said(NodeHello)[0].mesh_ipc.removeprefix("ipc://"))
        assert path.exists()
        late.manager.shutdown_kernel(now=False)
        wait_until(lambda: not path.exists())
    finally:
        kernels.nodes.pop("late").close()


def test_a_restarted_node_takes_part_again(kernels: NodeKernels) -> None:
    """Same name, new kernel, next incarnation: the others reach the new one and not the old one's address."""
    kernels.run("nc.barrier()")
    kernels.nodes["desk"].close()
    kernels.start("desk", incarnation=2)
    kernels.publish("mini", "desk")
    assert [reply["text"] for reply in kernels.run("print(nc.all_reduce(rank + 1))")] == ["3\n", "3\n"]


def test_loading_where_no_agent_is_says_what_to_do() -> None:
    code = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "import notebook_cluster.node\n"
        "notebook_cluster.node.load_ipython_extension(InteractiveShell())"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NOTEBOOK_CLUSTER_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert "%load_ext notebook_cluster" in done.stdout


def test_the_package_imports_nothing_heavy() -> None:
    code = "import sys, notebook_cluster; print({'numpy', 'zmq', 'torch', 'msgspec', 'typing'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, cwd=_root())
    assert done.stdout == "set()\n", done.stderr


def test_every_public_name_is_there() -> None:
    code = "import notebook_cluster as nc; print([name for name in nc.__all__ if getattr(nc, name, None) is None])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_outside_a_node_every_function_says_on_all() -> None:
    import notebook_cluster as nc

    for call in (nc.rank, nc.world_size, nc.device, nc.node, nc.barrier, lambda: nc.shard([1]), lambda: nc.report(x=1)):
        with pytest.raises(RuntimeError, match="%%on_all"):
            call()


def _root() -> Path:
    return Path(__file__).parent.parent
