"""The command ``notebook-cluster`` as people type it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from notebook_cluster.cli import main
from notebook_cluster.magics import load_ipython_extension
from notebook_cluster.magics.errors import UsageError
from notebook_cluster.protocol import VERSION
from tests.command import COMMAND, run_command
from tests.conftest import Agents, wait_until


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == f"notebook-cluster {VERSION}"


def test_the_package_is_the_command_too_where_that_is_not_in_the_path() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "notebook_cluster", "--version"], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == f"notebook-cluster {VERSION}"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(word in said for word in ("share", "peers", "pair", "trust", "status", "stop", "detach", "doctor"))


def test_windows_is_told_in_one_line_where_the_package_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert main(["share"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("notebook-cluster: notebook-cluster runs on Linux and macOS")
    assert "WSL" in said
    with pytest.raises(UsageError, match="not in Windows itself"):
        load_ipython_extension(None)


def test_status_without_clusters_says_how_to_start_one(jupyter_dirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert "%cluster start" in capsys.readouterr().out


def test_no_command_imports_torch(jupyter_dirs: Path) -> None:
    code = (
        "import sys\n"
        "from notebook_cluster.cli import clusters, doctor, share, trust\n"
        "much = {'torch', 'zeroconf', 'ipykernel', 'questionary', 'prompt_toolkit', 'segno', 'spake2'}\n"
        "assert not much & set(sys.modules), f'too much is imported: {much & set(sys.modules)}'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_peers_lists_who_is_there_and_why_one_cannot_be_added(agents: Agents, jupyter_dirs: Path) -> None:
    name = f"mini-{os.getpid()}"  # others on this network may share a machine called mini as well
    agents(name)

    def row(environment: dict[str, str] | None = None) -> str:
        """Of this agent, once it is announced."""
        listed = run_command("peers", "--seconds", "3", **(environment or {}))
        assert listed.returncode == 0, listed.stderr
        return next((line for line in listed.stdout.splitlines() if name in line), "")

    assert "yes" in wait_until(row, 60, f"{name} to be listed")
    other = {"JUPYTER_RUNTIME_DIR": str(jupyter_dirs / "other")}
    assert "no: " in wait_until(lambda: row(other), 60, f"{name} to be listed for others")


def test_help_loads_nothing_that_is_slow() -> None:
    code = (
        "import sys\n"
        "from notebook_cluster.cli import main\n"
        "try:\n    main(['share', '--help'])\nexcept SystemExit:\n    pass\n"
        "much = {'zmq', 'asyncio', 'rich', 'psutil', 'zeroconf'} & set(sys.modules)\n"
        "assert not much, f'too much is imported: {much}'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--until HH:MM" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["trust"]])
def test_a_bare_command_shows_its_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 0
    shown = capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*arguments, "--help"])
    assert shown.out == capsys.readouterr().out
    assert shown.err == ""
    assert shown.out.startswith("usage: notebook-cluster")


def test_help_shows_magics_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert "In a notebook: %load_ext notebook_cluster, then %cluster start." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["shaer"], "there is no command 'shaer' (did you mean 'share'?). There are: share, peers, "),
        (["train.py"], "there is no command 'train.py' (did you mean 'run train.py'?). There are: share, "),
        (["xyzzy"], "there is no command 'xyzzy'. There are: share, peers, "),
        (
            ["share", "--nmae", "mini"],
            "there is no option --nmae (did you mean '--name'?): see notebook-cluster share -",
        ),
        (["share", "--nmae=mini"], "there is no option --nmae (did you mean '--name'?): see notebook-cluster share"),
        (["share", "-name", "mini"], "there is no option -name (did you mean '--name'?): see notebook-cluster share"),
        (["share", "--xyzzy"], "there is no option --xyzzy: see notebook-cluster share --help"),
        (["pair", "--cod", "tiger-lamp-42", "mini"], "there is no option --cod (did you mean '--code'?)"),
        (["trust", "lits"], "there is no action 'lits' (did you mean 'list'?). There are: list, remove"),
        (["trust", "list", "--data-dri", "x"], "there is no option --data-dri (did you mean '--data-dir'?)"),
        (["--versoin"], "there is no option --versoin (did you mean '--version'?): see notebook-cluster --help"),
        (["stop", "lesson", "other"], "unrecognized arguments: other: see notebook-cluster stop --help"),
        (["share", "--port", "-5"], "'-5' is not a port"),
    ],
)
def test_what_is_mistyped_is_answered_with_what_was_meant(
    capsys: pytest.CaptureFixture[str], typed: list[str], said: str
) -> None:
    assert main(typed) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert shown.err.count("\n") == 1


def test_who_stops_reading_ends_a_command_silently(jupyter_dirs: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run([COMMAND, "status"], stdout=closed, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.stderr == b""


def test_ctrl_c_while_the_command_is_loaded_is_no_traceback() -> None:
    code = (
        "import sys\n"
        "class Pressed:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name == 'notebook_cluster.cli.arguments': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Pressed())\n"
        "from notebook_cluster.cli import main\n"
        "sys.exit(main(['share']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")
