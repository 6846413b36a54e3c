"""The plugin that runs failed tests once more, in runs of pytest of its own."""

import os
import re
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]

# Not tests.conftest itself, which takes as long to import as all the rest of such a run.
CONFTEST = """
from tests.scheduling import ByFile

pytest_plugins = ["tests.unsteady"]

def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)
"""

# Fails in the first process that runs it, passes in the next.
FIRST = """
    import os
    import pytest
    from pathlib import Path

    def first_time(name):
        marks = Path(os.environ["MARKS"])
        try:
            (marks / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def count(name):
        with (Path(os.environ["MARKS"]) / f"{name}.count").open("a") as file:
            file.write("x")
"""

WAYS = {
    "one process": [],
    "without xdist": ["-p", "no:xdist.plugin"],
    "two workers": ["-n", "2", "--dist", "loadscope"],
}


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder of tests that uses the plugin as ours does."""
    marks = pytester.mkdir("marks")
    monkeypatch.setenv("MARKS", str(marks))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(pytester.path)]))
    # No plugin but xdist, which is what takes a run of pytest most of its time.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist.plugin")
    pytester.makeini("[pytest]\naddopts = -q")
    pytester.makeconftest(CONFTEST)
    return pytester


def run(project: pytest.Pytester, tests: str, *options: str) -> tuple[int, str]:
    """Exit code and output of ``pytest --rerun-failed-alone`` on these tests."""
    project.makepyfile(test_it=FIRST + tests)
    result = project.run(sys.executable, "-m", "pytest", "--rerun-failed-alone", *options, timeout=120)
    return int(result.ret), result.stdout.str()


def last_line(output: str) -> str:
    return re.sub(r" in [\d.]+s.*", "", output.strip().splitlines()[-1])


def counted(project: pytest.Pytester, name: str) -> int:
    return len((project.path / "marks" / f"{name}.count").read_text())


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_test_that_passes_alone_is_named_and_leaves_the_run_green(
    project: pytest.Pytester, options: list[str]
) -> None:
    code, output = run(
        project,
        """
    def test_shaky():
        count("shaky")
        assert not first_time("shaky"), "the first time is bad"

    def test_right():
        count("right")
        """,
        *options,
    )
    assert (code, last_line(output)) == (0, "1 passed, 1 unsteady")
    assert output.strip().splitlines()[-2] == (
        "unsteady (failed, passed alone): test_it.py::test_shaky: AssertionError: the first time is bad"
    )
    assert "the first time is bad" in output
    assert "FAILED" not in output
    assert (counted(project, "shaky"), counted(project, "right")) == (2, 1)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_test_that_fails_again_fails_the_run_after_one_second_try(
    project: pytest.Pytester, options: list[str]
) -> None:
    code, output = run(
        project,
        """
    def test_wrong():
        count("wrong")
        assert False, "always"

    def test_shaky():
        assert not first_time("shaky")

    def test_right():
        pass
        """,
        *options,
    )
    assert (code, last_line(output)) == (1, "1 failed, 1 passed, 1 unsteady")
    assert output.strip().splitlines()[-3:-1] == [
        "failed again alone: test_it.py::test_wrong: AssertionError: always",
        "unsteady (failed, passed alone): test_it.py::test_shaky: AssertionError: assert not True",
    ]
    assert "FAILED test_it.py::test_wrong" in output
    assert counted(project, "wrong") == 2


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(3, 0, "1 passed, 3 unsteady"), (4, 1, "4 failed, 1 passed"), (11, 1, "11 failed, 1 passed")],
)
def test_more_than_three_unsteady_ones_fail_the_run_and_more_than_ten_failed_are_left_alone(
    project: pytest.Pytester, number: int, code: int, line: str
) -> None:
    tests = f"""
    @pytest.mark.parametrize("number", range({number}))
    def test_shaky(number):
        count("shaky")
        assert not first_time(f"shaky{{number}}")

    def test_right():
        pass
    """
    found, output = run(project, tests)
    assert (found, last_line(output)) == (code, line)
    if number > 10:
        assert "no failed test was run once more: 11 tests failed, more than 10 are no unsteadiness" in output
        assert counted(project, "shaky") == 11
    else:
        assert output.count("unsteady (failed, passed alone): ") == number
        assert counted(project, "shaky") == 2 * number
        assert ("4 tests are unsteady, at most 3 may be" in output) == (number == 4)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_errors_in_setup_and_teardown_count_like_failures(
    project: pytest.Pytester, options: list[str], again: bool
) -> None:
    tests = f"""
    @pytest.fixture
    def bad_setup():
        assert not (first_time("setup") or {again})

    def test_setup(bad_setup):
        pass

    @pytest.fixture
    def bad_teardown():
        yield
        assert not (first_time("teardown") or {again})

    def test_teardown(bad_teardown):
        pass
    """
    code, output = run(project, tests, *options)
    assert (code, last_line(output)) == ((1, "1 passed, 2 errors") if again else (0, "1 passed, 2 unsteady"))
    word = "failed again alone" if again else "unsteady (failed, passed alone)"
    assert output.count(f"{word}: test_it.py::test_") == 2


@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_a_test_that_kills_its_worker_is_tried_again(project: pytest.Pytester, again: bool) -> None:
    tests = f"""
    def test_before():
        count("before")

    def test_deadly():
        count("deadly")
        if first_time("deadly") or {again}:
            os._exit(7)

    def test_after():
        count("after")
    """
    code, output = run(project, tests, "-n", "2", "--dist", "loadscope")
    assert code == int(again)
    assert last_line(output) == ("1 failed, 2 passed" if again else "2 passed, 1 unsteady")
    assert "worker 'gw" in output
    assert (counted(project, "before"), counted(project, "deadly"), counted(project, "after")) == (1, 2, 1)


@pytest.mark.parametrize("options", [[], ["-n", "2"]], ids=["one process", "two workers"])
def test_a_run_in_which_not_every_test_ran_stays_red(project: pytest.Pytester, options: list[str]) -> None:
    # As when xdist gives up on workers.
    project.makepyfile(
        lossy="""
        import pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_protocol(item):
            return True if "lost" in item.nodeid else None
        """
    )
    tests = """
    def test_shaky():
        assert not first_time("shaky")

    def test_lost():
        pass
    """
    code, output = run(project, tests, "-p", "lossy", *options)
    assert code == 1
    assert "no failed test was run once more: not all tests were run" in output


@pytest.mark.parametrize("options", [["-x"], ["-x", "-n", "2"], ["--maxfail=2"]])
def test_a_run_that_ended_early_stays_red(project: pytest.Pytester, options: list[str]) -> None:
    tests = """
    @pytest.mark.parametrize("number", range(4))
    def test_shaky(number):
        count(f"shaky{number}")
        assert not first_time(f"shaky{number}")
    """
    code, output = run(project, tests, *options)
    assert code in (1, 2)
    assert "no failed test was run once more: the run ended early" in output
    assert counted(project, "shaky0") == 1


def test_the_files_that_a_dead_worker_had_done_keep_nobody_waiting(project: pytest.Pytester) -> None:
    done = FIRST + "\n".join(f"\n    def test_{number}():\n        count('done')\n" for number in range(6))
    project.makepyfile(**{f"test_done_{number}": done for number in range(12)})
    tests = """
    def test_deadly():
        if first_time("deadly"):
            os._exit(7)

    def test_after():
        count("after")
    """
    code, output = run(project, tests, "-n", "2", "--dist", "loadscope")
    assert (code, last_line(output)) == (0, "73 passed, 1 unsteady")
    assert (counted(project, "done"), counted(project, "after")) == (72, 1)


def test_a_file_that_cannot_be_read_stays_red(project: pytest.Pytester) -> None:
    project.makepyfile(test_broken="import nothing_of_this_name")
    code, output = run(
        project, "\n    def test_shaky(): assert not first_time('shaky')\n", "--continue-on-collection-errors"
    )
    assert code == 1
    assert "no failed test was run once more: not all tests were run" in output


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_test_that_goes_on_with_what_its_file_did_is_run_with_those_before_it(
    project: pytest.Pytester, options: list[str]
) -> None:
    code, output = run(
        project,
        """
    @pytest.fixture(scope="module")
    def shared():
        return []

    def test_first(shared):
        count("first")
        shared.append(1)

    def test_shaky(shared):
        assert shared == [1]
        assert not first_time("shaky")

    def test_after(shared):
        count("after")
        """,
        *options,
    )
    assert (code, last_line(output)) == (0, "2 passed, 1 unsteady")
    assert (counted(project, "first"), counted(project, "after")) == (2, 1)


LESSON = """
    @pytest.fixture(scope="module")
    def done():
        return []

    @pytest.mark.parametrize("step", range(14))
    def test_step(done, step):
        count("step")
        if step == 1 and first_time("step"):
            pytest.fail("too late")
        assert step == 0 or step - 1 in done, f"step {step} has nothing to go on with"
        done.append(step)

    def test_between():
        count("between")

    def test_last(done):
        assert len(done) == 14

    def test_after(done):
        count("after")
"""


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_lesson_that_one_failure_has_ended_is_tried_again_once_as_a_whole(
    project: pytest.Pytester, options: list[str]
) -> None:
    code, output = run(project, LESSON, *options)
    assert (code, last_line(output)) == (0, "3 passed, 14 unsteady")
    names = [f"test_it.py::test_{name}" for name in (*(f"step[{step}]" for step in range(1, 14)), "last")]
    assert f"once more, alone (1 of 1): {', '.join(names)}\n" in output
    lines = output.strip().splitlines()[-15:-1]
    assert [line.split(": ")[1] for line in lines] == names
    assert lines[0] == "unsteady (failed, passed alone): test_it.py::test_step[1]: Failed: too late"
    assert (counted(project, "step"), counted(project, "between"), counted(project, "after")) == (28, 2, 1)


def test_a_lesson_in_which_one_test_fails_again_fails_the_run_with_all_that_failed(project: pytest.Pytester) -> None:
    code, output = run(
        project,
        LESSON.replace("len(done) == 14", "False, 'always'")
        + """
    def test_shaky():
        assert not first_time("shaky")
        """,
    )
    assert (code, last_line(output)) == (1, "14 failed, 3 passed, 1 unsteady")
    assert output.count("failed again with its lesson: test_it.py::test_") == 14
    assert "failed again with its lesson: test_it.py::test_last: AssertionError: always" in output
    assert output.count("again, alone: ") == 1
    assert output.count("unsteady (failed, passed alone): test_it.py::test_shaky") == 1


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (2, 0, ""),
        (3, 1, "4 lessons with 17 tests are unsteady, at most 3 may be"),
        (10, 1, "no failed test was run once more: 11 lessons with 24 tests failed, more than 10 are no unsteadiness"),
    ],
)
def test_the_limits_count_a_lesson_once_and_each_test_of_its_file_that_shares_nothing(
    project: pytest.Pytester, number: int, code: int, said: str
) -> None:
    tests = f"""
    @pytest.mark.parametrize("number", range({number}))
    def test_shaky(number):
        assert not first_time(f"shaky{{number}}")
    """
    found, output = run(project, LESSON + tests)
    assert found == code
    assert said in output
    assert ("lessons" in output) == bool(said)


def test_a_lesson_whose_worker_dies_is_tried_again_with_what_failed_after_it(project: pytest.Pytester) -> None:
    tests = LESSON.replace('pytest.fail("too late")', "os._exit(7)")
    code, output = run(project, tests, "-n", "2", "--dist", "loadscope")
    assert (code, last_line(output)) == (0, "3 passed, 14 unsteady")
    assert output.count("once more, alone (1 of 1): test_it.py::test_step[1], test_it.py::test_step[2], ") == 1


def test_a_test_that_is_skipped_alone_has_not_passed(project: pytest.Pytester) -> None:
    code, output = run(
        project,
        """
    def test_shaky():
        if not first_time("shaky"):
            pytest.skip("not now")
        assert False
        """,
    )
    assert (code, last_line(output)) == (1, "1 failed")
    assert "failed again alone: test_it.py::test_shaky" in output


def test_a_name_that_is_not_found_again_stays_red(project: pytest.Pytester) -> None:
    code, output = run(
        project,
        """
    @pytest.mark.parametrize("name", [os.getpid()])
    def test_shaky(name):
        assert False
        """,
    )
    assert (code, last_line(output)) == (1, "1 failed")


def test_without_the_option_a_failure_is_seen_at_once(project: pytest.Pytester) -> None:
    project.makepyfile(test_it=FIRST + "\n    def test_shaky(): assert not first_time('shaky')\n")
    result = project.run(sys.executable, "-m", "pytest", timeout=120)
    assert int(result.ret) == 1
    assert "unsteady" not in result.stdout.str()


def test_options_for_all_runs_do_not_reach_into_a_second_try(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist.plugin -n 2 --rerun-failed-alone")
    code, output = run(project, "\n    def test_wrong():\n        count('wrong')\n        assert False\n")
    assert (code, last_line(output)) == (1, "1 failed")
    assert counted(project, "wrong") == 2


def test_the_whole_suite_is_run_with_second_tries() -> None:
    recipe = (ROOT / "Makefile").read_text().split("\ntest:")[1].split("\n\n")[0]
    assert "--rerun-failed-alone" in recipe
