"""A pytest plugin: tests that take long are *proofs*. ``make test`` leaves them out, ``make proofs`` runs them.

A proof is marked ``@pytest.mark.proof``: it plays minutes of faults, a benchmark from its start to its line, or again
on several hosts what another test has on one. Whoever names a file or a test on the command line gets all of it.

``pytest --proofs --keep FILE`` runs what is marked and writes each result to FILE as it comes, a line of JSON. Started
again, it leaves out what has passed on the same files: HEAD, and what was changed since.
"""

import hashlib
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("proofs")
    group.addoption("--proofs", action="store_true", help="run the tests that are marked as proofs, and no others")
    group.addoption(
        "--keep", metavar="FILE", default="",
        help="with --proofs: write results there, and leave out what has passed on the same files",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("keep") and not config.getoption("proofs"):
        raise pytest.UsageError("--keep FILE goes with --proofs")
    config.pluginmanager.register(Proofs(config), "proofs")


def files_as_they_are(root: Path) -> str:
    """A hash of the checkout. UsageError where there is none."""
    said = []
    for words in (["rev-parse", "HEAD"], ["diff", "--binary", "HEAD"]):
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, check=False)
        if done.returncode:
            raise pytest.UsageError(f"--keep needs a git checkout: {done.stderr.decode(errors='replace').strip()}")
        said.append(done.stdout)
    return hashlib.sha256(b"\0".join(said)).hexdigest()[:16]


class Proofs:
    """Chooses in each process, and writes in the one that tells the results."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.left_out = 0
        self.before: set[str] = set()
        self.file: Path | None = None
        self.outcomes: dict[str, str] = {}
        self.seconds: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        # Workers of xdist are told the files, which look like those that somebody has named.
        self.is_whole = config.args_source is not pytest.Config.ArgsSource.ARGS and not config.getoption("proofs")
        if worker is not None:
            self.is_whole, self.before = worker["proofs_whole"], set(worker["proofs_before"])
        elif keep := config.getoption("keep"):
            self.file, self.files = Path(keep), files_as_they_are(config.rootpath)
            self.before = self._passed()

    def _passed(self) -> set[str]:
        assert self.file is not None
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        rows = [json.loads(line) for line in lines]
        return {row["test"] for row in rows if row["files"] == self.files and row["outcome"] == "passed"}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["proofs_whole"] = self.is_whole
        node.workerinput["proofs_before"] = sorted(self.before)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        proofs = [item for item in items if item.get_closest_marker("proof")]
        if config.getoption("proofs"):
            kept = [item for item in proofs if item.nodeid not in self.before]
        elif self.is_whole:
            self.left_out = len(proofs)
            kept = [item for item in items if item not in set(proofs)]
        else:
            return
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["proofs_left_out"] = self.left_out
        elif self.before and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.left_out = max(self.left_out, getattr(node, "workeroutput", {}).get("proofs_left_out", 0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration  # type: ignore[assignment]
        if report.failed or report.skipped:
            self.outcomes[report.nodeid] = report.outcome
        if report.when != "teardown" or self.file is None:
            return
        outcome = self.outcomes.get(report.nodeid, "passed")
        self.told[outcome] += 1
        row = {"test": report.nodeid, "outcome": outcome, "seconds": round(self.seconds[report.nodeid], 2)}
        with self.file.open("a") as file:
            file.write(json.dumps(row | {"files": self.files}) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left_out:
            terminalreporter.write_line(f"{self.left_out} proofs were left out: make proofs runs them")
        if self.file is not None:
            passed = self.told["passed"] + len(self.before)
            terminalreporter.write_line(
                f"proofs on these files ({self.files}): {passed} passed ({len(self.before)} of them before this run), "
                f"{self.told['failed']} failed; every result is in {self.file}"
            )
