"""A panel's kernel sends a page that falls behind the next state when it has drawn the last one, and no page is waited
for in vain."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from notebook_cluster.widgets.subshell import PATIENCE_SECONDS, PROMPT_SECONDS, PROMPT_STATES, SlowViews
from tests.conftest import shared_folders, wait_until
from tests.notebook_browser import Browser
from tests.panel_notebook import SHOW


def behind(view: str) -> dict[str, Any]:
    return {"action": "behind", "view": view}


def drawn(view: str, number: int) -> dict[str, Any]:
    return {"action": "drawn", "view": view, "number": number}


def test_nobody_is_waited_for_where_all_keep_up_or_no_page_is_there() -> None:
    views = SlowViews()
    assert [views.number(0.5 * state) for state in range(100)] == [0] * 100
    assert views.wait(50.0) == 0


def test_the_next_state_is_held_back_until_a_view_that_is_behind_has_drawn_the_last() -> None:
    views = SlowViews()
    views.number(1.0)
    assert views.hear(behind("a"), 1.1)
    assert views.wait(1.1) == 0
    number = views.number(1.5)
    assert views.wait(2.0) == PATIENCE_SECONDS - 0.5
    assert views.hear(drawn("a", number - 1), 3.0)
    assert views.wait(3.0) == PATIENCE_SECONDS
    assert views.hear(drawn("a", number), 4.0)
    assert views.wait(4.0) == 0
    assert views.number(4.0) == number + 1


def test_of_several_views_all_have_to_draw_and_one_that_was_closed_is_forgotten() -> None:
    views = SlowViews()
    views.hear(behind("slow"), 0.0)
    views.hear(behind("closed"), 0.0)
    number = views.number(1.0)
    views.hear(drawn("slow", number), 2.0)
    assert views.wait(2.0) == PATIENCE_SECONDS - 1
    assert views.wait(1.0 + PATIENCE_SECONDS) == 0
    number = views.number(1.0 + PATIENCE_SECONDS)
    views.hear(drawn("slow", number), 7.0)
    assert views.wait(7.0) == 0


def test_a_view_that_never_answers_is_waited_for_once_whatever_was_sent_in_between() -> None:
    views = SlowViews()
    views.hear(behind("gone"), 0.0)
    assert [views.number(1.0), views.number(3.0), views.number(5.0)] == [1, 2, 3]
    assert views.wait(5.0) == PATIENCE_SECONDS - 4
    assert views.number(1.0 + PATIENCE_SECONDS) == 0
    assert views.wait(1.0 + PATIENCE_SECONDS) == 0


def test_a_view_that_is_prompt_again_says_nothing_any_more() -> None:
    views = SlowViews()
    views.hear(behind("a"), 0.0)
    views.hear(drawn("a", views.number(1.0)), 1.0 + 2 * PROMPT_SECONDS)
    for state in range(PROMPT_STATES):
        number = views.number(2.0 + state)
        assert number > 0
        views.hear(drawn("a", number), 2.0 + state + PROMPT_SECONDS / 2)
    assert views.number(60.0) == 0


@pytest.mark.parametrize(
    "message", [None, [], {"action": "add"}, {"action": "behind", "view": 3}, {"action": "drawn", "view": "a"}]
)
def test_other_messages_are_none_of_drawing(message: object) -> None:
    assert not SlowViews().hear(message, 0.0)


def test_a_view_that_was_not_behind_or_has_long_been_forgotten_changes_nothing() -> None:
    views = SlowViews()
    views.hear(drawn("stranger", 7), 0.0)
    views.hear(behind("a"), 0.0)
    number = views.number(1.0)
    views.hear(drawn("stranger", number), 1.5)
    assert views.wait(1.5) > 0
    for crowd in range(1000):
        views.hear(behind(f"page {crowd}"), 2.0)
    assert len(views._views) < 100


class SlowPage(Browser):
    """A page of the panel that draws when a test says so: ``states`` have come."""

    def __init__(self, folder: Path) -> None:
        self.panel = ""
        self.states: list[dict[str, Any]] = []
        super().__init__(folder)

    def _take(self, kind: str, content: dict[str, Any]) -> None:
        super()._take(kind, content)
        state = (content.get("data", {}).get("state") or {}) if kind in ("comm_open", "comm_msg") else {}
        if "nodes" in (state.get("state") or {}):
            self.panel = content["comm_id"]
            self.states.append(state["state"])

    def say_to_panel(self, message: dict[str, Any]) -> None:
        self.say(self.panel, {"method": "custom", "content": message})

    def until_state(self, fits: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        """Wait until the newest state ``fits``."""
        wait_until(lambda: self.listen() or bool(self.states and fits(self.states[-1])), 60, lambda: what)
        return self.states[-1]


@pytest.fixture
def page() -> Iterator[SlowPage]:
    with shared_folders() as root:
        page = SlowPage(root)
        try:
            yield page
        finally:
            page.close()


WAIT_FOR_EVER = "from notebook_cluster.widgets import panel, subshell\nsubshell.PATIENCE_SECONDS = 1e6"
TRAIN_ON = "before = cluster.step\nwhile cluster.step < before + 24: time.sleep(0.05)\nprint(cluster.step)"
"""Twelve states of the cluster, three seconds."""
LAST_POINT = """
def steps():
    figure = panel._panels[-1]._figure
    return [int(step) for step in figure.widget._data[0]["x"]] if figure and figure.widget._data else []
end = time.monotonic() + 60
while not (steps() and steps()[-1] >= {least}) and time.monotonic() < end: time.sleep(0.05)
print(steps())
"""


def test_a_page_that_is_behind_gets_the_newest_state_when_it_has_drawn_the_last_and_answers_at_once(
    page: SlowPage,
) -> None:
    page.works(f"{SHOW}\n{WAIT_FOR_EVER}")
    page.until_state(lambda state: state.get("tell") == 0, "a state that nobody has to answer")

    page.say_to_panel(behind("slow"))
    last = page.until_state(lambda state: state["tell"], "a state with a number")["tell"]
    page.works(TRAIN_ON)
    assert page.states[-1]["tell"] == last

    page.say_to_panel({"action": "restart", "target": "mini", "id": "1"})
    answered = page.until_state(lambda state: any(one["status"] == "failed" for one in state["answers"]), "an answer")
    assert answered["tell"] > last

    least = int(page.works(TRAIN_ON))
    page.say_to_panel(drawn("slow", page.states[-1]["tell"]))
    newest = page.until_state(lambda state: state["tell"] > answered["tell"], "what came meanwhile")
    assert int(newest["nodes"][0]["step"].replace(",", "")) >= least
    page.say_to_panel(drawn("slow", newest["tell"]))
    steps = json.loads(page.works(LAST_POINT.format(least=least)))
    assert steps == list(range(0, steps[-1] + 1, 2))


def test_a_page_that_is_closed_while_it_is_behind_stops_no_other(page: SlowPage) -> None:
    page.works(f"{SHOW}\n{WAIT_FOR_EVER.replace('1e6', '0.1')}")
    page.until_state(lambda state: state.get("tell") == 0, "a state that nobody has to answer")
    page.say_to_panel(behind("closed"))
    page.until_state(lambda state: state["tell"], "a state with a number")
    page.until_state(lambda state: state["tell"] == 0, "states that nobody has to answer")
