"""The benchmarks print one JSON line with every figure and leave nothing behind. How fast is not asserted here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from notebook_cluster.codecs import CHUNKED_NAMES, CODEC_NAMES

ROOT = Path(__file__).parents[1]


def figures(module: str, *options: str) -> dict[str, Any]:
    """The one line that ``python -m benchmarks.<module>`` prints on its output."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--nodes", "2", *options],
        capture_output=True, text=True, timeout=150, cwd=ROOT, env=os.environ.copy(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)  # type: ignore[no-any-return]


def test_start_up_compares_three_ways(no_processes_left: str) -> None:
    found = figures("start_up", "--runs", "1")
    assert min(found["ours_s"], found["ipyparallel_s"], found["jupyter_client_s"]) > 0
    assert found["ratio_to_ipyparallel"] == pytest.approx(found["ours_s"] / found["ipyparallel_s"], rel=0.01)


def test_on_all_compares_three_ways(no_processes_left: str) -> None:
    found = figures("on_all", "--blocks", "2", "--times", "3")
    assert found["runs"] == 6
    ratio = found["ours_ms"] / found["jupyter_client_ms"]
    assert found["ratio_to_jupyter_client"] == pytest.approx(ratio, rel=0.02)


def test_stop_compares_both_ways_with_busy_and_with_sleeping_nodes(no_processes_left: str) -> None:
    found = figures("stop", "--runs", "1")
    for end in ("", "_asleep"):
        ratio = found[f"ours{end}_s"] / found[f"ipyparallel{end}_s"]
        assert found[f"ratio_to_ipyparallel{end}"] == pytest.approx(ratio, rel=0.02)


def test_on_all_compares_printed_text(no_processes_left: str) -> None:
    found = figures("on_all", "--stdout-mb", "0.4")
    assert found["stdout_mb"] == [0.05, 0.1, 0.2, 0.4]
    for name in ("ratio_to_ipyparallel", "memory_ratio_to_ipyparallel"):
        assert found[name] > 0
    assert min(found["ours_memory_mb"]) > 10


def test_panel_measures_notebook_and_coordinator(no_processes_left: str) -> None:
    found = figures("panel", "--seconds", "3")
    assert {"kernel_cpu", "websocket_kb_s", "redraws_per_s", "coordinator_cpu", "coordinator_mb"} <= found.keys()
    assert 0 < found["redraws_per_s"] <= 4
    assert found["coordinator_mb"] > 10


def test_codecs_are_measured_on_a_pseudo_gradient() -> None:
    small = ["--steps", "2", "--width", "32", "--layers", "1", "--mb", "0.5", "--runs", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.codecs", *small],
        capture_output=True, text=True, timeout=150, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {line["codec"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert list(found) == [*CODEC_NAMES, *CHUNKED_NAMES, "randomk", "powersgd"]
    errors = [found[name]["relative_error"] for name in ("float32", "int8", "int4", "sparse")]
    assert errors[0] == 0 < errors[1] < errors[2] < errors[3] < 1
    sparse = found["sparse"]
    assert sparse["ideal_relative_error"] <= sparse["relative_error"] < 1.02 * sparse["ideal_relative_error"]
    assert min(line["encode_mb_s"] for line in found.values()) > 0
    assert sparse["bits_per_parameter"] < 0.2


def test_all_reduce_compares_with_gloo(no_processes_left: str) -> None:
    found = figures("all_reduce", "--mb", "0.5", "--transports", "shm", "--blocks", "2")
    assert (found["transport"], found["nodes"], found["mb"], found["runs"]) == ("shm", 2, 0.5, 40)
    assert found["ratio_to_gloo"] == pytest.approx(found["gloo_ms"] / found["ms"], rel=0.02)
    assert found["barrier_ratio"] == pytest.approx(found["barrier_ms"] / found["gloo_barrier_ms"], rel=0.02)
    assert min(found["cpu_ms"], found["gloo_cpu_ms"]) > 0
