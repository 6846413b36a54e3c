"""The benchmarks print one JSON line with every figure and leave nothing behind. How fast is not asserted here."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import notebook_cluster as nc
from benchmarks import links, rounds
from benchmarks.rounds_nodes import Case
from notebook_cluster.codecs import CHUNKED_NAMES, CODEC_NAMES
from tests.engines.running import no_slurm

ROOT = Path(__file__).parents[1]
SET_BY_FIDELITY = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@pytest.fixture
def arms(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what ``benchmarks.fidelity`` compares. What it sets in its process as it is loaded is not left to the
    tests that follow: there it would stand for the user's own setting."""
    for name in SET_BY_FIDELITY:
        monkeypatch.setenv(name, "1")
    from benchmarks.fidelity import ARMS

    return list(ARMS)


Ended = tuple[int, list[dict[str, Any]], str]


@pytest.fixture
def fidelity(
    arms: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Ended]]:
    """``benchmarks.fidelity`` with these options, in this process: exit code, lines, what it said besides.

    Most of the time of so small a training is the start of its process. The loss is that of few sequences.
    """
    import torch

    from benchmarks import fidelity as program
    from benchmarks import fidelity_training

    monkeypatch.setattr(fidelity_training, "TESTED", 128)
    monkeypatch.setattr(program.concurrent.futures, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))

    def run(*options: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["benchmarks.fidelity", *options])
        try:
            code = program.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capsys.readouterr()
        return code, [json.loads(line) for line in said.out.splitlines()], said.err

    threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(threads)


def printed(module: str, *options: str, timeout: float = 150) -> list[dict[str, Any]]:
    """The lines that ``python -m benchmarks.<module>`` prints on its output."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *options],
        capture_output=True, text=True, timeout=timeout, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def figures(module: str, *options: str) -> dict[str, Any]:
    """The one line that the benchmark prints with two nodes."""
    (line,) = printed(module, "--nodes", "2", *options)
    return line


@pytest.mark.proof
def test_start_up_compares_three_ways(no_processes_left: str) -> None:
    found = figures("start_up", "--runs", "1")
    assert min(found["ours_s"], found["ipyparallel_s"], found["jupyter_client_s"]) > 0
    assert found["ratio_to_ipyparallel"] == pytest.approx(found["ours_s"] / found["ipyparallel_s"], rel=0.01)


def test_on_all_compares_three_ways(no_processes_left: str) -> None:
    found = figures("on_all", "--blocks", "2", "--times", "3")
    assert found["runs"] == 6
    ratio = found["ours_ms"] / found["jupyter_client_ms"]
    assert found["ratio_to_jupyter_client"] == pytest.approx(ratio, rel=0.02)


@pytest.mark.proof
def test_stop_compares_both_ways_with_busy_and_with_sleeping_nodes(no_processes_left: str) -> None:
    found = figures("stop", "--runs", "1")
    for end in ("", "_asleep"):
        ratio = found[f"ours{end}_s"] / found[f"ipyparallel{end}_s"]
        assert found[f"ratio_to_ipyparallel{end}"] == pytest.approx(ratio, rel=0.02)
    assert found["ours_cells_lost"] == 0
    assert found["ipyparallel_cells_lost"] >= 0


@pytest.mark.proof
def test_on_all_compares_printed_text(no_processes_left: str) -> None:
    found = figures("on_all", "--stdout-mb", "0.4")
    assert found["stdout_mb"] == [0.05, 0.1, 0.2, 0.4]
    for name in ("ratio_to_ipyparallel", "memory_ratio_to_ipyparallel"):
        assert found[name] > 0
    assert min(found["ours_memory_mb"]) > 10


def test_panel_measures_notebook_and_coordinator(no_processes_left: str) -> None:
    found = figures("panel", "--seconds", "3")
    assert {"kernel_cpu", "websocket_kb_s", "redraws_per_s", "coordinator_cpu", "coordinator_mb"} <= found.keys()
    # Four a second, and one more where three seconds begin just before one.
    assert 0 < round(3 * found["redraws_per_s"]) <= 13
    assert found["coordinator_mb"] > 10


@pytest.mark.proof
@pytest.mark.skipif(bool(no_slurm()), reason=no_slurm() or "there is one")
def test_start_up_on_slurm_is_compared_with_the_launcher_of_ipyparallel(no_processes_left: str) -> None:
    (found,) = printed("start_up", "--on", "slurm", "--nodes", "2", "--runs", "1")
    assert (found["on"], found["nodes"], found["runs"]) == ("slurm", 2, 1)
    ratio = found["ours_s"] / found["ipyparallel_s"]
    assert found["ratio_to_ipyparallel"] == pytest.approx(ratio, rel=0.02)
    assert len(found["load"]) == 3


def test_start_up_on_slurm_says_how_to_get_what_is_missing() -> None:
    hidden = "import sys; sys.modules['ipyparallel'] = None; sys.argv[1:] = ['--on', 'slurm']\n"
    program = f"{hidden}from benchmarks.start_up import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "--on slurm: ipyparallel is not installed" in done.stderr
    assert "pip install ipyparallel" in done.stderr


@pytest.mark.proof
def test_joiners_come_in_while_rounds_go_on(no_processes_left: str) -> None:
    (found,) = printed("joiners", "--agents", "4")
    assert (found["agents"], found["joined"], found["attempts_aborted"]) == (4, 4, 0)
    assert found["rounds"] >= 2
    assert found["coordinator_cpu_s"] > 0
    assert len(found["load"]) == 3


def test_codecs_are_measured_on_a_pseudo_gradient() -> None:
    small = ["--steps", "2", "--width", "32", "--layers", "1", "--mb", "0.5", "--runs", "1"]
    found = {line["codec"]: line for line in printed("codecs", *small)}
    assert list(found) == [*CODEC_NAMES, *(name for name in CHUNKED_NAMES if name not in CODEC_NAMES)]
    errors = [found[name]["relative_error"] for name in ("float32", "int8", "int4", "sparse")]
    assert errors[0] == 0 < errors[1] < errors[2] < errors[3] < 1
    sparse = found["sparse"]
    assert sparse["ideal_relative_error"] <= sparse["relative_error"] < 1.02 * sparse["ideal_relative_error"]
    assert min(line["encode_mb_s"] for line in found.values()) > 0
    assert sparse["bits_per_parameter"] < 0.2


@pytest.mark.proof
def test_threads_compares_an_unmodified_cell_with_one_that_sets_its_threads(no_processes_left: str) -> None:
    found = printed("threads", "--nodes", "1", "2", "--runs", "1", "--steps", "3")
    assert [line["nodes"] for line in found] == [1, 2]
    for line in found:
        assert line["threads"] == max(1, line["cores"] // line["nodes"])
        assert line["ratio"] == pytest.approx(line["unmodified_ms"] / line["modified_ms"], rel=0.05)
        assert line["load"] >= 0


def test_uneven_compares_ways_not_to_wait_for_the_slow_node(no_processes_left: str) -> None:
    small = ["--slow", "3", "--step-seconds", "0.01", "--every", "10", "--rounds", "2", "--params", "1000"]
    found = {line["way"]: line for line in printed("uneven", "--nodes", "2", *small)}
    assert {way: line["formula"] for way, line in found.items()} == {"gloo": 0.5, "all": 0.5, "seconds": 1, "quorum": 1}
    for line in found.values():
        # Steps cannot be shorter than they sleep: 32 samples in 0.01 s, and in 0.03 s.
        assert min(line["solo_samples_per_s"], line["samples_per_s"]) > 0
        assert max(line["solo_samples_per_s"], line["samples_per_s"]) <= 3200 * (1 + 1 / 3)
        assert line["share_of_solo"] == pytest.approx(line["samples_per_s"] / line["solo_samples_per_s"], abs=0.001)
    assert found["seconds"]["late"] == found["all"]["late"] == 0


@pytest.mark.proof
def test_fidelity_compares_the_losses_of_all_arms_and_fails_when_one_is_above_its_bound(
    arms: list[str], fidelity: Callable[..., Ended]
) -> None:
    small = ["--rounds", "2", "--every", "4", "--batch", "8", "--width", "32", "--layers", "1", "--seeds", "2"]
    code, lines, said = fidelity(*small, "--lr", "8e-3")
    found = {line["arm"]: line for line in lines}
    assert list(found) == arms, said
    plain = found["data-parallel"]
    assert code == 1
    assert plain["most_loss"] < plain["loss"] < 6
    for line in found.values():
        assert (line["seeds"], line["parameters"]) == (2, plain["parameters"])
        assert line["sd"] > 0
    for name in set(arms) - {"data-parallel"}:
        line = found[name]
        assert line["loss"] != plain["loss"]
        if name == "data-parallel-muon":  # others are compared with it
            continue
        assert line["relative"] == pytest.approx(line["loss"] / found[line["against"]]["loss"] - 1, abs=1e-4)


def test_fidelity_does_not_train_again_what_it_has(tmp_path: Path, fidelity: Callable[..., Ended]) -> None:
    small = ["--rounds", "2", "--every", "2", "--batch", "4", "--width", "32", "--layers", "1", "--seeds", "1"]

    def measured(*arms: str, more: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        code, lines, said = fidelity(*small, "--keep", str(kept), "--arms", *arms, *more)
        assert code == 1, said  # 4 steps are not enough for its bounds
        return lines

    kept = tmp_path / "trainings.jsonl"
    (first,) = measured("data-parallel")
    lines = kept.read_text().splitlines()
    assert measured("data-parallel", "diloco-2")[0] == first  # its seconds too
    assert kept.read_text().splitlines()[:-1] == lines
    changed = json.loads(lines[0])
    kept.write_text(json.dumps(changed | {"result": changed["result"] | {"loss": 7.0}}) + "\n")
    assert measured("data-parallel")[0]["loss"] == 7.0
    assert measured("data-parallel", more=("--batch", "2"))[0]["loss"] != 7.0
    kept.write_text("loss 1.3\n")
    code, _, said = fidelity(*small, "--keep", str(kept))
    assert (code, "line 1: not a training of benchmarks.fidelity: 'loss 1.3'" in said) == (2, True)


@pytest.mark.proof
def test_fidelity_prints_a_line_for_each_setting_of_a_sweep() -> None:
    small = ["--rounds", "3", "--every", "2", "--batch", "4", "--width", "32", "--layers", "1", "--seeds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fidelity", *small, "--arms", "sparse-4", "--outer-lr", "0.5", "1", "--beta",
         "0.1", "0.9", "--jobs", "1"],
        capture_output=True, text=True, timeout=200, cwd=ROOT, check=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["outer_lr"], line["beta"]) for line in lines] == [(0.5, 0.1), (0.5, 0.9), (1.0, 0.1), (1.0, 0.9)]
    assert len({line["loss"] for line in lines}) == 4


def test_all_reduce_compares_with_gloo(no_processes_left: str) -> None:
    found = figures("all_reduce", "--mb", "0.5", "--transports", "shm", "--blocks", "2")
    assert (found["transport"], found["nodes"], found["mb"], found["runs"]) == ("shm", 2, 0.5, 40)
    assert found["in_place"] is True
    assert found["ratio_to_gloo"] == pytest.approx(found["gloo_ms"] / found["ms"], rel=0.02)
    assert found["barrier_ratio"] == pytest.approx(found["barrier_ms"] / found["gloo_barrier_ms"], rel=0.02)
    assert min(found["cpu_ms"], found["gloo_cpu_ms"]) > 0


@pytest.mark.proof
def test_rounds_compares_time_and_memory_of_a_round_with_the_same_by_hand(no_processes_left: str) -> None:
    found = figures("rounds", "--params", "1e5", "--codec", "float32", "--rounds", "2", "--after", "0")
    assert (found["benchmark"], found["codec"], found["nodes"], found["params"]) == ("rounds", "float32", 2, 100_000)
    assert min(found["ours_s"], found["gloo_s"], found["io_thread_longest_ms"]) > 0
    assert found["ratio_to_gloo"] == pytest.approx(found["ours_s"] / found["gloo_s"], rel=0.02)
    assert found["apart"] < 1e-5
    assert found["peak_multiple"] >= found["between_multiple"] > 0
    assert found["gloo_peak_multiple"] > 0
    assert {"after_multiple", "load"} <= found.keys()


@pytest.mark.parametrize(
    ("hashes", "apart", "words"),
    [(("a", "b"), 0.0, "the nodes hold different states"), (("a", "a"), 1e-3, "the loop by hand differ by 0.001")],
)
def test_rounds_has_no_figure_where_parameters_differ(hashes: tuple[str, str], apart: float, words: str) -> None:
    case = rounds.Case("float32", 2, 1000, 2)
    nodes = [{"ours": [0.1], "gloo": [0.1], "hash": value, "apart": apart, "task": 0.0} for value in hashes]
    with pytest.raises(RuntimeError, match=words):
        rounds.times(case, lambda source: nodes)


@pytest.mark.proof
def test_rounds_beside_files_says_what_the_nodes_hold_together(no_processes_left: str) -> None:
    options = ["--beside", "files", "--state", "disk", "--dtype", "bfloat16", "--codec", "int4", "--after", "0"]
    found = figures("rounds", "--params", "1e5", "--rounds", "2", *options)
    assert (found["codec"], found["dtype"], found["nodes"]) == ("int4", "bfloat16", 2)
    assert found["ratio_to_files"] == pytest.approx(found["ours_s"] / found["files_s"], rel=0.01)
    assert 0.1 < found["together_gb"] < 4
    assert not found.keys() & {"gloo_s", "apart", "gloo_peak_multiple"}


def test_what_the_state_has_in_files() -> None:
    cases = [("int4", "float32"), ("int4", "bfloat16"), ("float32", "float32"), ("sparse", "float32")]
    found = [Case(codec, 2, 100, 2, momentum=momentum).state_bytes for codec, momentum in cases]
    assert found == [1200, 1000, 800, 800]


def test_rounds_refuses_a_state_that_the_package_does_not_have() -> None:
    there = "state" in inspect.signature(nc.DiLoCo).parameters
    assert rounds.not_there_yet(["float32", "sparse"], "memory") == ""
    assert ("nc.DiLoCo of this notebook-cluster has no state=" in rounds.not_there_yet(["int8"], "disk")) is not there


@pytest.mark.proof
@pytest.mark.namespaces
@pytest.mark.skipif(bool(links.missing()), reason=links.missing() or "everything is there")
def test_all_reduce_over_a_cable_compares_with_plain_tcp(no_processes_left: str) -> None:
    slow = ["--mb", "1", "--rate", "100mbit", "--blocks", "1", "--transports", "tcp+curve", "tcp", "--new"]
    curve, plain = printed("all_reduce", "--nodes", "2", *slow)
    assert (curve["transport"], plain["transport"], curve["rate"]) == ("tcp+curve", "tcp", "100mbit")
    assert curve["in_place"] is plain["in_place"] is False
    assert curve["ratio_to_plain"] == pytest.approx(plain["ms"] / curve["ms"], rel=0.02)
    # 1 MiB each way over 100 Mbit/s takes 84 ms: the cable is really as slow as that.
    assert min(curve["ms"], plain["ms"]) > 70


@pytest.mark.proof
@pytest.mark.namespaces
@pytest.mark.skipif(bool(links.missing()), reason=links.missing() or "everything is there")
def test_a_late_node_gets_the_state_once_while_rounds_go_on(no_processes_left: str) -> None:
    (found,) = printed("late_node", "--params", "1e6", "--every", "2")
    assert found["state_mb"] == 8
    assert 8 < found["received_mb"] < 12
    assert found["last_round"] > found["first_round"] > 3
    assert found["round_s"] < found["seconds"]


@pytest.mark.proof
@pytest.mark.namespaces
@pytest.mark.skipif(bool(links.missing()), reason=links.missing() or "everything is there")
def test_links_measures_the_share_of_steps_beside_the_formula(no_processes_left: str) -> None:
    cases = ["gloo", "parallel", "int8", "sparse-overlap"]
    small = ["--rate", "20mbit", "--params", "1e5", "--step-seconds", "0.02", "--seconds", "0.5"]
    gloo, parallel, int8, sparse = found = printed("links", "--nodes", "2", *small, "--cases", *cases, timeout=200)
    assert [line["strategy"] for line in found] == ["gloo DDP", "DataParallel", "DiLoCo", "SparseLoCo"]
    assert {(line["step"], line["rate"], line["parameters"]) for line in found} == {("slept", "20mbit", 100_000)}
    # 0.02 s of steps, and 0.4 MB each way, which takes 0.16 s: the link is really as slow as that.
    assert gloo["formula"] == parallel["formula"] == pytest.approx(0.111, abs=0.001)
    for line in (gloo, parallel):
        assert line["compute_share"] < 1.1 * line["formula"]
    for line in found:
        assert line["formula_mb"] < line["mb_sent"] < 1.3 * line["formula_mb"] + 0.03
    assert int8["compute_share"] > parallel["compute_share"]
    assert (int8["overlap"], sparse["overlap"], sparse["formula"]) == (0, 5, 1.0)


@pytest.mark.proof
@pytest.mark.namespaces
@pytest.mark.skipif(bool(links.missing()), reason=links.missing() or "everything is there")
def test_patience_measures_gaps_between_rounds_and_names_who_is_left_out(no_processes_left: str) -> None:
    few = ["--nodes", "3", "--repeats", "1", "--seconds", "12", "--cases", "cable-pulled", "encoding"]
    cable, encoding = printed("patience", *few, timeout=240)
    assert (cable["case"], cable["named"], len(cable["longest_gap_s"])) == ("cable-pulled", ["book"], 1)
    assert cable["longest_gap_s"][0] < cable["seconds"]
    assert (encoding["rounds"], encoding["left_out"], encoding["named"]) == (6, 0, [])


@pytest.mark.parametrize(
    ("program", "options", "words"),
    [
        ("all_reduce", ["--rate", "fast"], "rate 'fast': use a number above 0 and kbit, mbit or gbit"),
        ("all_reduce", ["--rate", "1gbit", "--transports", "ipc"], "only tcp and tcp+curve go over a cable"),
        ("all_reduce", ["--nodes", "1"], "--nodes is at least 2"),
        ("links", ["--rate", "fast"], "rate 'fast': use a number above 0 and kbit, mbit or gbit"),
        ("links", ["--rate", "0mbit"], "rate '0mbit'"),
        ("links", ["--nodes", "1"], "--nodes is at least 2"),
        ("links", ["--cases", "topk"], "invalid choice: 'topk'"),
        ("patience", ["--nodes", "2"], "--nodes is at least 3"),
        ("rounds", ["--nodes", "1"], "--nodes and --rounds are at least 2"),
        ("rounds", ["--codec", "topk"], "invalid choice: 'topk'"),
        ("rounds", ["--beside", "files"], "--beside files is for --state disk"),
    ],
)
def test_programs_with_links_say_what_is_wrong_with_an_option(program: str, options: list[str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{program}", *options],
        capture_output=True, text=True, timeout=60, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert words in done.stderr


def test_the_formula_of_links_is_that_of_the_link_alone() -> None:
    def share(name: str, rate: str) -> float:
        case = links.CASES[name]
        return links.formula(case, links.megabytes(case, 10_000_000, 4), rate, 0.25)[0]

    assert links.megabytes(links.CASES["float32"], 10_000_000, 4) == 60.0  # 1.5 times 40 MB
    assert share("parallel", "100mbit") == share("gloo", "100mbit") == pytest.approx(0.25 / 5.05)
    assert share("float32", "100mbit") == pytest.approx(7.5 / 12.3)
    assert share("sparse", "100mbit") == pytest.approx(0.99, abs=0.005)
    assert share("streaming", "100mbit") == 1.0  # 1.2 s for each fragment, behind 1.25 s
    assert share("streaming", "50mbit") == pytest.approx(7.5 / (7.5 + 4 * 1.15))


@pytest.mark.proof
def test_the_journal_is_measured_long_and_empty_and_over_hours(no_processes_left: str) -> None:
    recovery, disk = printed("journal", "--rounds", "5000", "--runs", "1", "--hours", "0.05")
    found = recovery["recovery"]
    assert found["rounds"] == 5000
    assert found["longer_s"] == pytest.approx(found["long"]["seconds"] - found["empty"]["seconds"], abs=0.002)
    assert 10 < found["empty"]["memory_mb"] < 150
    assert disk["disk"]["rounds"] == 1800
    assert 0 < disk["disk"]["end_mb"] <= disk["disk"]["most_mb"]


@pytest.mark.proof
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_coordinator_that_is_killed_on_a_full_disk_loses_nothing(no_processes_left: str) -> None:
    (line,) = printed("journal", "--kills", "6", "--seed", "1")
    found = line["kills"]
    assert (found["kills"], found["went_on"], found["cell"]) == (6, 6, "ok")
    assert found["lines_told"] + found["had_room"] == found["on_a_full_disk"] > 0
    assert found["unreadable"] == found["rounds_lost"] == 0
