"""``%cluster vars``: what is in the namespace of each node, and where nodes differ."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pandas
import pytest
import torch

from notebook_cluster.client import Cluster
from notebook_cluster.coordinator.kernels.inspection import checked
from notebook_cluster.node.namespace.variables import describe_namespace
from notebook_cluster.protocol.clock import ABSENT
from notebook_cluster.protocol.interaction import MOST_VARIABLES, NodeVariables, Variable
from notebook_cluster.values.content_hash import MOST_HASHED
from notebook_cluster.widgets import render_variables
from tests.cluster import Watcher, kernel_pid, stopped
from tests.notebook_kernel import NotebookKernel
from tests.shared_notebook import error_of, lesson


def row(value: Any, seconds: float = 30) -> Variable:
    shell = SimpleNamespace(user_ns={"x": value}, user_ns_hidden={})
    ((found,), _) = describe_namespace(shell, everything=True, seconds=seconds)
    return found


# ---- one row


@pytest.mark.parametrize(
    ("value", "kind", "shape", "shown"),
    [
        (3, "int", "", "3"),
        (True, "bool", "", "True"),
        (0.1, "float", "", "0.1"),
        ("digits", "str", "", "'digits'"),
        ("x" * 100, "str", "100 characters", "'" + "x" * 19 + "…"),
        (b"ab", "bytes", "", "b'ab'"),
        (None, "None", "", ""),
        ([1, 2], "list", "2 items", ""),
        ({"a": 1}, "dict", "1 item", ""),
        (object(), "object", "", ""),
    ],
)
def test_row_of_plain_data(value: Any, kind: str, shape: str, shown: str) -> None:
    found = row(value)
    assert (found.kind, found.shape, found.value) == (kind, shape, shown)


def test_row_of_arrays_tensors_and_models_says_shape_device_size_and_hash() -> None:
    array = row(numpy.zeros((3, 4), dtype=numpy.float32))
    assert (array.kind, array.shape, array.bytes, len(array.hash)) == ("float32 array", "[3, 4]", 48, 8)
    tensor = row(torch.zeros(64, 10, dtype=torch.bfloat16))
    assert (tensor.kind, tensor.shape, tensor.device, tensor.bytes) == ("bfloat16 tensor", "[64, 10]", "cpu", 1280)
    model = row(torch.nn.Linear(3, 4))
    assert (model.kind, model.shape, model.device, model.bytes) == ("Linear", "16 parameters", "cpu", 64)
    assert row(numpy.float64(0.5)).value == "0.5"


def test_row_of_a_frame() -> None:
    frame = pandas.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    assert (row(frame).kind, row(frame).shape) == ("DataFrame", "[2, 2]")
    assert row(frame).hash == row(frame.copy()).hash != row(frame.assign(a=[1, 3])).hash
    assert row(pandas.DataFrame({"a": [[1], [2]]})).hash == ""  # lists cannot be hashed: there is no hash, no error


def test_row_of_mlx() -> None:
    mlx = pytest.importorskip("mlx.core")
    found = row(mlx.zeros((3, 2), dtype=mlx.bfloat16))
    assert (found.kind, found.shape, found.bytes, len(found.hash)) == ("bfloat16 MLX array", "[3, 2]", 12, 8)
    nn = pytest.importorskip("mlx.nn")
    assert row(nn.Linear(2, 3)).shape == "9 parameters"


def hash_pairs() -> Iterator[tuple[str, Any, Any, bool]]:
    ones = torch.ones(4, 4)
    yield "equal arrays", numpy.arange(6), numpy.arange(6), True
    yield "another dtype", numpy.arange(6), numpy.arange(6.0), False
    yield "another shape", numpy.zeros((2, 3)), numpy.zeros((3, 2)), False
    yield "a view with gaps", numpy.arange(6).reshape(2, 3).T, numpy.array([[0, 3], [1, 4], [2, 5]]), True
    yield "a transposed tensor", ones.t(), ones, True
    yield "one number of a tensor", torch.zeros(4), torch.tensor([0.0, 0, 0, 1e-30]), False
    yield "order of keys", {"a": 1, "b": 2}, {"b": 2, "a": 1}, True
    yield "a value in a dict", {"a": 1}, {"a": 2}, False
    yield "nested lists", [1, [2]], [[1], 2], False
    yield "order of a set", {"x", "y", "z"}, {"z", "y", "x"}, True
    yield "a tensor in a list", [torch.zeros(2)], [torch.ones(2)], False
    yield "the end of a long text", "x" * 1000 + "a", "x" * 1000 + "b", False
    yield "a huge number", 10**5000, 10**5000 + 1, False


def test_hashes_are_equal_exactly_where_contents_are() -> None:
    for what, one, other, same in hash_pairs():
        assert row(one).hash, what
        assert (row(one).hash == row(other).hash) is same, what


def test_large_value_is_sampled_and_says_so() -> None:
    large = numpy.zeros(MOST_HASHED // 8 + 1_000_000)
    before = row(large).hash
    assert before.startswith("~")
    large[-1] = 1.0  # the ends are always looked at
    assert row(large).hash != before


def test_without_time_there_is_a_row_without_hash() -> None:
    found = row(numpy.zeros(100), seconds=-1)
    assert (found.shape, found.hash) == ("[100]", "")


class Hostile:
    """Whatever is called of it fails."""

    def __repr__(self) -> str:
        raise RuntimeError("not to be called")

    __str__ = __eq__ = __hash__ = __len__ = __repr__  # type: ignore[assignment]


def test_odd_values_have_a_row_too() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    assert row(cyclic).hash.startswith("~")
    assert row([Hostile()]).kind == "list"
    assert row(Hostile()).kind == "Hostile"
    assert row(torch.zeros(3, device="meta")).hash == ""
    assert row(torch.zeros(3, 3).to_sparse()).kind
    assert row(torch.nn.LazyLinear(3)).kind == "LazyLinear"


# ---- the table


def column(node: str, rank: int, *rows: Variable, **fields: Any) -> NodeVariables:
    return NodeVariables(node=node, rank=rank, variables=list(rows), **{"status": "ok", "asked": 0.0} | fields)


def int_row(name: str, value: int) -> Variable:
    return Variable(name=name, kind="int", value=str(value), bytes=28)


def test_same_values_are_folded_and_rows_that_differ_are_marked() -> None:
    columns = [
        column("local", 0, int_row("lr", 1), int_row("seen", 5)),
        column("mini", 1, int_row("lr", 1), int_row("seen", 5)),
        column("desk", 2, int_row("lr", 1), int_row("seen", 7)),
    ]
    assert render_variables(columns).splitlines() == [
        "2 variables on 3 nodes; 1 differs: seen",
        "   lr                 int 1",
        "≠  seen  local, mini  int 5",
        "         desk         int 7",
    ]
    shown = render_variables(columns, html=True)
    assert '<td colspan="3">int 1</td>' in shown
    assert '<td>int 5</td><td>int 5</td><td class="nbc-odd">int 7</td>' in shown
    without_majority = render_variables([column("a", 0, int_row("x", 1)), column("b", 1, int_row("x", 2))], html=True)
    assert without_majority.count('class="nbc-odd"') == 2


def test_another_device_is_shown_but_is_no_difference() -> None:
    tensors = [
        Variable(name="x", kind="float32 tensor", shape="[2]", device=device, bytes=8, hash="12345678")
        for device in ("cuda:0", "mps")
    ]
    shown = render_variables([column("a", 0, tensors[0]), column("b", 1, tensors[1])])
    assert "all the same" in shown
    assert "· mps ·" in shown
    assert "≠" not in shown


def test_missing_variable_and_missing_hash() -> None:
    hashed = Variable(name="x", kind="Linear", shape="16 parameters", hash="12345678")
    late = Variable(name="x", kind="Linear", shape="16 parameters")
    assert "all the same" in render_variables([column("a", 0, hashed), column("b", 1, late)])
    shown = render_variables([column("a", 0, hashed), column("b", 1)])
    assert f"≠  x  a  Linear 16 parameters · #12345678\n      b  {ABSENT}" in shown


def test_column_of_a_busy_node_says_how_old_it_is_and_one_never_asked_counts_for_nothing() -> None:
    columns = [
        column("a", 0, int_row("x", 1)),
        column("b", 1, int_row("x", 1), status="busy", asked=12.0),
        column("c", 2, status="lost", asked=None),
    ]
    shown = render_variables(columns)
    assert "1 variable on 2 nodes; all the same" in shown
    assert "b runs a cell: as it was 12 s ago" in shown
    assert "c cannot be reached: not asked yet" in shown


def test_text_of_a_node_is_escaped_and_on_one_line() -> None:
    bad = Variable(name="<img src=x onerror=alert(1)>", kind="a\nb\x1b[31m", value="<script>", hash="zz")
    safe = checked(bad)
    assert "\n" not in safe.kind
    assert safe.hash == ""
    shown = render_variables([column("<b>", 0, safe)], html=True)
    assert "<img" not in shown
    assert "<script" not in shown
    assert "&lt;img" in shown


# ---- real nodes


@pytest.fixture(scope="module")
def notebook() -> Iterator[NotebookKernel]:
    with lesson() as kernel:
        yield kernel


def test_table_of_real_nodes(notebook: NotebookKernel) -> None:
    assert notebook.works("%cluster vars") == "no variables on 2 nodes"
    notebook.works(
        "%%on_all\nimport torch, math\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(3, 4)\n"
        "seen = [rank]\n_hidden = 1\ndef bake(): pass"
    )
    cell = notebook.run("%cluster vars")
    shown = cell.shown
    assert shown.splitlines()[0] == "2 variables on 2 nodes; 1 differs: seen"
    assert "Linear 16 parameters · cpu · 64 B · #" in shown
    assert "text/html" in cell.kinds
    for hidden in ("_hidden", "world_size", "rank", "math", "bake", "nc "):
        assert hidden not in shown
    everything = notebook.works("%cluster vars --all")
    assert "bake" in everything
    assert "math" in everything
    assert notebook.works("%cluster vars m*").startswith("1 variable on 2 nodes; all the same\n   model")
    assert "takes no value" in error_of(notebook, "%cluster vars --all=3")


def test_it_is_no_cell_and_busy_nodes_keep_their_last_column(notebook: NotebookKernel) -> None:
    notebook.works("%%on_all\nkept = 1")
    with Cluster.attach() as cluster:
        before = cluster.state().cell
        cluster.variables()
        assert cluster.state().cell == before
        running = Watcher(cluster.execute("kept = 2\nprint('began')\nwhile True: pass", ("local-2",), replay=False))
        running.wait_for("began")
        idle, busy = cluster.variables("kept")
        assert (idle.status, busy.status) == ("ok", "busy")
        assert [row.value for row in busy.variables] == ["1"]
        assert busy.asked is not None
        cluster.interrupt()
        assert running.wait_end().status == "interrupted"
        assert [row.value for column in cluster.variables("kept") for row in column.variables] == ["1", "2"]


def test_reply_is_bounded(notebook: NotebookKernel) -> None:
    notebook.works(f"%%on 0\nglobals().update({{f'n{{i:04}}': i for i in range({MOST_VARIABLES} + 40)}})")
    with Cluster.attach() as cluster:
        first, second = cluster.variables("n*")
        assert (len(first.variables), first.left_out) == (MOST_VARIABLES, 40)
        assert (len(second.variables), second.left_out) == (0, 0)
    assert "local has 40 variables more: %cluster vars PATTERN shows some" in notebook.works("%cluster vars n*")
    assert "is too long" in error_of(notebook, f"%cluster vars {'x' * 300}")


def test_node_that_does_not_answer_is_named_and_nobody_waits_for_it(notebook: NotebookKernel) -> None:
    with Cluster.attach() as cluster:
        pid = kernel_pid(cluster, "local-2")
        with stopped(pid):
            assert [column.status for column in cluster.variables("kept")] == ["ok", "silent"]
