"""The magics in a real kernel, on a scripted cluster: what a frontend gets, and how a cell ends."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from notebook_cluster.magics.errors import remote_error
from notebook_cluster.protocol.views import CellEnded, NodeResult
from tests.conftest import shared_folders
from tests.ipc_kernels import start_kernel

HOLD = """
import sys; sys.path.insert(0, {tests!r})
from scripted_cluster import ScriptedCluster, running_cell
import notebook_cluster.magics
%load_ext notebook_cluster.magics
extension = next(iter(notebook_cluster.magics._loaded.values()))
"""


class Notebook:
    """A real kernel, driven as a frontend drives it."""

    def __init__(self, client, manager):
        self.client, self.manager = client, manager

    def start(self, code, *, allow_stdin=True):
        return self.client.execute(code, allow_stdin=allow_stdin)

    def finish(self, request, *, until=None):
        """Everything that ``request`` publishes, to its end or until ``until(seen)`` is true."""
        seen = SimpleNamespace(stdout="", stderr="", displays={}, error=None, status="")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            message = self.client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    setattr(seen, content["name"], getattr(seen, content["name"]) + content["text"])
                case "display_data" | "update_display_data":
                    key = content["transient"].get("display_id", len(seen.displays))
                    seen.displays[key] = content["data"]
                case "error":
                    seen.error = content
                case "status" if content["execution_state"] == "idle":
                    seen.status = self.reply(request)["status"]
                    return seen
            if until is not None and until(seen):
                return seen
        pytest.fail(f"the cell did not end: {seen}")

    def reply(self, request):
        while True:
            message = self.client.get_shell_msg(timeout=60)
            if message["parent_header"].get("msg_id") == request:
                return message["content"]

    def run(self, code, **options):
        return self.finish(self.start(code, **options))

    def value(self, expression):
        return self.run(f"print({expression}, end='')").stdout


@pytest.fixture(scope="module")
def kernel():
    with shared_folders():
        manager, client = start_kernel(env={**os.environ, "JPY_SESSION_NAME": "lesson.ipynb"})
        try:
            notebook = Notebook(client, manager)
            assert notebook.run(HOLD.format(tests=str(Path(__file__).parent))).status == "ok"
            yield notebook
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook(kernel):
    """The kernel with a new scripted cluster held."""
    assert kernel.run("cluster = ScriptedCluster(); extension.session.hold(cluster)").status == "ok"
    return kernel


def shown(seen):
    return [data["text/plain"] for data in seen.displays.values()]


def plain_error(seen):
    return "\n".join(seen.error["traceback"])


def stop_when(notebook, code, text):
    """Run ``code``, press Stop when ``text`` is on the page; returns the request."""
    request = notebook.start(code)
    notebook.finish(request, until=lambda seen: any(text in block for block in shown(seen)))
    notebook.manager.interrupt_kernel()
    return request


def test_on_all_shows_every_nodes_result_and_ends_well(notebook):
    seen = notebook.run("%%on_all\n1+1")
    assert seen.status == "ok"
    assert shown(seen) == ["[all 2 nodes]\nOut: 2"]


def test_the_cell_goes_out_as_typed_with_its_options_and_the_notebooks_names(notebook):
    notebook.run("made_here = 3")
    notebook.run("%%on_all --timeout 5 --no-replay\n!echo hi\nx = await f()")
    assert notebook.value("cluster.asked[-1][0]") == "!echo hi\nx = await f()\n"
    assert notebook.value("cluster.asked[-1][1:2]") == "([],)"
    options = "{k: cluster.asked[-1][2][k] for k in ('timeout', 'replay')}"
    assert notebook.value(options) == "{'timeout': 5.0, 'replay': False}"
    names = "cluster.asked[-1][2]['notebook_names']"
    assert notebook.value(f"'made_here' in {names}, 'In' in {names}, any(n.startswith('_') for n in {names})") == (
        "True False False"
    )


def test_on_sends_to_the_named_nodes(notebook):
    assert notebook.run("%%on !0\n1+1").status == "ok"
    assert notebook.value("cluster.asked[-1][1]") == "['desk']"


def test_an_unknown_target_is_one_line_and_nothing_is_sent(notebook):
    seen = notebook.run("%%on dask\n1+1")
    assert (seen.status, seen.error) == ("error", None)
    assert seen.stderr.strip() == (
        "UsageError: no node is called 'dask' (did you mean 'desk'?): there are 0 mini, 1 desk"
    )
    assert notebook.value("len(cluster.asked)") == "0"


@pytest.mark.parametrize("code", ["x = = 1", "return 3", "def f(:\n  pass", "if True:\nx = 1"])
def test_a_syntax_error_is_said_once_and_nothing_is_sent(notebook, code):
    seen = notebook.run(f"%%on_all\n{code}")
    assert seen.status == "error"
    assert seen.error["ename"] == "SyntaxError"
    assert "magics" not in plain_error(seen)
    assert notebook.value("len(cluster.asked)") == "0"


def test_an_empty_cell_does_nothing(notebook):
    assert notebook.run("%%on_all\n  \n").status == "ok"
    assert notebook.value("len(cluster.asked)") == "0"


def test_a_failing_cell_ends_as_an_error_that_names_the_cause_first(notebook):
    seen = notebook.run("%%on_all\n# fails")
    assert seen.error["ename"] == "RemoteError"
    lines = seen.error["evalue"].split("\n")
    assert lines[0] == "cell 1 failed on 2 of 2 nodes"
    assert lines[1] == "  mini · rank 0: ValueError: bad"
    assert lines[2].startswith("  desk: PeerLost: mini raised")
    assert shown(seen) == ["[mini · rank 0]\nTraceback of mini\nValueError: bad"]
    assert len(seen.error["traceback"]) == 1


def test_the_same_error_on_all_nodes_is_one_line(notebook):
    assert notebook.run("%%on_all\n# fails_everywhere").error["evalue"] == (
        "cell 1 failed on 2 of 2 nodes\n  all 2 nodes: ValueError: bad"
    )


def test_a_lost_node_is_told_with_reason_log_and_way_out(notebook):
    text = notebook.run("%%on_all\n# loses").error["evalue"]
    assert "desk was lost: killed by SIGKILL (out of memory?); %cluster restart desk brings it back" in text
    assert "| last words" in text


def test_a_name_that_only_the_notebook_has_is_told_with_push(notebook):
    notebook.run("made_here = 3")
    assert "%push made_here sends it" in notebook.run("%%on_all\n# misses_a_name").error["evalue"]
    notebook.run("del made_here")
    assert "%push" not in notebook.run("%%on_all\n# misses_a_name").error["evalue"]


def told(value, name):
    """The line of a node whose cell failed so."""
    result = NodeResult("error", error_name=name, error_value=value)
    return str(remote_error(CellEnded(3, "error", {"desk": result}), str, frozenset())).splitlines()[1]


def test_a_file_that_a_node_lacks_is_told_with_how_it_gets_there_if_it_is_one_of_the_notebook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data", "a b.csv").write_text("1")
    Path(".env").write_text("secret")
    Path(tmp_path.parent, "key").write_text("secret")
    brings = "; 'data/a b.csv' is in the notebook's folder: %cluster send 'data/a b.csv' brings it into the node's"
    for path in ("data/a b.csv", str(tmp_path / "data" / "a b.csv")):
        line = told(f"[Errno 2] No such file or directory: '{path}'", "FileNotFoundError")
        assert line == f"  desk: FileNotFoundError: [Errno 2] No such file or directory: '{path}'{brings}"
    outside = str(tmp_path.parent / "key")
    for path in ("missing.csv", ".env", "../key", outside, "data/../../key", ".", "x\0y", "a" * 999):
        assert "send" not in told(f"[Errno 2] No such file or directory: '{path}'", "FileNotFoundError")
    assert "send" not in told("'data'", "KeyError") + told("", "FileNotFoundError")
    Path("train.py").write_text("1")
    by_run = told("File `'train.py'` not found.", "Exception")
    assert by_run.endswith("; train.py is in the notebook's folder: %cluster send train.py brings it into the node's")


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        (
            "OutOfMemoryError",
            "CUDA out of memory. Tried to allocate 2.00 GiB",
            "can take a smaller batch than the others",
        ),
        ("RuntimeError", "MPS backend out of memory (MPS allocated: 9 GB)", "can take a smaller batch"),
        ("AssertionError", "Torch not compiled with CUDA enabled", "device, which every node has, is its own"),
        ("RuntimeError", "Expected all tensors to be on the same device, but found cuda:0", "device, which every node"),
        ("UsageError", "Line magic function `%cluster` not found.", "works in the notebook, in a cell that does not"),
        ("RuntimeError", "File not found or corrupted.", "with nc.one_node_first(): around it"),
        ("KeyError", "'LOCAL_RANK'", "nc.torch_distributed() in place of init_process_group() sets"),
        ("ValueError", "Default process group has not been initialized, please", "nc.torch_distributed() in place of"),
    ],
)
def test_what_torch_says_on_a_node_is_told_with_the_way_out(name, value, hint):
    line = told(value, name)
    assert line.startswith(f"  desk: {name}: {value}; ")
    assert hint in line


def test_an_error_of_a_data_loaders_worker_is_told_with_what_was_raised_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("1.png").write_text("1")
    raised = "FileNotFoundError: [Errno 2] No such file or directory: '1.png'"
    frames = '  File "/lib/fetch.py", line 52, in fetch\n    data = [self.dataset[idx]]\n' * 9
    caught = "Caught FileNotFoundError in DataLoader worker process 0"
    value = f"{caught}.\nOriginal Traceback (most recent call last):\n{frames}{raised}\n"
    line = told(value, "FileNotFoundError")
    assert line.startswith(f"  desk: FileNotFoundError: {caught}: {raised}")
    assert line.endswith("%cluster send 1.png brings it into the node's")


def test_a_module_that_a_node_lacks_is_told_with_how_it_gets_there(tmp_path, monkeypatch):
    def lacks(value):
        return told(value, "ModuleNotFoundError")

    monkeypatch.chdir(tmp_path)
    installs = "; an %%on_all cell with %pip install "
    line = "  desk: ModuleNotFoundError: No module named 'einops'"
    assert lacks("No module named 'einops'") == f"{line}{installs}einops installs it there"
    assert lacks("No module named 'sklearn.svm'").endswith(f"{installs}scikit-learn installs it there")
    assert told("No module named 'einops'", "ImportError").endswith("'einops'")
    assert lacks("").endswith("ModuleNotFoundError")
    assert lacks("No module named 'google.colab'").endswith("; only Colab has it")
    Path("helpers.py").write_text("x = 1")
    Path("mine").mkdir()
    brings = "is in the notebook's folder: %cluster send"
    assert lacks("No module named 'helpers'").endswith(f"; helpers.py {brings} helpers.py brings it there")
    assert lacks("No module named 'mine.layers'").endswith(f"; mine {brings} mine brings it there")


def test_a_refusal_of_the_cluster_is_one_line(notebook):
    seen = notebook.run("%%on_all\n# refuse")
    assert plain_error(seen).endswith("node 'desk' is starting: try again in a second")
    assert seen.error["ename"] == "ClusterError"


def test_a_cluster_that_ends_in_mid_cell_keeps_the_output_and_is_let_go(notebook):
    seen = notebook.run("%%on_all\n# dies")
    assert shown(seen) == ["[mini · rank 0]\nhalf"]
    assert "its coordinator was killed" in seen.error["evalue"]
    again = notebook.run("%%on_all\n1+1")
    assert again.stderr.strip() == "UsageError: no cluster is running in this notebook: %cluster start"


def test_a_detached_cell_ends_well_and_says_how_to_come_back(notebook):
    seen = notebook.run("%%on_all\n# detaches")
    assert seen.status == "ok"
    assert "%cluster attach" in seen.stdout


def test_stop_interrupts_the_nodes_and_ends_the_cell_as_interrupted(notebook):
    request = stop_when(notebook, "%%on_all\n# forever", "working")
    seen = notebook.finish(request)
    assert seen.error["ename"] == "KeyboardInterrupt"
    assert seen.error["evalue"] == "cell 1 was stopped"
    assert len(seen.error["traceback"]) == 1
    assert notebook.value("cluster.interrupts") == "[False]"


def test_a_second_stop_kills_what_is_busy_after_it_was_named(notebook):
    request = stop_when(notebook, "%%on_all\n# stubborn", "working")
    told = notebook.finish(request, until=lambda seen: any("still busy" in block for block in shown(seen)))
    assert "still busy: desk. Stop again kills and restarts them" in "".join(shown(told))
    notebook.manager.interrupt_kernel()
    seen = notebook.finish(request)
    assert seen.error["ename"] == "KeyboardInterrupt"
    assert "desk: killed after the second Stop" in seen.error["evalue"]
    assert notebook.value("cluster.interrupts") == "[False, True]"


def test_stop_still_works_in_a_cell_after_one_that_waited(notebook):
    notebook.run("%%on_all\n1+1")
    request = notebook.start("import time\nprint('asleep', flush=True)\nwhile True: time.sleep(0.01)")
    notebook.finish(request, until=lambda seen: "asleep" in seen.stdout)
    notebook.manager.interrupt_kernel()
    assert notebook.finish(request).error["ename"] == "KeyboardInterrupt"


def test_watching_a_running_cell_ends_with_stop_and_leaves_the_cell_alone(notebook):
    notebook.run("cluster.running = running_cell()")
    request = stop_when(notebook, "%cluster attach", "working")
    seen = notebook.finish(request)
    assert seen.status == "ok"
    assert "no longer watching cell 7" in seen.stdout
    assert notebook.value("cluster.interrupts") == "[]"


def test_push_sends_variables_in_a_cell_that_nodes_which_join_later_run_too(notebook):
    notebook.run("x, y = 3, (1, 2)")
    seen = notebook.run("%push x y")
    assert seen.stdout == "pushed x, y to 2 nodes\n"
    assert notebook.value("cluster.asked[-1][2]['replay'], cluster.asked[-1][0].count('unpack')") == "True 2"
    assert notebook.value("cluster.asked[-1][0].partition(chr(10))[0]") == "# %push x y"


def test_push_of_an_unknown_name_says_so(notebook):
    seen = notebook.run("%push not_there")
    assert seen.stderr.startswith("UsageError: the notebook has no variable 'not_there'")


def test_cluster_alone_shows_the_help(notebook):
    assert "%cluster start" in notebook.run("%cluster").stdout


def test_status_is_text_and_html_without_widgets(notebook):
    (bundle,) = notebook.run("%cluster status").displays.values()
    assert set(bundle) == {"text/plain", "text/html"}
    assert "mini" in bundle["text/plain"]


def test_headless_is_what_the_frontend_says(notebook):
    code = "print(extension.session.headless)"
    assert notebook.run(code, allow_stdin=False).stdout == "True\n"
    assert notebook.run(code, allow_stdin=True).stdout == "False\n"


def test_completion_in_the_kernel_offers_subcommands_and_nodes(notebook):
    def complete(code):
        request = notebook.client.complete(code)
        return notebook.reply(request)["matches"]

    assert complete("%cluster rest") == ["restart"]
    assert complete("%cluster restart mi") == ["mini"]


def test_without_a_cluster_every_magic_says_how_to_start_one(notebook):
    notebook.run("extension.session.let_go()")
    for code in ("%%on_all\n1", "%%on 0\n1", "%cluster status", "%cluster restart mini", "%cluster stop", "%push code"):
        seen = notebook.run("code = 1\n") and notebook.run(code)
        assert "no cluster is running in this notebook: %cluster start" in seen.stderr, code


def test_letting_go_of_a_cluster_closes_the_view_only(notebook):
    notebook.run("extension.session.let_go()")
    assert notebook.value("cluster.closed") == "True"


def test_a_node_refuses_the_extension(notebook):
    notebook.run("import os; os.environ['NOTEBOOK_CLUSTER_NODE'] = 'mini'")
    seen = notebook.run("notebook_cluster.magics.load_ipython_extension(get_ipython())")
    notebook.run(
        "del os.environ['NOTEBOOK_CLUSTER_NODE']; notebook_cluster.magics.load_ipython_extension(get_ipython())"
    )
    notebook.run("extension = next(iter(notebook_cluster.magics._loaded.values()))")
    assert "this kernel is node 'mini' of a cluster" in seen.stderr


def test_unloading_takes_the_magics_away(notebook):
    seen = notebook.run("%unload_ext notebook_cluster.magics\n%cluster status")
    notebook.run("%load_ext notebook_cluster.magics\nextension = next(iter(notebook_cluster.magics._loaded.values()))")
    assert "`%cluster` not found" in seen.stderr
