"""A code that is typed for ``notebook-cluster share`` or ``pair`` does not stay where others of the machine read it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from notebook_cluster.agent import shared_machines
from notebook_cluster.security import runtime_directory
from tests.command import COMMAND
from tests.conftest import Agents, wait_until
from tests.terminal import TerminalProcess

CODE = "maple-river-7"
WARNING = "every user of this machine can read it"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="arguments are overwritten on Linux only")

Share = Callable[..., TerminalProcess]


@pytest.fixture
def share(jupyter_dirs: Path, no_processes_left: str) -> Iterator[Share]:
    """``share("--code", ...)`` runs the command on a terminal; it is ended with the test."""
    with ExitStack() as stack:

        def start(*options: str) -> TerminalProcess:
            made = TerminalProcess([COMMAND, "share", "--name", "mini", *options])
            stack.callback(lambda: made.process.poll() is None and made.close())
            return made

        yield start


def arguments(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def everything_said(pid: int) -> str:
    """The arguments of the process and of all that it started."""
    return "\n".join(arguments(one.pid) for one in (psutil.Process(pid), *psutil.Process(pid).children(True)))


@linux_only
@pytest.mark.parametrize("options", [("--code", CODE), (f"--code={CODE}",), ("--code", "Maple River 7")])
def test_a_code_that_is_an_argument_is_taken_out_of_the_list_of_processes(
    share: Share, options: tuple[str, ...]
) -> None:
    mini = share(*options)
    mini.until(f"%cluster add mini --code {CODE}")
    mini.until("Logs:")
    said = everything_said(mini.process.pid)
    assert CODE not in said
    assert "Maple" not in said
    assert "share --name mini --code" in said
    assert WARNING in mini.output
    assert "--code-file FILE" in mini.output


@pytest.mark.parametrize("options", [("--code",), ("--code", "-")])
def test_a_code_is_asked_for_at_the_terminal_and_not_shown_while_it_is_typed(
    share: Share, options: tuple[str, ...]
) -> None:
    mini = share(*options)
    asked = mini.until("code: ")
    mini.type(f"{CODE}\n")
    mini.until(f"%cluster add mini --code {CODE}", after=asked)
    # The line of the question holds nothing that was typed.
    assert mini.output[asked:].startswith("\n")
    assert WARNING not in mini.output
    assert CODE not in everything_said(mini.process.pid)


def test_a_code_is_read_from_standard_input(jupyter_dirs: Path, no_processes_left: str) -> None:
    command = [COMMAND, "share", "--name", "mini", "--code", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdin is not None
        process.stdin.write(f"{CODE}\nnext line\n".encode())
        process.stdin.close()
        try:
            wait_until(lambda: [machine.code for machine in shared_machines()] == [CODE], 60, "the code")
        finally:
            process.terminate()
            process.wait(30)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o644, True)])
def test_a_code_is_read_from_a_file_with_a_warning_when_others_can_read_that(
    share: Share, jupyter_dirs: Path, mode: int, warned: bool
) -> None:
    file = jupyter_dirs / "code"
    file.write_text(f"{CODE}\n")
    file.chmod(mode)
    mini = share("--code-file", str(file))
    mini.until(f"%cluster add mini --code {CODE}")
    assert (f"{file} can be read by others of this machine: chmod 600 {file}" in mini.output) == warned
    assert CODE not in everything_said(mini.process.pid)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            None,
            "--code-file {file}: no code can be read there (No such file or directory): name the file that holds it",
        ),
        ("", "the first line of {file} is not a code"),
        ("abc\n", "the first line of {file} is not a code"),
        ("\nmaple-river-7\n", "the first line of {file} is not a code"),
    ],
)
def test_a_file_without_a_code_is_named(jupyter_dirs: Path, content: str | None, said: str) -> None:
    file = jupyter_dirs / "code"
    if content is not None:
        file.write_text(content)
    command = [COMMAND, "share", "--code-file", str(file)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert said.format(file=file) in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("options", ["size=64k", "ro"])
def test_a_disk_that_takes_nothing_is_said_in_one_line_with_the_way_out(jupyter_dirs: Path, options: str) -> None:
    """With a file system of its own, which is full or read-only: only a namespace of its own may mount one."""
    disk = jupyter_dirs / "disk"
    disk.mkdir()
    start = "from IPython.core.interactiveshell import InteractiveShell as S; s = S.instance(); "
    start += "s.run_line_magic('load_ext', 'notebook_cluster'); s.run_cell('%cluster start')"
    lines = [
        f"mount -t tmpfs -o {options} tmpfs {disk} || exit 77",
        f"head -c 9999999 /dev/zero > {disk}/fill",
        f"HOME={disk} {COMMAND} share --no-code",
        f"{COMMAND} share --no-code --data-dir {disk}/x",
        f'JUPYTER_RUNTIME_DIR={disk}/run {sys.executable} -c "{start}"',
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", "\n".join(lines)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, timeout=99
    )
    if done.returncode in (1, 77) and "cannot be written" not in done.stderr:
        pytest.skip(f"no file system of its own: {done.stderr}")
    said = [line for line in (done.stderr + done.stdout).splitlines() if "cannot be written, for " in line]
    assert len(said) == 3, done.stderr + done.stdout
    for line, way_out in zip(
        said, ["set JUPYTER_DATA_DIR to", "choose with --data-dir", "set JUPYTER_RUNTIME_DIR to"], strict=True
    ):
        assert str(disk) in line
        assert f"{way_out} a folder" in line
    assert "Traceback" not in done.stderr + done.stdout
    assert "[Errno" not in done.stderr + done.stdout


@pytest.mark.parametrize("place", ["file", "file/below/it"])
def test_a_file_where_a_folder_belongs_is_said_in_one_line_with_the_way_out(jupyter_dirs: Path, place: str) -> None:
    (jupyter_dirs / "file").write_text("")
    taken = str(jupyter_dirs / place)
    for words, variables, way_out in (
        (("share", "--no-code", "--data-dir", taken), {}, "choose with --data-dir"),
        (("peers",), {"JUPYTER_DATA_DIR": taken}, "set JUPYTER_DATA_DIR to"),
        (("status",), {"JUPYTER_RUNTIME_DIR": taken}, "set JUPYTER_RUNTIME_DIR to"),
    ):
        environment = {**os.environ, **variables}
        done = subprocess.run([COMMAND, *words], capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 1
        assert done.stderr.startswith(f"notebook-cluster: {taken}"), done.stderr
        assert "a file is there, or where a folder above it belongs" in done.stderr
        assert f"{way_out} a folder" in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_code_and_a_file_exclude_each_other(jupyter_dirs: Path) -> None:
    command = [COMMAND, "share", "--code", CODE, "--code-file", "x"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "not allowed with argument --code" in done.stderr


def test_pairing_reads_its_code_from_standard_input_where_none_is_given(jupyter_dirs: Path) -> None:
    for words in (("pair", "127.0.0.1:1"), ("pair", "127.0.0.1:1", "--code", "-")):
        done = subprocess.run([COMMAND, *words], input="abc\n", capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert "standard input is not a code" in done.stderr


def test_what_killed_agents_left_goes_when_the_next_one_starts(agents: Agents) -> None:
    folder = runtime_directory() / "sharing"
    agents("one", "two")
    pids = [agents.pid(name) for name in ("one", "two")]
    files = [folder / f"{pid}.json" for pid in pids]
    wait_until(lambda: all(file.exists() for file in files), 60, "both files")
    for name in ("one", "two"):
        agents.end(name, signal.SIGKILL)
    assert all(file.exists() for file in files)
    # It may have been killed while it wrote.
    (folder / f".{pids[0]}.json.abcd1234").touch()
    # A process that got the id of a killed agent is not that agent.
    reused = files[0]
    (folder / f"{os.getpid()}.json").write_bytes(reused.read_bytes())
    agents("three")
    wait_until(
        lambda: [path.name for path in folder.iterdir()] == [f"{agents.pid('three')}.json"], 60, "the files to go"
    )
