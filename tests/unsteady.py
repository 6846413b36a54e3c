"""A pytest plugin: with ``--rerun-failed-alone`` a test that failed is run once more, alone, when all others are done.

Machines that are busy make tests fail that are right; tests that fail on and off hide mistakes that are real. So a test
that failed and passes alone is *unsteady*: it is named at the end of the run, and up to MOST_UNSTEADY of them leave the
run green. It stays red when a test fails again, when more of them are unsteady, and, without any second try, when
more than MOST_FAILED failed or the run ended early (``-x``, Ctrl-C).

The tests of a file that share fixtures with it (scope class, module or package) may go on with each other's work, and
then one failure makes all after it fail. So those of them that failed are one *lesson*: it is tried again as a whole,
and both limits count it once. A failed test that shares nothing is a lesson of its own. All that failed are named.

A second try is a fresh process, ``pytest FILE --alone NODEID ...``, with the options of ``pyproject.toml``. A test that
shares fixtures is run with all that come before it in its file; only the tests that failed count, and each must pass.
Worker processes of xdist report to the one that has this plugin do its work, and say of each test whether it shares.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Generator, Iterator, Sequence
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
        help=f"run what failed once more, alone, at the end; up to {MOST_UNSTEADY} tests, or lessons of tests that "
        "share fixtures, that pass then are named and leave the run green",
    )  # fmt: skip
    group.addoption(
        "--alone", metavar="NODEID", action="append", default=[],
        help="run this test only, with those before it in its file where they share fixtures; fails unless it passes; "
        "can be given several times",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    if nodeids := config.getoption("alone"):
        config.pluginmanager.register(Alone(nodeids), "unsteady-alone")
    elif config.getoption("rerun_failed_alone"):
        config.pluginmanager.register(SecondTries(config), "unsteady-second-tries")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    # That of the setup is also there when the test itself ends its worker.
    report = yield
    report.shares = _shares(item)
    return report


class Alone:
    """In the process of a second try: which tests run, and that only the results of ``nodeids`` count."""

    def __init__(self, nodeids: Sequence[str]) -> None:
        self.nodeids = set(nodeids)
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        wanted = [place for place, item in enumerate(items) if item.nodeid in self.nodeids]
        kept = set(wanted)
        for place in wanted:
            if _shares(items[place]):
                kept.update(before for before in range(place) if items[before].path == items[place].path)
        config.hook.pytest_deselected(items=[item for place, item in enumerate(items) if place not in kept])
        items[:] = [items[place] for place in sorted(kept)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            right = self.nodeids <= self.passed - self.failed
            session.exitstatus = pytest.ExitCode.OK if right else pytest.ExitCode.TESTS_FAILED


def _shares(item: pytest.Item) -> bool:
    """Does ``item`` use a fixture that lives longer than one test of its file?"""
    known: dict[str, Any] = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return any(definition.scope in SHARED_SCOPES for definitions in known.values() for definition in definitions[-1:])


Lesson = tuple[str, ...]
"""Node ids of failed tests that are tried again together."""


def _number(lessons: Collection[Lesson]) -> str:
    """How many they are: ``4 tests``, or ``4 lessons with 15 tests``."""
    tests = sum(map(len, lessons))
    return f"{tests} tests" if tests == len(lessons) else f"{len(lessons)} lessons with {tests} tests"


@dataclass
class Outcome:
    """What became of the tests that failed."""

    unsteady: list[Lesson] = field(default_factory=list)
    again: dict[Lesson, str] = field(default_factory=dict)
    """What failed again -> the last lines of its second try."""
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
        self.sharing: set[str] = set()
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
        if getattr(report, "shares", False):
            self.sharing.add(report.nodeid)
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
        lessons = self._lessons()
        for number, lesson in enumerate(lessons, 1):
            self._say(f"once more, alone ({number} of {len(lessons)}): {', '.join(lesson)}")
            code, output = run_alone(self.config, lesson)
            if code == 0:
                self.outcome.unsteady.append(lesson)
            else:
                self.outcome.again[lesson] = output
        if len(self.outcome.unsteady) <= MOST_UNSTEADY:
            self._call_unsteady()
        if self.outcome.is_fine:
            session.exitstatus = pytest.ExitCode.OK

    def _lessons(self) -> list[Lesson]:
        """All that failed, in the order in which it did."""
        found: dict[str, Lesson] = {}
        for nodeid in self.failed:
            name = nodeid.partition("::")[0] if nodeid in self.sharing else nodeid
            found[name] = (*found.get(name, ()), nodeid)
        return list(found.values())

    def _why_not(self, session: pytest.Session, exitstatus: int) -> str:
        if exitstatus != pytest.ExitCode.TESTS_FAILED or session.shouldfail or session.shouldstop:
            return "the run ended early"
        if self.uncollected or self.collected - self.told:
            return "not all tests were run"
        if len(lessons := self._lessons()) > MOST_FAILED:
            return f"{_number(lessons)} failed, more than {MOST_FAILED} are no unsteadiness"
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
        unsteady = [nodeid for lesson in self.outcome.unsteady for nodeid in lesson]
        if reporter is None or not unsteady:
            return
        for kind in ("failed", "error"):
            rest = [report for report in reporter.stats.pop(kind, []) if report.nodeid not in unsteady]
            if rest:
                reporter.stats[kind] = rest
        first = {report.nodeid: report for report in reversed(self.reports)}
        reporter.stats["unsteady"] = [first[nodeid] for nodeid in unsteady]
        reporter._set_main_color()  # which also looks what kinds there are

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        self._show_reports(terminalreporter)
        yield
        # After pytest's own short summary: these are the last lines but one.
        if self.outcome.left_alone:
            terminalreporter.write_line(f"no failed test was run once more: {self.outcome.left_alone}", red=True)
        for lesson in self.outcome.again:
            # Some of a lesson may have passed: its output says which.
            how = "failed again alone" if len(lesson) == 1 else "failed again with its lesson"
            for nodeid in lesson:
                terminalreporter.write_line(f"{how}: {nodeid}{self._reason(nodeid)}", red=True)
        for nodeid in [nodeid for lesson in self.outcome.unsteady for nodeid in lesson]:
            terminalreporter.write_line(f"unsteady (failed, passed alone): {nodeid}{self._reason(nodeid)}", yellow=True)
        if len(self.outcome.unsteady) > MOST_UNSTEADY:
            terminalreporter.write_line(
                f"{_number(self.outcome.unsteady)} are unsteady, at most {MOST_UNSTEADY} may be", red=True
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
        for lesson, output in self.outcome.again.items():
            reporter.section(f"again, alone: {', '.join(lesson)}", sep="_", red=True)
            reporter.write_line(output)


def run_alone(config: pytest.Config, lesson: Lesson) -> tuple[int, str]:
    """Exit code (0: all of it passed) and last lines of a second try of ``lesson`` in a process of its own."""
    root = Path(config.rootpath)
    command = [sys.executable, "-m", "pytest", lesson[0].partition("::")[0], f"--rootdir={root}"]
    for nodeid in lesson:
        command += ["--alone", nodeid]
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
