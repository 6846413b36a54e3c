"""The command ``notebook-cluster`` as people type it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from notebook_cluster.cli import main
from notebook_cluster.protocol import VERSION
from tests.conftest import Agents

COMMAND = str(Path(sys.executable).with_name("notebook-cluster"))


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | (environment or {}),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["COMMAND", "--help"]),
        (["shar"], ["shar", "share"]),
        (["share", "--nam", "mini"], ["--nam"]),
        (["share", "--name", "a/b"], ["a/b", "letters"]),
        (["share", "--name", "local"], ["local", "another name"]),
        (["share", "--port", "70000"], ["70000", "65535"]),
        (["share", "--lease", "0"], ["0", "seconds"]),
        (["stop"], ["CLUSTER"]),
        (["stop", "nowhere"], ["nowhere", "no cluster runs"]),
        (["detach", "nowhere"], ["nowhere"]),
        (["status", "nowhere"], ["nowhere"]),
    ],
)
def test_unknown_input_is_one_line_and_exit_code_2(
    jupyter_dirs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1
    assert all(word in said.err for word in words)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == f"notebook-cluster {VERSION}"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(word in said for word in ("share", "peers", "pair", "trust", "status", "stop", "detach", "doctor"))


def test_status_without_clusters_says_how_to_start_one(jupyter_dirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert "%cluster start" in capsys.readouterr().out


def test_no_command_imports_torch(jupyter_dirs: Path) -> None:
    code = (
        "import sys\n"
        "from notebook_cluster.cli import doctor, look, pair, share, steer, trust\n"
        "much = {'torch', 'zeroconf', 'ipykernel', 'questionary', 'prompt_toolkit', 'segno', 'spake2'}\n"
        "assert not much & set(sys.modules), f'too much is imported: {much & set(sys.modules)}'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_peers_lists_who_is_there_and_why_one_cannot_be_added(agents: Agents, jupyter_dirs: Path) -> None:
    agents("mini")
    mine = run("peers", "--seconds", "3")
    assert mine.returncode == 0, mine.stderr
    row = next(line for line in mine.stdout.splitlines() if "mini" in line)
    assert "yes" in row
    foreign = run("peers", "--seconds", "3", environment={"JUPYTER_RUNTIME_DIR": str(jupyter_dirs / "other")})
    row = next(line for line in foreign.stdout.splitlines() if "mini" in line)
    assert "no: " in row


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
