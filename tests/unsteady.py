"""A pytest plugin: with ``--rerun-failed-alone`` a test that failed is run once more, alone, when all others are done.

Machines that are busy make tests fail that are right; tests that fail on and off hide mistakes that are real. So a test
that failed and passes alone is *unsteady*: it is named at the end of the run, and up to MOST_UNSTEADY of them leave the
run green. It stays red when a test fails again, when more of them are unsteady, and, without any second try, when
more than MOST_FAILED failed or the run ended early (``-x``, Ctrl-C).

A second try is a fresh process, ``pytest FILE --alone NODEID``, with the options of ``pyproject.toml``. A test with
fixtures that it shares with its file (scope module or class) is run with those before it, whose work it may go on with;
its own result counts. Worker processes of xdist report to the one that has this plugin do its work.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

MOST_UNSTEADY = 3
MOST_FAILED = 10
ALONE_SECONDS = 1800.0
"""Each test has its own limit (pytest-timeout); this is for a process that does not end all the same."""
SHARED_SCOPES = ("class", "module", "package")
SHOWN_LINES = 60
REASON = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("unsteady")
    group.addoption(
        "--rerun-failed-alone", action="store_true",
        help=f"run each test that failed once more, alone, at the end; up to {MOST_UNSTEADY} that pass then are named "
        "and leave the run green",
    )  # fmt: skip
    group.addoption(
        "--alone", metavar="NODEID", default="",
        help="run this test only, with those before it in its file where they share fixtures; fails unless it passes",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    if nodeid := config.getoption("alone"):
        config.pluginmanager.register(Alone(nodeid), "unsteady-alone")
    elif config.getoption("rerun_failed_alone"):
        config.pluginmanager.register(SecondTries(config), "unsteady-second-tries")


class Alone:
    """In the process of a second try: which tests run, and that only the result of ``nodeid`` counts."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid
        self.passed = False
        self.failed = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        places = [place for place, item in enumerate(items) if item.nodeid == self.nodeid]
        kept: list[pytest.Item] = []
        if places:
            wanted = items[places[0]]
            before = [item for item in items[: places[0]] if item.path == wanted.path] if _shares(wanted) else []
            kept = [*before, wanted]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid == self.nodeid:
            self.passed |= report.when == "call" and report.passed
            self.failed |= report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            right = self.passed and not self.failed
            session.exitstatus = pytest.ExitCode.OK if right else pytest.ExitCode.TESTS_FAILED


def _shares(item: pytest.Item) -> bool:
    """Does ``item`` use a fixture that lives longer than one test of its file?"""
    known: dict[str, Any] = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return any(definition.scope in SHARED_SCOPES for definitions in known.values() for definition in definitions[-1:])


@dataclass
class Outcome:
    """What became of the tests that failed."""

    unsteady: list[str] = field(default_factory=list)
    again: dict[str, str] = field(default_factory=dict)
    """Node id -> the last lines of its second try."""
    left_alone: str = ""
    """Why nothing was run again."""

    @property
    def is_fine(self) -> bool:
        return bool(self.unsteady) and not self.again and len(self.unsteady) <= MOST_UNSTEADY


class SecondTries:
    """In the process that tells the results: gathers what failed, and tries it again when the session is over."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.failed: list[str] = []
        self.reports: list[pytest.TestReport] = []
        self.uncollected = False
        self.collected: set[str] = set()
        self.told: set[str] = set()
        self.outcome = Outcome()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.uncollected |= report.failed

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.collected.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.told.add(report.nodeid)
        # Of setup, call and teardown, and, of a worker that died, neither.
        if report.failed:
            self.reports.append(report)
            if report.nodeid not in self.failed:
                self.failed.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        # Last: xdist has ended its workers by then.
        if not self.failed:
            return
        self.outcome.left_alone = self._why_not(session, exitstatus)
        if self.outcome.left_alone:
            return
        for number, nodeid in enumerate(self.failed, 1):
            self._say(f"once more, alone ({number} of {len(self.failed)}): {nodeid}")
            code, output = run_alone(self.config, nodeid)
            if code == 0:
                self.outcome.unsteady.append(nodeid)
            else:
                self.outcome.again[nodeid] = output
        if len(self.outcome.unsteady) <= MOST_UNSTEADY:
            self._call_unsteady()
        if self.outcome.is_fine:
            session.exitstatus = pytest.ExitCode.OK

    def _why_not(self, session: pytest.Session, exitstatus: int) -> str:
        if exitstatus != pytest.ExitCode.TESTS_FAILED or session.shouldfail or session.shouldstop:
            return "the run ended early"
        if self.uncollected or self.collected - self.told:
            return "not all tests were run"
        if len(self.failed) > MOST_FAILED:
            return f"{len(self.failed)} tests failed, more than {MOST_FAILED} are no unsteadiness"
        return ""

    def _say(self, text: str) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(text)
            reporter.flush()

    def _call_unsteady(self) -> None:
        """Have pytest count these as "unsteady" instead of "failed", so that its last line says what is so."""
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or not self.outcome.unsteady:
            return
        for kind in ("failed", "error"):
            rest = [report for report in reporter.stats.pop(kind, []) if report.nodeid not in self.outcome.unsteady]
            if rest:
                reporter.stats[kind] = rest
        first = {report.nodeid: report for report in reversed(self.reports)}
        reporter.stats["unsteady"] = [first[nodeid] for nodeid in self.outcome.unsteady]
        reporter._set_main_color()  # which also looks what kinds there are

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        self._show_reports(terminalreporter)
        yield
        # After pytest's own short summary: these are the last lines but one.
        if self.outcome.left_alone:
            terminalreporter.write_line(f"no failed test was run once more: {self.outcome.left_alone}", red=True)
        for nodeid in self.outcome.again:
            terminalreporter.write_line(f"failed again alone: {nodeid}{self._reason(nodeid)}", red=True)
        for nodeid in self.outcome.unsteady:
            terminalreporter.write_line(f"unsteady (failed, passed alone): {nodeid}{self._reason(nodeid)}", yellow=True)
        if len(self.outcome.unsteady) > MOST_UNSTEADY:
            terminalreporter.write_line(
                f"{len(self.outcome.unsteady)} tests are unsteady, at most {MOST_UNSTEADY} may be", red=True
            )

    def _reason(self, nodeid: str) -> str:
        """What the first try of ``nodeid`` said in one line: of a long log only the end may be kept."""
        said = next(report.longreprtext for report in self.reports if report.nodeid == nodeid)
        lines = [line[1:].strip() for line in said.splitlines() if line.startswith("E ")]
        return f": {lines[0][:REASON]}" if lines else ""

    def _show_reports(self, reporter: pytest.TerminalReporter) -> None:
        """How the unsteady ones failed, which pytest shows no more, and how the others failed the second time."""
        shown = reporter.stats.get("unsteady", [])
        for report in [one for one in self.reports if any(one.nodeid == other.nodeid for other in shown)]:
            reporter.section(f"unsteady: {report.nodeid} ({report.when})", sep="_", yellow=True)
            reporter.write_line(report.longreprtext)
            for title, text in report.sections:
                reporter.section(title, sep="-")
                reporter.write_line("\n".join(text.splitlines()[-SHOWN_LINES:]))
        for nodeid, output in self.outcome.again.items():
            reporter.section(f"again, alone: {nodeid}", sep="_", red=True)
            reporter.write_line(output)


def run_alone(config: pytest.Config, nodeid: str) -> tuple[int, str]:
    """Exit code (0: it passed) and last lines of a second try of ``nodeid`` in a process of its own."""
    root = Path(config.rootpath)
    command = [sys.executable, "-m", "pytest", nodeid.partition("::")[0], "--alone", nodeid, f"--rootdir={root}"]
    if config.inipath is not None:
        command += ["-c", str(config.inipath)]
    if hasattr(config.option, "numprocesses"):
        command += ["-n", "0"]  # whatever PYTEST_ADDOPTS says
    process = subprocess.Popen(
        command, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=ALONE_SECONDS)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return 1, f"it had not ended after {ALONE_SECONDS:g} s"
    return process.returncode, "\n".join(output.splitlines()[-SHOWN_LINES:])
