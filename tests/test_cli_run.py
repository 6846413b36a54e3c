"""What may be typed after ``notebook-cluster run``, and how the output of nodes is shown."""

import io
from types import SimpleNamespace
from typing import Any

import pytest

from notebook_cluster.cli.arguments import UsageError, parse
from notebook_cluster.cli.run import _wait_for_nodes, exit_code
from notebook_cluster.cli.run_output import UNFINISHED_S, NodeLines
from notebook_cluster.client import ClusterError
from notebook_cluster.magics.execution.waiting import StopCounter
from notebook_cluster.protocol.launches import LaunchView
from notebook_cluster.protocol.views import CellEnded, NodeResult, Output
from tests.fake_cluster import cluster_view, peer_view


@pytest.mark.parametrize(
    ("words", "of_script", "behind", "nodes"),
    [
        ("train.py", "", "", 0),
        ("--nodes 3 train.py --lr 0.1 data", "--lr 0.1 data", "", 3),
        ("train.py --lr 0.1 --nodes 3 data", "--lr 0.1 data", "--nodes 3", 3),
        ("train.py --nodes=3 --lr=0.1", "--lr=0.1", "--nodes=3", 3),
        ("train.py -- --nodes 3", "--nodes 3", "", 0),
        ("--nodes 2 -- train.py --nodes 3", "--nodes 3", "", 2),
        ("train.py --keep a --script-only", "a", "--keep|--script-only", 0),
        ("train.py --help -h", "--help -h", "", 0),
        ("train.py a -- b -- c", "a b -- c", "", 0),
        ("train.py -x --nodes 3 -y", "-x -y", "--nodes 3", 3),
    ],
)
def test_options_stand_on_both_sides_of_the_script(words: str, of_script: str, behind: str, nodes: int) -> None:
    options = parse(["run", *words.split()])
    assert (str(options.script), options.nodes) == ("train.py", nodes)
    assert (" ".join(options.of_script), "|".join(options.behind)) == (of_script, behind)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "SCRIPT.py"),
        ("--nodes", "--nodes"),
        ("--lr 0.1 train.py", "there is no option --lr"),
        ("train.py --nodes many", "'many' is not a number of nodes"),
        ("train.py --peers a:b", "'a:b' is not HOST:PORT"),
    ],
)
def test_what_is_mistyped_is_named(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(["run", *words.split()])


class Screen:
    def __init__(self) -> None:
        self.out, self.errors = io.StringIO(), io.StringIO()
        self.lines = NodeLines(self.out, self.errors)

    def write(self, node: str, text: str, name: str = "stdout") -> None:
        self.lines.add([Output(node=node, rank=0, kind="stream", content={"name": name, "text": text})])


def test_lines_of_nodes_are_whole_and_have_their_names() -> None:
    screen = Screen()
    screen.write("mini", "one\ntw")
    screen.write("desk", "three\n")
    screen.write("mini", "o\n\nlast")
    screen.write("mini", "wrong\n", "stderr")
    assert screen.out.getvalue() == "[mini] one\n[desk] three\n[mini] two\n[mini] \n"
    screen.lines.finish()
    assert screen.out.getvalue().endswith("[mini] last\n")
    assert screen.errors.getvalue() == "[mini] wrong\n"


def test_a_bar_is_shown_now_and_then_and_as_it_ends() -> None:
    screen = Screen()
    screen.lines.show_unfinished(100.0)
    for percent in range(1, 100):
        screen.write("mini", f"\r{percent}%")
        screen.lines.show_unfinished(100.0 + percent / 10)
    screen.write("mini", "\r100%\n")
    shown = screen.out.getvalue().splitlines()
    assert shown[-1] == "[mini] 100%"
    assert len(shown) == 1 + int(9.8 / UNFINISHED_S)
    screen.lines.finish()
    assert screen.out.getvalue().count("100%") == 1


def test_what_a_node_prints_steers_no_terminal() -> None:
    screen = Screen()
    screen.write("mini", "\x1b]0;title\x07\x1b[2Jhere\x08\x9bx\x85\u2028\u202e\n")
    assert "\x1b" not in screen.out.getvalue()
    assert not {"\x07", "\x9b", "\x85", "\u2028", "\u202e"} & {*screen.out.getvalue()}
    screen.write("mini", "x" * 25_000)
    assert screen.out.getvalue().count("x" * 10_000) == 2
    picture: dict[str, Any] = {"data": {"text/plain": "Figure(640x480)", "image/png": "iVBOR"}}
    screen.lines.add([Output(node="mini", rank=0, kind="display_data", content=picture)])
    screen.lines.finish()
    assert screen.out.getvalue().count("[mini] " + "x" * 5_000 + "Figure(640x480)\n") == 1


@pytest.mark.parametrize(
    ("status", "results", "stopped", "code"),
    [
        ("ok", {"mini": NodeResult(status="ok")}, False, 0),
        ("ok", {"mini": NodeResult(status="ok")}, True, 0),
        ("interrupted", {"mini": NodeResult(status="interrupted")}, True, 130),
        ("interrupted", {"mini": NodeResult(status="interrupted")}, False, 130),
        ("error", {"mini": NodeResult(status="error", error_name="ValueError", error_value="9")}, False, 1),
        ("error", {"mini": NodeResult(status="lost")}, False, 1),
        ("error", {"mini": NodeResult(status="lost", reason="killed by SIGSEGV")}, False, 139),
        (
            "error",
            {"mini": NodeResult(status="error", error_name="ScriptExit", error_value="exit code 256")},
            False,
            255,
        ),
        ("error", {"mini": NodeResult(status="error", error_name="ScriptExit", error_value="exit code ²")}, False, 1),
        (
            "error",
            {
                "mini": NodeResult(status="error", error_name="PeerLost", error_value="desk has ended"),
                "desk": NodeResult(status="error", error_name="ScriptExit", error_value="exit code 3"),
            },
            False,
            3,
        ),
    ],
)
def test_exit_codes(status: str, results: dict[str, NodeResult], stopped: bool, code: int) -> None:
    assert exit_code(CellEnded(cell=1, status=status, results=results), stopped=stopped) == code  # type: ignore[arg-type]


def test_this_machine_alone_is_nobody_to_wait_for() -> None:
    """A launch has ended, and the agent of this machine is there: that one starts no node by itself."""
    here = peer_view("local", condition="connected", found_by="local")
    ended = LaunchView("l", "slurm 7", "ended", 0, 0, 0, "slurm 7: given back")
    state = cluster_view(nodes=[], peers=[here], launches=[ended])
    with pytest.raises(ClusterError, match="0 of 2 nodes are there, and nobody else is to come: slurm 7: given back"):
        _wait_for_nodes(SimpleNamespace(state=lambda: state), 2, StopCounter())  # type: ignore[arg-type]
