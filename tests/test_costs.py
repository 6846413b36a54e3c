"""What rounds of a model take is said before they begin, and refused where the machine has not got it."""

from pathlib import Path

import pytest

from notebook_cluster import processors
from notebook_cluster.memory import amount
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.training.loop import costs
from notebook_cluster.training.loop.costs import check_room, costs_of, estimate, ways_out
from tests.cluster import run, running_cluster, text_of
from tests.notebook_kernel import NotebookKernel
from tests.shared_notebook import error_of

GB = 10**9


def of(codec: str, parameters: float, nodes: int = 2, fragments: int = 1) -> costs.Costs:
    return costs_of(Fragments(codec, int(parameters), count=fragments), nodes)


def test_a_codec_sends_less_and_fragments_take_less_memory() -> None:
    exact, small = of("float32", 1e8), of("int8", 1e8)
    assert exact.traffic == exact.checkpoint // 2 == 4e8
    assert 0.25 * exact.traffic < small.traffic < 0.26 * exact.traffic
    assert of("float32", 1e8, fragments=8).memory < 0.85 * exact.memory
    assert small.rest < small.memory < 4.2 * 4e8
    assert of("float32", 1e8, nodes=8).traffic == 4e8 * 2 * 7 / 8
    assert exact.seconds(1e8) == pytest.approx(8 * 4e8 / 1e8 / 0.94)


def test_nodes_of_one_machine_have_what_they_send_each_other_once() -> None:
    """Measured with 100M parameters, in multiples of the model: 3.75, 3.59, 3.37 and 2.36; 3.55 with four nodes."""
    for codec, nodes, measured in (("float32", 2, 3.75), ("int8", 2, 3.59), ("int4", 2, 3.37), ("float32", 4, 3.55)):
        fragments = Fragments(codec, 10**8)
        together, apart = costs_of(fragments, nodes, together=nodes), costs_of(fragments, nodes)
        assert together.times == pytest.approx(measured, rel=0.15)
        assert together.memory < costs_of(fragments, nodes, together=nodes - 1).memory <= apart.memory
        assert (together.traffic, together.checkpoint) == (apart.traffic, apart.checkpoint)
    sparse = Fragments("sparse", 10**8, over_senders=True, momentum_dtype="none")
    assert costs_of(sparse, 2, together=2).times == pytest.approx(2.36, rel=0.15)
    on_disk = costs_of(Fragments("int4", 10**8), 2, disk=True, exact=False, together=2)
    assert on_disk.times == pytest.approx(0.38, rel=0.15)


def test_the_table_has_a_line_for_each_way_and_the_smallest_is_the_last() -> None:
    rows = estimate(124_000_000, 4)
    assert [row[0] for row in rows[1:]] == ["float32", "int8", "int4", "nc.SparseLoCo"]
    assert amount(of("int8", 124e6, 4).memory) in rows[2][1]
    assert {len(row) for row in rows} == {8}
    (only,) = estimate(124_000_000, 2, "topk-256")[1:]
    assert only[0] == "topk-256"


def test_what_does_not_fit_is_refused_with_figures_and_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, others = of("float32", 1e9), [(what, costs_of(one, 2)) for what, one in ways_out(10**9)]
    monkeypatch.setattr(costs, "machine_memory", lambda: (19 * GB, 64 * GB))
    assert check_room(asked, 0, 1, others) == ""
    monkeypatch.setattr(costs, "machine_memory", lambda: (14 * GB, 64 * GB))
    with pytest.raises(MemoryError) as refused:
        check_room(asked, 0, 1, others)
    text = str(refused.value)
    assert "1,000,000,000 parameters take up to 18 GB" in text
    assert "This machine has 64 GB for its node, of which 14 GB are free: use " in text
    assert text.count("(") > 1
    assert text.endswith("use codec='int4' (13.3 GB) or nc.SparseLoCo (8.77 GB)")
    assert check_room(asked, asked.rest, 1, others) == ""  # it has some of it already
    monkeypatch.setattr(costs, "machine_memory", lambda: (3 * GB, 4 * GB))
    with pytest.raises(MemoryError, match="are free: use a smaller model, or a machine with more memory"):
        check_room(asked, 0, 1, others)


def test_nodes_of_one_machine_share_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = of("float32", 1e9)
    monkeypatch.setattr(costs, "machine_memory", lambda: (24 * GB, 64 * GB))
    assert check_room(asked, 0, 2, []).startswith("its 2 nodes may need 36 GB more")
    with pytest.raises(MemoryError, match=r"for its 4 nodes, of which 24 GB are free: use at most 3 of its nodes"):
        check_room(asked, 0, 4, [])


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_what_its_control_group_allows(tmp_path: Path, version: int) -> None:
    group = tmp_path / "sys/fs/cgroup" / ("memory/job" if version == 1 else "job")
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/job/step\n" if version == 1 else "0::/job/step\n")
    limit, used = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    (group / f"memory.{limit}").write_text("1000000\n")
    (group / f"memory.{used}").write_text("700000\n")
    (group / "memory.stat").write_text("anon 500000\ninactive_file 150000\nactive_file 50000\n")
    assert processors.machine_memory(tmp_path) == (500_000, 1_000_000)
    assert processors.free_memory(tmp_path) == 500_000
    (group / f"memory.{limit}").write_text("max\n")
    assert processors.machine_memory(tmp_path)[1] > 1_000_000
    assert processors.machine_memory()[0] <= processors.machine_memory()[1]


CELL = """
import torch, notebook_cluster as nc
from notebook_cluster.training.loop import costs
model = torch.nn.Linear(1000, 1000)
real = costs.machine_memory
costs.machine_memory = lambda: (10_000_000, 20_000_000)
try:
    nc.DiLoCo(model, every=2)
except MemoryError as error:
    print(error)
costs.machine_memory = real
sync = nc.DiLoCo(model, every=2)
sync.step(1.0)
sync.finish()
print(sync.round, sync.memory.parameters, sync.memory)
"""


def test_a_sync_object_is_refused_before_its_rounds_and_made_where_there_is_room(jupyter_dirs: Path) -> None:
    with running_cluster(local=2) as cluster:
        for text in run(cluster, CELL).values():
            refused, made = text.splitlines()
            assert refused.startswith("rounds of 1,001,000 parameters take up to ")
            assert "This machine has 20 MB for its 2 nodes, of which 10 MB are free: use a smaller model" in refused
            assert made.startswith("1 1001000 rounds of 1,001,000 parameters take up to ")
        ended, outputs = cluster.run(
            "costs.machine_memory = lambda: (10_000_000, 20_000_000)\nnc.SparseLoCo(model, every=2, name='m')"
        )
        assert ended.status == "error"
        assert "rounds of 1,001,000 parameters take up to" in text_of(outputs)


def test_the_magic_says_it_in_a_notebook_with_and_without_a_cluster(jupyter_dirs: Path, no_processes_left: str) -> None:
    notebook = NotebookKernel(jupyter_dirs)
    try:
        notebook.works("%load_ext notebook_cluster")
        said = notebook.works("%cluster estimate 124M --codec int8")
        assert said.startswith("124,000,000 parameters (496 MB in float32, which the model holds) on 2 nodes")
        assert "\nint8 " in said
        notebook.works("%cluster start --local 1 --no-panel")
        assert "on 1 node;" in notebook.works("%cluster estimate 1.1B")
        assert "on 3 nodes;" in notebook.works("%cluster estimate 1.1B --nodes 3")
        assert "codec='int9': use one of" in error_of(notebook, "%cluster estimate 124M --codec int9")
    finally:
        notebook.close()
