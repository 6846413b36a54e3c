"""Cells on a real cluster: kernels, agent, coordinator and client as they run for people."""

import asyncio
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notebook_cluster.client import AsyncCluster, Cluster, ClusterError
from tests.cluster import Watcher, kernel_pid, node, run, running_cluster, shared_cluster, text_of
from tests.conftest import Agents, wait_until


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Of all tests that leave its nodes as they were."""
    with shared_cluster(local=2) as cluster:
        yield cluster


@pytest.fixture
def fresh(work: Path) -> Iterator[Cluster]:
    with running_cluster(local=2) as cluster:
        yield cluster


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file for which a cell waits; there at the test's end in any case."""
    yield tmp_path / "go"
    (tmp_path / "go").touch()


def test_a_cell_runs_on_every_node_with_its_rank(cluster: Cluster) -> None:
    said = run(cluster, "print(rank, world_size, nc.rank(), nc.world_size(), nc.node(), device)")
    assert said == {"local": "0 2 0 2 local cpu\n", "local-2": "1 2 1 2 local-2 cpu\n"}


def test_letters_that_no_text_has_take_nothing_else_with_them(cluster: Cluster) -> None:
    """A name of a file that is no UTF-8."""
    said = run(cluster, "print('x \\udcff y')\nprint('after')", ("local",))
    assert said["local"].startswith("x ")
    assert said["local"].endswith(" y\nafter\n")


def test_collectives_between_kernels(cluster: Cluster) -> None:
    said = run(
        cluster,
        """
import numpy as np
nc.barrier()
print(nc.all_reduce(np.arange(3) + rank), nc.all_gather(rank), nc.broadcast("hello" if rank == 1 else None, src=1))
if rank == 0:
    nc.send(np.float32([1.5]), 1)
else:
    print(nc.recv(0))
""",
    )
    assert said["local"] == "[1 3 5] [0, 1] hello\n"
    assert said["local-2"] == "[1 3 5] [0, 1] hello\n[1.5]\n"


def test_one_node_alone_and_its_rank(cluster: Cluster) -> None:
    assert run(cluster, "print(rank, len(list(nc.shard(range(10)))))", ("local-2",)) == {"local-2": "1 10\n"}


def test_an_error_ends_the_cell_as_an_error_with_the_nodes_traceback(cluster: Cluster) -> None:
    ended, outputs = cluster.run("print('before'); 1 / (1 - rank)")
    assert ended.status == "error"
    assert ended.results["local-2"].error_name == "ZeroDivisionError"
    assert ended.results["local"].status == "ok"
    assert not ended.trained
    assert "before" in text_of(outputs, "local-2")
    assert "ZeroDivisionError" in text_of(outputs, "local-2")


def test_waiting_nodes_stop_with_the_cause_when_one_raises(cluster: Cluster) -> None:
    ended, _ = cluster.run("if rank == 1: raise ValueError('no data')\nnc.barrier()")
    assert ended.results["local"].error_name == "PeerLost"
    assert "local-2 raised ValueError: no data" in ended.results["local"].error_value


def test_the_traceback_of_a_collective_ends_at_the_users_line_and_has_the_cells_number(cluster: Cluster) -> None:
    cluster.run("1", ["local"])  # a cell that only one of them ran
    ended, outputs = cluster.run("if rank == 0:\n    1/0\nnc.barrier()")
    shown = {output.node: "\n".join(output.content["traceback"]) for output in outputs if output.kind == "error"}
    plain = {node: re.sub(r"\x1b\[[0-9;]*m", "", text) for node, text in shown.items()}
    assert set(plain) == {"local", "local-2"}
    for text in plain.values():
        assert f"Cell In[{ended.cell}], line" in text
    assert "----> 3 nc.barrier()" in plain["local-2"]
    assert "PeerLost: local raised ZeroDivisionError: division by zero" in plain["local-2"]
    assert "notebook_cluster" not in plain["local-2"]


def test_a_cell_that_says_exit_leaves_its_nodes_where_they_are(cluster: Cluster) -> None:
    ended, outputs = cluster.run("exit()\nquit()\nprint(get_ipython().exit_now)\n__import__('sys').exit(3)")
    assert [result.error_name for result in ended.results.values()] == ["SystemExit"] * 2
    for name in ended.results:
        text = text_of(outputs, name)
        assert text.count("exit() does nothing on a node: %cluster restart NODE gives it a new kernel") == 2
        assert "False\n" in text
        assert "To exit" not in text


def test_a_name_that_only_the_notebook_has_says_push(cluster: Cluster) -> None:
    _, outputs = cluster.run("print(data)", notebook_names=["data"])
    assert "%push data sends it" in text_of(outputs, "local")


def test_stop_interrupts_every_node_and_the_cluster_goes_on(cluster: Cluster) -> None:
    watcher = Watcher(cluster.execute("import time\nprint('started', flush=True)\nwhile True: time.sleep(0.01)"))
    watcher.wait_for("started", "local")
    watcher.wait_for("started", "local-2")
    assert sorted(cluster.interrupt()) == ["local", "local-2"]
    assert watcher.wait_end().status == "interrupted"
    assert run(cluster, "print(1 + 1)")["local"] == "2\n"


def test_stop_right_after_the_start_is_not_lost(cluster: Cluster) -> None:
    watcher = Watcher(cluster.execute("import time\nwhile True: time.sleep(0.01)"))
    cluster.interrupt()
    assert watcher.wait_end().status == "interrupted"


def test_a_second_stop_kills_and_respawns_what_ignores_the_first(fresh: Cluster) -> None:
    run(fresh, "x = 7")
    stubborn = """
import time
print("started", flush=True)
while True:
    try:
        time.sleep(0.01)
    except KeyboardInterrupt:
        print("no", flush=True)
"""
    watcher = Watcher(fresh.execute(stubborn, ("local-2",)))
    watcher.wait_for("started")
    fresh.interrupt()
    watcher.wait_for("no")
    assert fresh.interrupt(force=True) == ["local-2"]
    assert watcher.wait_end().status == "interrupted"
    wait_until(lambda: node(fresh.state(), "local-2").condition == "ok", 60, "local-2 to be back")
    assert run(fresh, "print(x)", ("local-2",)) == {"local-2": "7\n"}


def test_cells_of_two_views_queue(cluster: Cluster) -> None:
    second = Cluster.attach("test")
    first = Watcher(cluster.execute("import time; time.sleep(0.3); x = 1"))
    later = Watcher(second.execute("print(x)"))
    assert first.wait_end().status == "ok"
    assert later.wait_end().status == "ok"
    assert "1" in later.text("local")
    second.close()


def test_output_streams_while_the_cell_runs_and_a_later_view_sees_it_all(cluster: Cluster, gate: Path) -> None:
    watcher = Watcher(
        cluster.execute(
            "import time, os\nfor i in range(3): print('line', i, flush=True)\n"
            f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)\nprint('end')"
        )
    )
    watcher.wait_for("line 2", "local")
    late = Cluster.attach("test")
    again = Watcher(late.watch(watcher.stream.cell))
    again.wait_for("line 0\nline 1\nline 2", "local-2")
    gate.touch()
    assert watcher.wait_end().status == "ok"
    assert again.wait_end().status == "ok"
    assert again.text("local") == watcher.text("local")
    late.close()


COUNTING = """
import os, time
number = 0
while not os.path.exists({gate!r}):
    number += 1
    print("line", number, flush=True)
    time.sleep(0.001)
"""


def assert_each_line_once(late: Watcher) -> None:
    for name in ("local", "local-2"):
        lines = [int(number) for number in re.findall(r"line (\d+)\n", text_of(late.outputs, name))]
        assert lines == list(range(1, len(lines) + 1)), [b for a, b in itertools.pairwise(lines) if b != a + 1]


def test_a_view_that_comes_while_much_is_printed_sees_each_line_once(cluster: Cluster, gate: Path) -> None:
    cell = cluster.execute(COUNTING.format(gate=str(gate)))
    for _ in range(15):
        with Cluster.attach("test") as view:
            late = Watcher(view.watch(cell.cell))
            wait_until(lambda late=late: late.look() or len(late.outputs) > 6)  # type: ignore[misc]
        assert_each_line_once(late)
    gate.touch()
    assert Watcher(cell).wait_end().status == "ok"


def test_a_cell_that_is_watched_once_more_goes_on_there_alone(cluster: Cluster, gate: Path) -> None:
    first = Watcher(cluster.execute(COUNTING.format(gate=str(gate))))
    first.wait_for("line 9\n")
    again = Watcher(cluster.watch(first.stream.cell))
    assert first.wait_end().status == "detached"
    first.stream.close()
    again.wait_for("line 99\n")
    gate.touch()
    assert again.wait_end().status == "ok"
    assert_each_line_once(again)


def test_detach_frees_the_view_and_the_cell_goes_on(cluster: Cluster, gate: Path) -> None:
    waits = f"import time, os\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\nx = 5"
    watcher = Watcher(cluster.execute(waits))
    wait_until(lambda: cluster.state().cell.status == "running", 60, "the cell to run")
    cluster.detach()
    assert watcher.wait_end().status == "detached"
    gate.touch()
    wait_until(lambda: cluster.state().cell.status == "ok", 60, "the cell to end")
    assert run(cluster, "print(x)")["local"] == "5\n"


def test_a_restarted_node_replays_the_cells_silently(fresh: Cluster) -> None:
    run(fresh, "x = 40")
    run(fresh, "x += 2; print('loud')")
    fresh.restart("local-2")
    row = node(fresh.state(), "local-2")
    assert (row.incarnation, row.rank, row.condition) == (2, 1, "ok")
    assert [event.level for event in fresh.state().events if event.text == "local-2: restarted"] == ["info"]
    assert run(fresh, "print(x)") == {"local": "42\n", "local-2": "42\n"}


def test_without_replay_a_restarted_node_is_empty(fresh: Cluster) -> None:
    run(fresh, "x = 40")
    fresh.restart("local", replay=False)
    ended, _ = fresh.run("x", ("local",))
    assert ended.results["local"].error_name == "NameError"


def test_a_node_added_later_replays_too(fresh: Cluster) -> None:
    run(fresh, "x = 3")
    assert fresh.add("local", 1) == ["local-3"]
    assert run(fresh, "print(x, world_size)")["local-3"] == "3 3\n"


def test_a_removed_node_is_gone_and_ranks_close_up(fresh: Cluster) -> None:
    fresh.remove("local")
    assert [(row.name, row.rank) for row in fresh.state().nodes] == [("local-2", 0)]
    assert run(fresh, "print(rank, world_size)") == {"local-2": "0 1\n"}
    # a new one at once under its name is not taken for the old kernel, which may still be ending
    assert fresh.add("local", 1) == ["local"]
    assert [(row.name, row.rank, row.incarnation) for row in fresh.state().nodes] == [
        ("local-2", 0, 1),
        ("local", 1, 2),
    ]
    assert run(fresh, "print(rank, world_size)") == {"local-2": "0 2\n", "local": "1 2\n"}


def test_a_node_that_is_added_at_once_under_a_removed_name_is_another_one(fresh: Cluster) -> None:
    first = kernel_pid(fresh, "local-2")
    fresh.remove("local-2")
    assert fresh.add("local", 1) == ["local-2"]
    assert kernel_pid(fresh, "local-2") != first
    assert [(row.name, row.incarnation) for row in fresh.state().nodes] == [("local", 1), ("local-2", 2)]


def test_timeout_interrupts_and_names_the_late_ones(cluster: Cluster) -> None:
    ended, _ = cluster.run("import time\nif rank == 1: time.sleep(60)", timeout=0.5)
    assert ended.status == "interrupted"
    assert any("still busy: local-2" in event.text for event in cluster.state().events)


def test_a_cell_that_was_stopped_says_its_line_without_those_around_it(cluster: Cluster) -> None:
    ended, outputs = cluster.run("import time\ntime.sleep(60)", timeout=0.5)
    shown = ["\n".join(output.content["traceback"]) for output in outputs if output.kind == "error"]
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", text) for text in shown]
    assert len(plain) == 2
    for text in plain:
        assert f"Cell In[{ended.cell}], line 2\n    time.sleep(60)\n" in text
        assert "import time" not in text


def test_memory_of_every_node_is_sampled(cluster: Cluster) -> None:
    wait_until(lambda: all(row.memory_used > 10_000_000 for row in cluster.state().nodes), 60, "memory samples")
    assert {series.node for series in cluster.series() if series.name == "memory"} == {"local", "local-2"}


def test_logs_of_a_node(cluster: Cluster) -> None:
    run(cluster, "import os; os.system('echo from the terminal >&2')", ("local",))
    wait_until(lambda: any("from the terminal" in line for line in cluster.logs("local")), 60, "the log line")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (lambda c: c.run("1", ("nobody",)), "no node 'nobody' in cluster 'test': its nodes are local, local-2"),
        (lambda c: c.restart("nobody"), "no node 'nobody'"),
        (lambda c: c.remove("nobody"), "no node 'nobody'"),
        (lambda c: c.run("1", timeout=-1.0), "--timeout -1 is not a positive number"),
        (lambda c: c.add("nobody"), "nobody"),
        (lambda c: c.add("127.0.0.1:99999"), "not HOST:PORT"),
        (lambda c: c.add("local", -1), "cannot add -1 nodes"),
        (lambda c: c.watch(99), "no cell 99"),
    ],
)  # fmt: skip
def test_bad_requests_are_one_line_that_names_the_thing(cluster: Cluster, request_: Any, message: str) -> None:
    with pytest.raises(ClusterError) as error:
        request_(cluster)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert run(cluster, "print(1)", ("local",)) == {"local": "1\n"}


def test_peers_found_over_mdns_become_nodes(agents: Agents) -> None:
    agents("mini", "desk")
    with running_cluster(local=1, peers=["all"]) as cluster:
        # Who is announced late joins later.
        wait_until(
            lambda: [row.condition for row in cluster.state().nodes] == ["ok"] * 3,
            60,
            lambda: f"three nodes: {cluster.state().nodes} {cluster.state().events}",
        )
        state = cluster.state()
        assert sorted(row.name for row in state.nodes) == ["desk", "local", "mini"]
        # Others on this network may share a machine too; it is shown, and not used.
        used = {peer.name: peer.found_by for peer in state.peers if peer.trusted}
        assert used == {"local": "local", "mini": "mdns", "desk": "mdns"}
        said = run(cluster, "import numpy as np; print(nc.all_reduce(np.ones(2)))")
        assert all(text == "[3. 3.]\n" for text in said.values())


def test_a_peer_that_appears_later_joins_a_cluster_that_follows(agents: Agents) -> None:
    with running_cluster(local=1, peers=["all"]) as cluster:
        run(cluster, "x = 9")
        agents("mini")
        wait_until(lambda: any(row.name == "mini" and row.rank == 1 for row in cluster.state().nodes), 60, "mini")
        wait_until(lambda: node(cluster.state(), "mini").condition == "ok", 60, "mini's replay")
        assert run(cluster, "print(x)")["mini"] == "9\n"


def test_the_only_running_cluster_needs_no_name(cluster: Cluster) -> None:
    other = Cluster.attach()
    assert other.name == "test"
    assert other.attached
    other.close()


def test_the_async_client_does_the_same(fresh: Cluster) -> None:
    async def use() -> tuple[list[str], str, list[str]]:
        other = await AsyncCluster.attach("test")
        ended, outputs = await other.run("print(rank)")
        added = await other.add("local", 1)
        await other.remove("local-2")
        names = [row.name for row in (await other.state()).nodes]
        await other.close()
        return added, ended.status + text_of(outputs, "local"), names

    assert asyncio.run(use()) == (["local-3"], "ok0\n", ["local", "local-3"])
