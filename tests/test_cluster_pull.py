"""``%push`` and ``%pull`` in a notebook with a real cluster of three nodes, two of them on a peer."""

import asyncio
import hashlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from notebook_cluster.client import AsyncCluster, Cluster, ClusterError, Pulled, read_values
from notebook_cluster.journal.events import CellSubmitted
from notebook_cluster.protocol.transfers import ForgetValue, ValuePart
from tests.cluster import Watcher, read_events
from tests.conftest import wait_until
from tests.shared_notebook import SharedNotebook, shared_notebook


@pytest.fixture(scope="module")
def notebook() -> Iterator[SharedNotebook]:
    with shared_notebook("--local 2", "mini") as notebook:
        notebook.works("%cluster add mini")
        notebook.works("import numpy as np, pandas as pd")
        notebook.works("%%on_all\nimport numpy as np")
        yield notebook


@pytest.fixture(scope="module")
def cluster(notebook: SharedNotebook) -> Iterator[Cluster]:
    with notebook.attach() as cluster:
        yield cluster


# ---- pull ------------------------------------------------------------------------------------------------------------


def test_pull_gives_each_nodes_value_in_rank_order(notebook: SharedNotebook) -> None:
    notebook.works("%%on_all\nloss = rank / 2")
    shown = notebook.works("%pull loss")
    assert shown.strip() == "pulled loss from local, local-2, mini as {node: value}: float"
    assert notebook.value("loss") == "{'local': 0.0, 'local-2': 0.5, 'mini': 1.0}"


def test_pull_from_one_node_gives_the_bare_value(notebook: SharedNotebook) -> None:
    notebook.works("%%on_all\nname = nc.node()")
    assert "pulled name from mini: str" in notebook.works("%pull name --from mini")
    assert notebook.value("name") == "'mini'"
    notebook.works("%pull name --from 1")
    assert notebook.value("name") == "'local-2'"


def test_pull_from_some_nodes_gives_a_dict_of_those(notebook: SharedNotebook) -> None:
    notebook.works("%%on_all\nplace = rank")
    notebook.works("%pull place --from '!mini'")
    assert notebook.value("place") == "{'local': 0, 'local-2': 1}"
    notebook.works("%pull place --from 2,")
    assert notebook.value("place") == "{'mini': 2}"


def test_pull_into_another_variable(notebook: SharedNotebook) -> None:
    notebook.works("%%on_all\nsource = 1")
    assert "pulled source from mini into target: int" in notebook.works("%pull source --from mini --as target")
    assert notebook.value("target, 'source' in globals()") == "(1, False)"


def test_pull_says_that_a_variable_of_the_notebook_was_replaced(notebook: SharedNotebook) -> None:
    notebook.works("kept = [1, 2]")
    notebook.works("%%on_all\nkept = 3.5")
    assert "(in place of the notebook's own kept: list of 2)" in notebook.works("%pull kept --from 0")


def test_pull_brings_arrays_tensors_and_frames(notebook: SharedNotebook) -> None:
    notebook.works(
        "%%on mini\nimport torch, pandas\n"
        "weights = {'w': torch.arange(3, dtype=torch.bfloat16), 'n': np.array([[1, 2]], '>i2')}\n"
        "table = pandas.DataFrame({'a': ['x', None], 'b': pandas.array([1, None], dtype='Int64')})"
    )
    assert "table from mini: DataFrame 2x2" in notebook.works("%pull weights table --from mini")
    assert notebook.value("weights['w'].dtype, weights['w'].tolist()") == "(torch.bfloat16, [0.0, 1.0, 2.0])"
    assert notebook.value("weights['n'].dtype.str, weights['n'].tolist()") == "('>i2', [[1, 2]])"
    assert notebook.value("dict(table.dtypes.astype(str)), table['b'].isna().tolist()") == (
        "({'a': 'str', 'b': 'Int64'}, [False, True])"
    )


def test_pull_names_the_nodes_that_lack_the_variable(notebook: SharedNotebook) -> None:
    notebook.works("%%on !mini\nhere_only = rank")
    shown = notebook.works("%pull here_only")
    assert "pulled here_only from local, local-2 as {node: value}: int" in shown
    assert "'here_only' is not on mini" in shown
    assert notebook.value("here_only") == "{'local': 0, 'local-2': 1}"


def test_pull_of_a_variable_that_no_node_has(notebook: SharedNotebook) -> None:
    notebook.works("%%on_all\naccuracy = 1")
    assert notebook.fails("%pull acuracy") == (
        "UsageError: no node has a variable 'acuracy' (did you mean 'accuracy'?)"
    )
    assert notebook.fails("%pull nothing_like_it --from mini") == ("UsageError: mini has no variable 'nothing_like_it'")


def test_pull_of_what_does_not_travel_names_type_and_nodes(notebook: SharedNotebook) -> None:
    notebook.works("%%on_all\nimport torch\nmodel = torch.nn.Linear(1, 1)")
    error = notebook.fails("%pull model")
    assert error.startswith("ClusterError: cannot pull 'model' from local, local-2, mini: a Linear does not travel")
    assert error.endswith(": send its .state_dict()")


def test_what_can_be_pulled_is_pulled_beside_what_cannot(notebook: SharedNotebook) -> None:
    notebook.works("%%on_all\ngood = 1\nmixed = 1 if rank else object()")
    shown = notebook.works("%pull good mixed")
    assert "pulled mixed from local-2, mini as {node: value}: int" in shown
    assert "'mixed' did not come from local: an object does not travel" in shown
    notebook.fails("%pull good nowhere")
    assert notebook.value("good") == "{'local': 1, 'local-2': 1, 'mini': 1}"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%pull", "needs NAME"),
        ("%pull model.pt", "a file comes with %cluster class collect model.pt"),
        ("%pull import", "'import' is not the name of a variable"),
        ("%pull x --from nobody", "no node is called 'nobody'"),
        ("%pull x y --as z", "--as z is for one variable, not for 2"),
        ("%pull x --as 1", "--as takes the name of a variable, got '1'"),
        ("%pull x --form mini", "no option --form (did you mean '--from'?)"),
    ],
)
def test_pull_refuses_what_it_does_not_understand(notebook: SharedNotebook, line: str, words: str) -> None:
    assert words in notebook.fails(line)


def test_a_large_value_comes_whole_in_pieces(notebook: SharedNotebook) -> None:
    notebook.works("%%on mini\nbig = np.arange(9_000_000)")
    assert "pulled big from mini: int64 9000000 array" in notebook.works("%pull big --from mini")
    assert notebook.value("bool((big == np.arange(9_000_000)).all())") == "True"


def test_pulled_arrays_can_be_changed(notebook: SharedNotebook) -> None:
    notebook.works("%%on mini\nrow = np.zeros(3)")
    notebook.works("%pull row --from mini")
    assert notebook.works("row += 1; print(row.sum())") == "3.0\n"


def test_a_value_over_the_limit_is_refused_where_it_is(notebook: SharedNotebook) -> None:
    notebook.works("%%on mini\nvast = np.broadcast_to(np.float64(0), (1 << 28,))")
    error = notebook.fails("%pull vast --from mini")
    assert "cannot pull 'vast' from mini: it has 2,147 MB, at most 1 GiB travels" in error


def test_no_code_of_a_node_runs_in_the_notebook(notebook: SharedNotebook) -> None:
    notebook.works(
        "%%on mini\nclass Evil:\n    def __reduce__(self): return (print, ('executed',))\n"
        "evil = Evil()\nlist_with_evil = [Evil()]\nsub = type('Sub', (dict,), {'__reduce__': Evil.__reduce__})(a=1)"
    )
    for name in ("evil", "list_with_evil", "sub"):
        assert "does not travel" in notebook.fails(f"%pull {name} --from mini")


def test_pull_is_in_no_replay(notebook: SharedNotebook, cluster: Cluster) -> None:
    notebook.works("%%on_all\nseen = 1")
    notebook.works("%pull seen")
    events = read_events(Path(cluster.connection.file.run_log))
    submitted = [event for event in events if isinstance(event, CellSubmitted) and "# %pull seen" in event.source]
    assert [event.replay for event in submitted] == [False]


def test_pull_waits_for_the_cell_that_runs(notebook: SharedNotebook, cluster: Cluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    code = (
        "import os, time\nstep = 1\nprint('begun', flush=True)\n"
        f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)\nstep = 2"
    )
    busy = Watcher(cluster.execute(code, ["mini"], replay=False))
    busy.wait_for("begun", "mini")
    pulling = notebook.start("%pull step --from mini")
    notebook.kernel.until(pulling, "waiting")
    gate.touch()
    notebook.kernel.until(pulling)
    assert busy.wait_end().status == "ok"
    assert notebook.value("step") == "2"


def tickets(notebook: SharedNotebook) -> int:
    """Values that mini keeps for who pulls them."""
    shown = notebook.works(
        "%%on mini\nfrom notebook_cluster.values.transfer_store import SHELF\nprint(len(SHELF._tickets))"
    )
    return int(shown.split()[-1])


def test_a_node_forgets_what_was_pulled(notebook: SharedNotebook) -> None:
    notebook.works("%%on mini\nagain = np.zeros(1_000_000)")
    notebook.works("%pull again --from mini")
    assert tickets(notebook) == 0


def test_the_python_client_pulls_and_pushes(cluster: Cluster) -> None:
    cluster.push({"small": [1, (2,)], "large": bytes(1_000_000)})
    results = cluster.pull(["small", "large", "absent"], ["mini", "local"])
    assert {node: answer.value for node, answer in results["small"].items()} == {
        "local": [1, (2,)],
        "mini": [1, (2,)],
    }
    assert list(results["small"]) == ["local", "mini"]
    assert results["large"]["mini"].value == bytes(1_000_000)
    assert results["absent"]["local"].missing
    # A notebook may await instead.
    awaited = asyncio.run(AsyncCluster(cluster).pull(["small"], ["mini"]))
    assert awaited["small"]["mini"].value == [1, (2,)]
    with pytest.raises(ClusterError, match="no node 'nobody'"):
        cluster.pull(["small"], ["nobody"])


# ---- push ------------------------------------------------------------------------------------------------------------


def test_push_sends_frames_tensors_and_plain_data(notebook: SharedNotebook) -> None:
    notebook.works(
        "import torch\n"
        "frame = pd.DataFrame({'c': pd.Categorical(['u', 'v']), 'd': pd.to_datetime(['2024-01-01', None])})\n"
        "tensor = torch.ones(2, 3, dtype=torch.bfloat16)\nsettings = {'lr': 0.1, 'layers': (3, 4)}"
    )
    assert notebook.works("%push frame tensor settings").strip() == "pushed frame, tensor, settings to 3 nodes"
    shown = notebook.works("%%on_all\nprint(list(map(str, frame.dtypes)), tensor.dtype, tuple(tensor.shape), settings)")
    assert "['category', 'datetime64[us]'] torch.bfloat16 (2, 3) {'lr': 0.1, 'layers': (3, 4)}" in shown
    assert "[all 3 nodes]" in shown


def test_push_to_some_nodes(notebook: SharedNotebook) -> None:
    notebook.works("to_one = 5")
    assert notebook.works("%push to_one --to mini").strip() == "pushed to_one to mini"
    assert "'to_one' is not on local, local-2" in notebook.works("%pull to_one")


def test_a_large_push_goes_in_pieces_and_is_said_not_to_be_kept(notebook: SharedNotebook, cluster: Cluster) -> None:
    notebook.works("wide = np.arange(2_000_000, dtype='f8'); lr = 0.5")
    shown = notebook.works("%push wide lr")
    assert "pushed wide, lr to 3 nodes; nodes that restart or join later do not get wide: push again then" in shown
    assert "[all 3 nodes]\n1999999000000.0" in notebook.works("%%on_all\nprint(wide.sum())")
    assert Path(cluster.connection.file.run_log).stat().st_size < 4_000_000


def test_a_small_push_reaches_a_node_that_restarts(notebook: SharedNotebook) -> None:
    notebook.works("seed = {'n': np.int64(3)}")
    notebook.works("%push seed")
    notebook.works("%cluster restart local-2")
    assert "{'n': np.int64(3)}" in notebook.works("%%on local-2\nprint(seed)")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%push nmp", "the notebook has no variable 'nmp' (did you mean 'np'?)"),
        ("%push np", "cannot push 'np': a module does not travel"),
        ("%push 1x", "the notebook has no variable '1x'"),
        ("%push np --to nobody", "no node is called 'nobody'"),
    ],
)
def test_push_refuses_in_one_line(notebook: SharedNotebook, line: str, words: str) -> None:
    error = notebook.fails(line)
    assert words in error
    assert "\n" not in error


def test_a_node_without_the_library_says_what_to_install(notebook: SharedNotebook) -> None:
    notebook.works(
        "%%on mini\nimport sys\nsys.modules['pandas'] = None\nsys.modules.pop('notebook_cluster.values.frames', None)"
    )
    notebook.works("few = pd.DataFrame({'a': [1]})")
    cell = notebook.kernel.run("%push few")
    assert cell.error is not None
    assert "mini" in cell.error.value
    assert "pandas is not installed here: pip install pandas" in cell.error.value
    assert "Traceback" not in cell.shown
    notebook.works("%%on mini\ndel sys.modules['pandas']")


# ---- what a node may send --------------------------------------------------------------------------------------------


class OddNode:
    """A cluster of one node that answers a pull as it likes."""

    def __init__(self, **header: object) -> None:
        self.header = ValuePart(request=0, **header)  # type: ignore[arg-type]
        self.piece = ValuePart(request=0, data=b"[1]")
        self.connection = self
        self.forgotten = False

    def request(self, body: object, kind: object = None) -> "Future[object]":
        answer: Future[object] = Future()
        self.forgotten |= isinstance(body, ForgetValue)
        answer.set_result(self.header if getattr(body, "size", 0) == 0 else self.piece)
        return answer

    def pull(self) -> Pulled:
        return read_values(self, "ticket", ["x"], ["odd"], lambda done, total: None)["x"]["odd"]  # type: ignore[arg-type]


DIGEST = hashlib.blake2b(b"[1]", digest_size=16).digest()
GOOD = {"meta": b'{"kind":"plain"}', "sizes": [3], "digest": DIGEST}


def test_a_good_node_is_read() -> None:
    assert OddNode(**GOOD).pull().value == [1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sizes": [1 << 40]}, "at most 1 GiB is taken"),
        ({"sizes": [-5, 8]}, "announces a value"),
        ({"meta": b" " * (9 << 20)}, "announces a value"),
        ({"digest": b""}, "is damaged"),
        ({"sizes": [4]}, "did not arrive whole from odd: it sent fewer bytes"),
        ({"sizes": [2]}, "did not arrive whole"),
    ],
)
def test_a_node_that_sends_something_else_is_named(change: dict[str, object], words: str) -> None:
    odd = OddNode(**{**GOOD, **change})
    with pytest.raises(ClusterError, match=words):
        odd.pull()
    assert odd.forgotten


@pytest.mark.parametrize("meta", [b"", b"[]", b"{}", b'{"kind":"pickle"}', b"[" * 10_000, b"\xff"])
def test_what_is_no_value_is_said_and_nothing_more(meta: bytes) -> None:
    pulled = OddNode(**{**GOOD, "meta": meta}).pull()
    assert pulled.problem
    assert "\n" not in pulled.problem


def test_text_of_a_node_is_shown_as_one_plain_line() -> None:
    pulled = OddNode(error="<b>no\x1b[31m\n" + "x" * 1000).pull()
    assert pulled.problem.isprintable()
    assert len(pulled.problem) <= 500


def test_stop_while_a_value_comes_lets_the_node_forget_it(notebook: SharedNotebook, cluster: Cluster) -> None:
    notebook.works("%%on mini\nlong = np.zeros(1_000_000)")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cluster.pull(["long"], ["mini"], on_progress=stop)
    wait_until(lambda: tickets(notebook) == 0, 30, "mini to forget it")
