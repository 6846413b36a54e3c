"""What a training loop tells panels: steps, losses, and samples a second however short its rounds are."""

from types import SimpleNamespace
from typing import Any

import pytest

from notebook_cluster.training.loop import progress
from notebook_cluster.training.loop.progress import TrainingProgress


class Clock:
    """Stands in for the time module."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Reports(list[dict[str, Any]]):
    """Stands in for a runtime: keeps what is reported."""

    def report(self, **values: Any) -> None:
        self.append(values)

    def rates(self) -> list[float]:
        return [values["samples_per_s"] for values in self if "samples_per_s" in values]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


@pytest.mark.parametrize("steps_per_round", [1, 5, 1000])
def test_waits_do_not_count_as_slow_training_and_short_rounds_have_a_rate(clock: Clock, steps_per_round: int) -> None:
    reports = Reports()
    counter = TrainingProgress(reports)  # type: ignore[arg-type]
    for step in range(1, 301):
        clock.now += 0.01
        counter.count(1.0, 8)
        if step % steps_per_round == 0:
            counter.waiting("round")
            clock.now += 3.0
            counter.waiting("")
    assert len(reports.rates()) >= 5
    assert reports.rates() == pytest.approx([800.0] * len(reports.rates()))


class OnDevice:
    """A loss that the host has to wait for."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, value: float) -> None:
        self.value = value

    def item(self) -> float:
        return self.value


def test_the_last_loss_before_a_round_is_told_also_where_it_was_too_soon_to_read_it(clock: Clock) -> None:
    reports = Reports()
    counter = TrainingProgress(reports)  # type: ignore[arg-type]
    clock.now += 1
    for step in range(1, 6):
        clock.now += 0.01
        counter.count(OnDevice(1 / step), 8)
    assert [values["loss"] for values in reports if "loss" in values] == [1.0, None, None, None, None]
    counter.tell_unread()
    assert (reports[-1]["step"], reports[-1]["loss"]) == (5, 0.2)
    told = len(reports)
    counter.tell_unread()
    counter.count(0.1, 8)
    counter.tell_unread()
    assert len(reports) == told + 1
