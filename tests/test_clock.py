"""Times and numbers read the same in Python and in the browser: both are held against one file of examples."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notebook_cluster.protocol.clock import ABSENT, ago, clock, dated, duration, roughly
from notebook_cluster.widgets.formatting import byte_count, number, percent

EXAMPLES: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "labextension" / "src" / "__tests__" / "shown.json").read_text()
)


def moment(pieces: list[int]) -> float:
    """The Unix time of these pieces of local time."""
    return time.mktime((*pieces, 0, 0, -1))  # type: ignore[arg-type]


def test_a_moment_has_its_date_where_the_day_is_another_one() -> None:
    for at, today, text in EXAMPLES["clock"]:
        assert clock(moment(at), moment(today)) == text
        assert dated(moment(at)).endswith(text)
        assert len(dated(moment(at))) == len("2026-11-19 14:03:10")
    assert len(clock(time.time())) == len("14:03:10")


def test_what_is_no_moment_is_a_dash() -> None:
    for broken in [*EXAMPLES["no_clock"], math.nan, math.inf]:
        assert (clock(broken), dated(broken)) == (ABSENT, ABSENT)


@pytest.mark.parametrize(
    ("name", "write"),
    [("duration", duration), ("ago", ago), ("number", number), ("percent", percent), ("bytes", byte_count)],
)
def test_lengths_and_numbers_are_written_as_in_the_browser(name: str, write: Callable[[float], str]) -> None:
    assert [write(value) for value, _ in EXAMPLES[name]] == [text for _, text in EXAMPLES[name]]


def test_a_length_that_is_no_measurement_is_rough() -> None:
    assert [roughly(seconds) for seconds in (4.4, 62 * 60, 6 * 3600)] == ["4 s", "62 min", "6 h"]
