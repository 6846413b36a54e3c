"""The plugin that leaves out tests that take long, in runs of pytest of its own."""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
TESTS = """
    import os
    import pytest

    def test_quick():
        pass

    @pytest.mark.proof
    @pytest.mark.parametrize("place", ["here", "there"])
    def test_long(place):
        assert not os.path.exists(f"broken-{place}")
"""
WAYS = {"one process": [], "two workers": ["-n", "2", "--dist", "loadscope"]}


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A checkout whose tests use the plugin as ours do."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(pytester.path)]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist.plugin")
    pytester.makeini("[pytest]\naddopts = -q -rA\ntestpaths = suite\nmarkers = proof: takes long")
    pytester.makeconftest('pytest_plugins = ["tests.unsteady", "tests.proofs"]')
    suite = pytester.mkdir("suite")
    pytester.makepyfile(test_sample=TESTS)
    (pytester.path / "test_sample.py").rename(suite / "test_sample.py")
    (pytester.path / ".gitignore").write_text("kept.jsonl\n__pycache__\n.pytest_cache\nbroken-*\n")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=pytester.path, check=True)
    return pytester


def run(project: pytest.Pytester, *options: str) -> tuple[int, str]:
    """Exit code and output."""
    result = project.runpytest_subprocess(*options)
    return int(result.ret), result.stdout.str() + result.stderr.str()


def kept(project: pytest.Pytester) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in (project.path / "kept.jsonl").read_text().splitlines()]
    return sorted((row["test"].rpartition("::")[2], row["outcome"]) for row in rows)


@pytest.mark.parametrize("way", WAYS)
def test_a_whole_run_leaves_proofs_out_and_says_so(project: pytest.Pytester, way: str) -> None:
    code, output = run(project, *WAYS[way])
    assert code == 0
    assert "1 passed" in output
    assert "2 proofs were left out: make proofs runs them" in output


def test_who_names_a_file_gets_all_of_it(project: pytest.Pytester) -> None:
    code, output = run(project, "suite/test_sample.py")
    assert code == 0
    assert "3 passed" in output
    assert "left out" not in output


@pytest.mark.parametrize("way", WAYS)
def test_proofs_go_on_where_they_were(project: pytest.Pytester, way: str) -> None:
    proofs = [*WAYS[way], "--proofs", "--keep", "kept.jsonl"]
    (project.path / "broken-there").touch()
    code, output = run(project, *proofs)
    assert code == 1
    assert kept(project) == [("test_long[here]", "passed"), ("test_long[there]", "failed")]
    assert "1 passed (0 of them before this run), 1 failed" in output
    (project.path / "broken-there").unlink()
    code, output = run(project, *proofs)
    assert code == 0
    assert kept(project)[1:] == [("test_long[there]", "failed"), ("test_long[there]", "passed")]
    assert "2 passed (1 of them before this run), 0 failed" in output
    code, output = run(project, *proofs)
    assert code == 0, output
    assert "2 passed (2 of them before this run)" in output


def test_other_files_are_proven_anew(project: pytest.Pytester) -> None:
    proofs = ["--proofs", "--keep", "kept.jsonl"]
    assert run(project, *proofs)[0] == 0
    with (project.path / "conftest.py").open("a") as file:
        file.write("\n# something else\n")
    code, output = run(project, *proofs)
    assert code == 0
    assert "2 passed (0 of them before this run)" in output
    assert len(kept(project)) == 4


def test_keeping_what_is_no_proof_is_refused(project: pytest.Pytester) -> None:
    code, output = run(project, "--keep", "kept.jsonl")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "--keep FILE goes with --proofs" in output
