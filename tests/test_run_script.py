"""``notebook-cluster run``: a plain script on real nodes, as somebody at a terminal would start it."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from notebook_cluster.cli.run_files import ScriptFiles
from notebook_cluster.client import Cluster, list_clusters, running_clusters
from tests.command import COMMAND, run_command
from tests.conftest import Agents, wait_until

UTIL = "def greet(): return 'hello'\n"
SCRIPT = """
import sys
import notebook_cluster as nc
from util import greet
print(__name__, sys.argv[1:], greet(), nc.rank(), 'of', nc.world_size(), open('data/x.txt').read())
"""
SLOW = """
import time, sys
import notebook_cluster as nc
print('begun', nc.rank(), flush=True)
while True:
    time.sleep(0.01)
"""


def write(folder: Path, name: str, source: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(source)


@pytest.fixture
def project(work: Path) -> Path:
    """A folder with a script, a module, data, and what nobody wants to send."""
    for name, source in {
        "train.py": SCRIPT, "util.py": UTIL, "data/x.txt": "7", ".env": "SECRET", "slow.py": SLOW,
        "venv/pyvenv.cfg": "", ".git/config": "",
    }.items():  # fmt: skip
        write(work, name, source)
    return work


class Running:
    """The command while it runs; what it printed is in two files."""

    def __init__(self, folder: Path, *arguments: str, files: str = "std") -> None:
        self._files = folder / f"{files}out.txt", folder / f"{files}err.txt"
        with self._files[0].open("wb") as out, self._files[1].open("wb") as errors:
            self.process = subprocess.Popen(
                [COMMAND, "run", *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=errors, cwd=folder,
                start_new_session=True,
            )  # fmt: skip

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    @property
    def errors(self) -> str:
        return self._files[1].read_text()

    def until(self, text: str) -> None:
        def look() -> bool:
            if text not in self.out + self.errors and self.process.poll() is not None:
                pytest.fail(f"it ended without {text!r}: {self.out}{self.errors}")
            return text in self.out + self.errors

        wait_until(look, 90, what=lambda: f"{text!r}: {self.out}{self.errors}")

    def end(self, *signals: signal.Signals) -> int:
        for one in signals:
            self.process.send_signal(one)
        return self.process.wait(60)


def test_a_script_runs_on_every_node_as_python_would(project: Path) -> None:
    done = run_command("run", "train.py", "--lr", "0.1", "--nodes", "2", "--", "--nodes", "5")
    assert done.returncode == 0, done.stderr
    arguments = "['--lr', '0.1', '--nodes', '5']"
    assert sorted(done.stdout.splitlines()) == [
        f"[local-2] __main__ {arguments} hello 1 of 2 7", f"[local] __main__ {arguments} hello 0 of 2 7",
    ]  # fmt: skip
    assert "read as options of notebook-cluster: --nodes 2 (" in done.stderr
    assert "the script has ended on 2 nodes" in done.stderr
    assert list_clusters() == []
    page = project / "run.html"
    (name,) = re.findall(r"report (run-train-[0-9a-f]{4}) FILE", done.stderr)
    assert run_command("report", name, str(page)).returncode == 0
    assert "notebook-cluster run train.py --lr 0.1 --nodes 5" in page.read_text()


def test_it_ends_with_the_exit_code_of_the_script(project: Path) -> None:
    write(project, "exit.py", "import sys, notebook_cluster as nc\nif nc.rank() == 1: sys.exit(7)\n")
    done = run_command("run", "exit.py", "--nodes", "2")
    assert (done.returncode, done.stdout) == (7, "")
    assert "notebook-cluster: local-2: exit code 7\n" in done.stderr


def test_nodes_that_do_all_of_a_script_alone_are_said(project: Path) -> None:
    write(project, "alone.py", "print('here')\n")
    said = "alone.py does not use notebook_cluster: each of 2 nodes does all of it alone; nc.DiLoCo(model)"
    assert said in run_command("run", "alone.py", "--nodes", "2").stderr
    assert "does not use" not in run_command("run", "alone.py").stderr
    write(project, "alone.py", "import notebook_cluster as nc\nfor x in nc.shard([1, 2]): print(x)\n")
    said = "no sync object is seen in alone.py: each of 2 nodes trains a model of its own; nc.DiLoCo(model)"
    assert said in run_command("run", "alone.py", "--nodes", "2").stderr


@pytest.mark.parametrize(
    ("source", "beside", "alone"),
    [
        ("import torch\n", {}, "does not use"),
        ("import notebook_cluster as nc\nnc.DiLoCo(model)\n", {}, ""),
        ("from notebook_cluster import all_reduce\n", {}, ""),
        ("import notebook_cluster as nc\nprint(nc.rank(), model.sender)\n", {}, "no sync object"),
        ("import notebook_cluster as nc\n", {"other.py": "import notebook_cluster as nc\nnc.DeMo(m)\n"}, "no sync"),
        ("import notebook_cluster as nc\nimport a\na.train(nc)\n", {"a.py": "def train(nc): nc.DeMo(m)\n"}, ""),
        ("import torch\n", {"other.py": "import notebook_cluster as nc\n"}, "does not use"),
        ("from lib import model\n", {"lib/__init__.py": "", "lib/model.py": "import notebook_cluster\n"}, "no sync"),
        ("import notebook_cluster\nimport lib\n", {"lib/__init__.py": "from notebook_cluster import DiLoCo\n"}, ""),
        ("import a\n", {"a.py": "import inner\n", "inner.py": "from notebook_cluster import LocalSGD\n"}, ""),
    ],
)
def test_a_script_or_a_module_that_it_names_uses_the_cluster(
    work: Path, source: str, beside: dict[str, str], alone: str
) -> None:
    for name, text in {"one.py": source, **beside}.items():
        write(work, name, text)
    files = ScriptFiles(Path("one.py"), alone=False)
    with files.look(needed=True):
        said = files.work_alone(2)
    assert alone in said
    assert bool(alone) == bool(said)


def test_an_error_comes_behind_what_was_printed_and_says_the_way_out(project: Path) -> None:
    source = "print('before')\nraise ValueError('Error in env:// rendezvous: RANK expected, but not set')\n"
    write(project, "dist.py", source)
    with (project / "both.txt").open("wb") as both:
        done = subprocess.run([COMMAND, "run", "dist.py"], stdout=both, stderr=both, cwd=project, timeout=120)
    shown = (project / "both.txt").read_text()
    assert done.returncode == 1
    assert shown.index("[local] before") < shown.index("[local] Traceback")
    assert "but not set; nc.torch_distributed() in place of init_process_group() sets" in shown


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("import sys\nsys.exit()\n", 0, "the script has ended on 1 node"),
        ("import sys\nsys.exit('no data')\n", 1, "[local] no data"),
        ("def f():\n    1 / 0\nf()\n", 1, "line 2, in f\n[local]     1 / 0\n"),
        ("x = = 1\n", 1, "SyntaxError: invalid syntax"),
        ("exit(5)\n", 5, "local: exit code 5"),
        ("import os\nos._exit(6)\n", 6, "exit code 6"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGABRT)\n", 134, "killed by SIGABRT"),
        (
            "import sys\nsys.excepthook = lambda *error: print('hook', error[0].__name__, file=sys.stderr)\n1 / 0\n",
            1,
            "[local] hook ZeroDivisionError\n",
        ),
        ("raise ExceptionGroup('two', [ValueError(1), KeyError(2)])\n", 1, "[local]   | ExceptionGroup: two"),
    ],
)
def test_what_ends_a_script_is_shown_as_python_shows_it(project: Path, source: str, code: int, said: str) -> None:
    write(project, "end.py", source)
    done = run_command("run", "end.py")
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert "run_script" not in done.stderr


PROGRAM = """
import asyncio, atexit, concurrent.futures, io, os, sys, threading, time
async def main(): return 'awaited'
print(asyncio.run(main()))
sys.stdout.buffer.write('bytes ✓\\n'.encode())
io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8', line_buffering=True).write('wrapped\\n')
sys.stdout.reconfigure(line_buffering=True)
print('\\udcff', file=sys.stdout.buffer and sys.stdout)
atexit.register(print, 'at exit')
def late():
    time.sleep(0.3)
    print('from a thread')
threading.Thread(target=late).start()
pool = concurrent.futures.ThreadPoolExecutor(2)
pool.submit(lambda: (time.sleep(0.6), print('from a pool')))
os.environ['LEFT'] = 'here'
os.chdir('/')
sys.stdout = open(os.devnull, 'w')
"""


def test_a_script_finds_what_a_program_finds_and_leaves_nothing_to_the_next_one(project: Path) -> None:
    write(project, "program.py", PROGRAM.replace("sys.stdout = open", "kept = sys.stdout; sys.stdout = open"))
    write(project, "next.py", "import os, sys\nprint(os.getcwd(), os.environ.get('LEFT'), sys.argv[1:])\n")
    first = run_command("run", "--keep", "--cluster", "lesson", "program.py", "a")
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    assert lines[:3] == ["[local] awaited", "[local] bytes ✓", "[local] wrapped"]
    again = run_command("run", "--cluster", "lesson", "next.py")
    assert (again.returncode, again.stdout) == (0, f"[local] {project} None []\n"), again.stderr
    assert run_command("stop", "lesson").returncode == 0


def test_threads_and_exit_functions_of_a_script_run_to_their_end(project: Path) -> None:
    write(project, "program.py", PROGRAM.partition("os.environ")[0])
    done = run_command("run", "program.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == ["[local] from a thread", "[local] from a pool", "[local] at exit"]


def test_no_file_of_another_folder_is_touched(project: Path, tmp_path: Path) -> None:
    """Neither where a cluster began elsewhere, nor where one of this name was killed."""
    other = tmp_path / "other"
    other.mkdir()
    write(other, "train.py", "print('other')\n")
    write(other, "slow.py", SLOW.replace("begun", "other"))
    assert run_command("run", "--keep", "--cluster", "lesson", "train.py").returncode == 0
    done = run_command("run", "--cluster", "lesson", str(other / "train.py"))
    assert (done.returncode, done.stdout) == (0, "[local] other\n"), done.stderr
    assert ((project / "train.py").read_text(), (project / "slow.py").read_text()) == (SCRIPT, SLOW)
    assert run_command("stop", "lesson").returncode == 0
    killed = Running(project, "slow.py")
    killed.until("[local] begun 0")
    (file,) = list_clusters()
    os.kill(file.pid, signal.SIGKILL)
    assert killed.process.wait(60) == 1
    again = Running(project, "slow.py")
    again.until("[local] begun 0")
    assert "was killed: ending what it left" in again.errors
    with Cluster.attach() as cluster:
        assert (cell := cluster.state().cell) is not None
        assert cell.id == 1
    assert again.end(signal.SIGTERM) == 143
    assert list_clusters() == []


def test_what_a_folder_has_no_more_is_taken_from_peers_and_what_nodes_wrote_stays(
    project: Path, agents: Agents
) -> None:
    agents("mini")
    write(project, "old.py", "WORD = 'old'\n")
    write(project, "look.py", "import os\nopen('result.txt', 'w').close()\nprint(sorted(os.listdir()))\n")
    arguments = ("run", "look.py", "--local", "0", "--peers", "mini")
    first = run_command(*arguments)
    assert "'old.py'" in first.stdout, first.stderr
    (project / "old.py").unlink()
    again = run_command(*arguments)
    assert again.returncode == 0, again.stderr
    assert "'old.py'" not in again.stdout
    assert "'result.txt'" in again.stdout
    assert "not sent: .env is hidden, venv is an environment\n" in again.stderr


def test_with_a_cluster_that_goes_on_the_script_ends_with_the_command(project: Path) -> None:
    running = Running(project, "--keep", "--cluster", "lesson", "slow.py")
    running.until("[local] begun 0")
    assert running.end(signal.SIGTERM) == 143
    assert "the nodes are asked to stop" in running.errors
    with Cluster.attach("lesson") as cluster:
        cluster.wait_until(lambda state: state.cell is None or state.cell.status != "running")
        cluster.stop()


def test_what_is_ignored_stays_ignored(project: Path) -> None:
    """As ``nohup`` has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        running = Running(project, "slow.py")
    finally:
        signal.signal(signal.SIGHUP, before)
    running.until("[local] begun 0")
    running.process.send_signal(signal.SIGHUP)
    assert running_clusters()
    assert running.end(signal.SIGTERM) == 143


def test_its_folder_goes_to_peers_and_to_those_that_come_later(project: Path, agents: Agents) -> None:
    agents("mini", "desk")
    running = Running(project, "slow.py", "--local", "0", "--peers", "mini")
    running.until("[mini] begun 0")
    assert "not sent: .env is hidden, venv is an environment\n" in running.errors
    # What comes later gets what was there in the beginning.
    write(project, "util.py", "raise SystemExit('half edited')\n")
    (name,) = running_clusters()
    with Cluster.attach(name) as cluster:
        cluster.add("desk")
        running.until("[desk] begun 1")
    for peer in ("mini", "desk"):
        folder = agents.root / "agents" / peer / "work" / name
        assert (folder / "util.py").read_text() == UTIL
        assert (folder / "data" / "x.txt").read_text() == "7"
        assert not [one for one in (".env", ".git", "venv", "stdout.txt") if (folder / one).exists()]
    assert running.end(signal.SIGINT) == 130
    assert "the nodes are asked to stop" in running.errors
    assert list_clusters() == []


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_cluster_too(project: Path, how: signal.Signals, code: int) -> None:
    before = signal.signal(how, signal.SIG_DFL)  # also where these tests run below nohup
    try:
        running = Running(project, "slow.py")
    finally:
        signal.signal(how, before)
    running.until("[local] begun 0")
    assert running.end(how) == code
    assert list_clusters() == []


def test_a_second_ctrl_c_does_not_wait_for_a_script_that_does_not_end(project: Path) -> None:
    write(
        project, "deaf.py", SLOW.replace("    time.sleep", "  try:\n    time.sleep") + "  except BaseException: pass\n"
    )
    running = Running(project, "deaf.py")
    running.until("[local] begun 0")
    running.process.send_signal(signal.SIGINT)
    running.until("Ctrl-C again ends the cluster at once")
    assert running.end(signal.SIGINT) == 130
    assert list_clusters() == []


TRAINING = """
import sys, time
import torch, notebook_cluster as nc
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sync = nc.DiLoCo(model, every=2, optimizer=optimizer, resume=sys.argv[1] if len(sys.argv) > 1 else None)
print('began at round', sync.round, flush=True)
for x in nc.shard(torch.ones(1000, 1), batch_size=1):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    if sync.step() and sync.round == 3: print('trained', flush=True)
    time.sleep(0.01)
"""


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_a_script_has_trained_that_is_stopped_is_kept(project: Path, how: signal.Signals, code: int) -> None:
    write(project, "digits.py", TRAINING)
    running = Running(project, "digits.py")
    running.until("[local] trained")
    assert running.end(how) == code
    (round,) = re.findall(r"round (\d+) of 'model' is kept in .*resume='model-stopped' goes on from it", running.errors)
    assert list_clusters() == []
    again = Running(project, "digits.py", "model-stopped")
    again.until(f"[local] began at round {round}\n")
    assert "the optimizer's state and the data of nc.shard go on; the scheduler begins anew\n" in again.errors
    assert again.end(signal.SIGINT) == 130


def test_in_a_cluster_that_was_kept_a_stopped_script_goes_on(project: Path) -> None:
    write(project, "digits.py", TRAINING)
    running = Running(project, "digits.py", "--keep")
    running.until("[local] trained")
    assert running.end(signal.SIGINT) == 130
    (name,) = re.findall(r"the same with --cluster (\S+) goes on with a training that was stopped", running.errors)
    again = Running(project, "digits.py", "--cluster", name)
    again.until("goes on where it was stopped, after round")
    assert again.end(signal.SIGINT) == 130
    assert not (project / "checkpoints").exists()
    assert run_command("stop", name).returncode == 0


def test_in_a_cluster_that_runs_it_is_run_anew_and_the_cluster_goes_on(project: Path) -> None:
    first = run_command("run", "--keep", "--cluster", "lesson", "train.py")
    assert (first.returncode, first.stdout) == (0, "[local] __main__ [] hello 0 of 1 7\n")
    assert "cluster lesson goes on: notebook-cluster stop lesson ends it" in first.stderr
    write(project, "util.py", UTIL.replace("hello", "good day"))
    again = run_command("run", "--cluster", "lesson", "train.py")
    assert (again.returncode, again.stdout) == (0, "[local] __main__ [] good day 0 of 1 7\n")
    assert running_clusters() == ["lesson"]
    assert run_command("stop", "lesson").returncode == 0


def test_two_runs_of_a_script_at_once_have_a_cluster_each(project: Path) -> None:
    running = Running(project, "slow.py")
    running.until("[local] begun 0")
    other = Running(project, "slow.py", files="other")
    other.until("[local] begun 0")
    assert [re.sub("-[0-9a-f]{4}", "", name, count=1) for name in running_clusters()] == ["run-slow", "run-slow-2"]
    assert [one.end(signal.SIGTERM) for one in (running, other)] == [143, 143]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("trian.py",), 1, "there is no file or folder 'trian.py' in {folder} (did you mean 'train.py'?)"),
        (("python", "train.py"), 1, "leave python out: the script runs with the Python of each node"),
        (("data",), 1, "data is a folder: name the script in it, as data/train.py"),
        (("train.py", "--hosts", "2"), 2, "--hosts is for hosts that an engine starts: name it with --on slurm"),
        (("--nods", "2", "train.py"), 2, "there is no option --nods (did you mean '--nodes'?)"),
        (("train.py", "--on", "slrm"), 1, "--on slrm: no such engine (did you mean 'slurm'?)"),
        (("train.py", "--cluster", "a/b"), 2, "--cluster 'a/b': use letters, digits"),
    ],
)
def test_what_cannot_be_run_is_said_and_nothing_stays(
    project: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = run_command("run", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert said.format(folder=project) in done.stderr
    assert list_clusters() == []


def test_a_home_folder_or_too_much_is_never_sent(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (project / "weights.bin").open("wb") as file:
        file.truncate(600_000_000)
    done = run_command("run", "train.py", "--peers", "mini")
    assert done.returncode == 1
    assert f"{project} has 600 MB (most in weights.bin: 600 MB), and at most 500 MB go with a script" in done.stderr
    done = run_command("run", "train.py", "--peers", "mini", HOME=os.fspath(project))
    assert done.returncode == 1
    assert f"all of {project} would go with the script" in done.stderr
    assert list_clusters() == []


def test_a_cluster_that_was_killed_goes_on_and_stays_when_the_script_is_over(project: Path) -> None:
    assert run_command("run", "--keep", "--cluster", "lesson", "train.py").returncode == 0
    (file,) = list_clusters()
    os.kill(file.pid, signal.SIGKILL)
    wait_until(lambda: running_clusters() == [], what="the end of the coordinator")
    running = Running(project, "--cluster", "lesson", "slow.py")
    running.until("[local] begun 0")
    assert "was killed: starting it again from its journal" in running.errors
    assert running.end(signal.SIGTERM) == 143
    assert running_clusters() == ["lesson"]
    assert run_command("stop", "lesson").returncode == 0
