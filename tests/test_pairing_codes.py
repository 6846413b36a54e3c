"""Codes: the words, how they are read, and how few wrong ones are allowed. On a clock that the test moves."""

import itertools

import pytest

from notebook_cluster.security import OpenCode, new_code, read_code
from notebook_cluster.security.codes import MAX_WRONG, WORDS, TooManyAttempts


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def distance(first: str, second: str) -> int:
    """Letters to insert, remove or replace."""
    row = list(range(len(second) + 1))
    for index, letter in enumerate(first, 1):
        previous, row[0] = row[0], index
        for column, other in enumerate(second, 1):
            previous, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, previous + (letter != other))
    return row[-1]


# ---- words and reading -----------------------------------------------------------------------------------------


def test_the_words_are_256_short_ones_and_no_slip_makes_another() -> None:
    assert len(WORDS) == len(set(WORDS)) == 256
    assert all(3 <= len(word) <= 6 and word.isascii() and word.isalpha() and word.islower() for word in WORDS)
    close = [pair for pair in itertools.combinations(WORDS, 2) if distance(*pair) < 2]
    assert close == []


def test_a_new_code_is_two_words_and_a_number_and_reads_as_itself() -> None:
    codes = {new_code() for _ in range(200)}
    assert len(codes) == 200
    for code in codes:
        first, second, number = code.split("-")
        assert {first, second} <= set(WORDS)
        assert first != second
        assert 10 <= int(number) <= 999
        assert read_code(code) == code


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        ("Tiger Lamp 42", "tiger-lamp-42"),
        ("  tiger--lamp_42\n", "tiger-lamp-42"),
        ("TIGER\u2014LAMP\u00a042", "tiger-lamp-42"),
        ("\uff34iger-lamp-42", "tiger-lamp-42"),
        ("Algebra9B", "algebra9b"),
        ("übung-7", "übung-7"),
    ],
)
def test_case_blanks_and_dashes_do_not_matter(typed: str, code: str) -> None:
    assert read_code(typed) == code


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        ("", "use 6 to 64"),
        ("a-b-c-1-2", "has 5 letters and digits: use 6 to 64"),
        ("a1" * 33, "use 6 to 64"),
        ("x" * 1_000_000, "use 6 to 64"),
        ("tiger;lamp", "other characters than letters, digits"),
        ("tiger\0lamp", "other characters than letters, digits"),
        ("123456", "too easy to guess"),
        ("abcdef", "too easy to guess"),
        ("aaaaaaaa", "too easy to guess"),
    ],
)
def test_an_unusable_code_is_named_with_the_reason(typed: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        read_code(typed)
    assert len(str(caught.value)) < 500


# ---- the limits ------------------------------------------------------------------------------------------------


def tries(code: OpenCode, source: str, count: int) -> int:
    """Try ``count`` wrong codes; how many were checked."""
    before = code.checked
    for _ in range(count):
        try:
            code.wrong(code.begin(source))
        except TooManyAttempts:
            pass
    return code.checked - before


def test_a_source_has_five_wrong_tries_a_minute() -> None:
    clock = Clock()
    code = OpenCode("tiger-lamp-42", True, None, clock=clock)
    assert tries(code, "10.0.0.1", 50) == 5
    with pytest.raises(TooManyAttempts, match="try again in 60 s") as caught:
        code.begin("10.0.0.1")
    assert caught.value.retry_after == 60
    clock.now += 59.9
    assert tries(code, "10.0.0.1", 50) == 0
    clock.now += 0.2
    assert tries(code, "10.0.0.1", 50) == 5


def test_the_minute_slides() -> None:
    clock = Clock()
    code = OpenCode("tiger-lamp-42", True, None, clock=clock)
    for _ in range(5):
        assert tries(code, "10.0.0.1", 1) == 1
        clock.now += 10
    assert tries(code, "10.0.0.1", 5) == 0
    clock.now += 11
    assert tries(code, "10.0.0.1", 5) == 1


def test_other_sources_are_not_held_up() -> None:
    code = OpenCode("tiger-lamp-42", True, None, clock=Clock())
    tries(code, "10.0.0.1", 50)
    code.right(code.begin("10.0.0.2"))
    assert code.over == "it was used"


def test_twenty_wrong_tries_end_the_code_for_all() -> None:
    code = OpenCode("tiger-lamp-42", False, None, clock=Clock())
    assert sum(tries(code, f"10.0.0.{number}", 5) for number in range(100)) == MAX_WRONG
    assert code.over == "20 wrong codes were tried"
    assert code.tries_left == 0
    with pytest.raises(TooManyAttempts, match="20 wrong codes were tried") as caught:
        code.begin("10.0.1.1")
    assert caught.value.retry_after is None


def test_tries_at_the_same_time_gain_nothing() -> None:
    code = OpenCode("tiger-lamp-42", False, None, clock=Clock())
    running = [code.begin("10.0.0.1") for _ in range(5)]
    with pytest.raises(TooManyAttempts) as caught:
        code.begin("10.0.0.1")
    assert 0 < (caught.value.retry_after or 0) < 1  # they may turn out right any moment
    for attempt in running:
        code.wrong(attempt)
    with pytest.raises(TooManyAttempts, match="5 wrong codes a minute"):
        code.begin("10.0.0.1")


def test_at_most_twenty_run_or_were_wrong() -> None:
    code = OpenCode("tiger-lamp-42", False, None, clock=Clock())
    running = [code.begin(f"10.0.0.{number}") for number in range(MAX_WRONG)]
    with pytest.raises(TooManyAttempts, match="others are trying") as caught:
        code.begin("10.0.1.1")
    assert caught.value.retry_after is not None
    assert code.over is None
    code.right(running.pop())
    code.wrong(code.begin("10.0.1.1"))
    assert code.tries_left == 0


def test_right_tries_cost_nothing_and_leave_nothing_behind() -> None:
    code = OpenCode("tiger-lamp-42", False, None, clock=Clock())
    for _ in range(500):
        code.right(code.begin("10.0.0.1"))
    assert (code.checked, code.right_count, code.tries_left, code.over) == (500, 500, MAX_WRONG, None)


def test_a_right_try_that_was_refused_for_another_reason_uses_nothing_up() -> None:
    code = OpenCode("tiger-lamp-42", True, None, clock=Clock())
    code.right(code.begin("10.0.0.1"), used=False)
    assert (code.over, code.tries_left) == (None, MAX_WRONG)


def test_an_attempt_is_counted_once() -> None:
    code = OpenCode("tiger-lamp-42", False, None, clock=Clock())
    attempt = code.begin("10.0.0.1")
    code.wrong(attempt)
    code.wrong(attempt)
    code.right(attempt)
    assert code.tries_left == MAX_WRONG - 1


def test_a_code_expires() -> None:
    clock = Clock()
    code = OpenCode("tiger-lamp-42", False, 60, clock=clock)
    clock.now += 59
    assert (code.over, code.seconds_left) == (None, 1)
    clock.now += 2
    assert (code.over, code.seconds_left) == ("its time is over", 0)
    with pytest.raises(TooManyAttempts, match="its time is over"):
        code.begin("10.0.0.1")


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="use a time above zero"):
        OpenCode("tiger-lamp-42", False, seconds)
