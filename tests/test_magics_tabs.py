"""What a display says to JupyterLab's renderer: which nodes, how they ended, which block is whose."""

import json
from types import SimpleNamespace

import pytest

from notebook_cluster.magics.display.folding import MIME_TYPE
from notebook_cluster.magics.display.publishing import ShellPublisher
from tests.test_magics_output import Screen


def described(screen):
    """The structure of each display that has one."""
    return [data[MIME_TYPE] for data in screen.page.displays.values() if MIME_TYPE in data]


def test_it_names_the_nodes_and_their_blocks_in_rank_order():
    screen = Screen()
    for node in ("desk", "mini"):
        screen.text(node, "same\n")
    screen.text("air", "other\n", 2)
    screen.display.states({"mini": "ok", "desk": "error"})
    screen.finish()
    (tabs,) = described(screen)
    assert tabs.pop("cell").startswith("nbc-")
    assert tabs == {
        "version": 1,
        "row": 0,
        "page": 0,
        "first": 0,
        "count": 2,
        "names": ["mini", "desk", "air"],
        "ranks": [0, 1, 2],
        "states": ["ok", "error", "running"],
        "blocks": [0, 0, 1],
    }


def test_one_node_has_no_tabs():
    screen = Screen()
    screen.text("mini", "alone\n")
    screen.finish()
    assert described(screen) == []


def test_it_repeats_no_text_and_stays_small():
    screen = Screen()
    for rank in range(8):
        screen.text(f"node-{rank}", f"text of {rank} {'x' * 100}\n", rank)
    screen.finish()
    text = json.dumps(described(screen))
    assert "xxx" not in text
    assert len(text) < 500


def test_a_node_that_ends_is_shown_so_without_new_text():
    screen = Screen()
    for node in ("mini", "desk"):
        screen.text(node, "same\n")
    screen.run(0.5)
    assert described(screen)[0]["states"] == ["running", "running"]
    screen.display.states({"desk": "lost"})
    screen.run(0.5)
    assert described(screen)[0]["states"] == ["running", "lost"]


def test_a_status_that_is_the_same_publishes_nothing():
    screen = Screen()
    for node in ("mini", "desk"):
        screen.text(node, "same\n")
    screen.run(0.5)
    published = len(screen.page.messages)
    screen.display.states({"mini": "running", "desk": "running", "silent": "ok"})
    screen.run(0.5)
    screen.display.states({"mini": "ok", "desk": "ok"})
    screen.finish()
    assert len(screen.page.messages) == published + 1


def test_a_row_over_several_displays_says_which_blocks_each_has():
    screen = Screen()
    for rank in range(4):
        screen.text(f"node-{rank}", f"line of {rank} {'x' * 80}\n" * 300, rank)
    screen.finish()
    pages = described(screen)
    assert len(pages) > 1
    assert [tabs["page"] for tabs in pages] == list(range(len(pages)))
    assert [tabs["first"] + tabs["count"] for tabs in pages] == [tabs["first"] for tabs in pages[1:]] + [4]
    assert all(tabs["blocks"] == [0, 1, 2, 3] for tabs in pages)
    assert len({tabs["cell"] for tabs in pages}) == 1


@pytest.mark.parametrize("nodes", [2, 60])
def test_displays_with_tabs_stay_below_64_kib(nodes):
    screen = Screen()
    for rank in range(nodes):
        screen.text(f"node-{rank}", f"line of {rank} \x1b[31m<{'x' * 30}>\x1b[0m\n" * 2000, rank)
    screen.finish()
    assert described(screen)
    for data in screen.page.displays.values():
        assert sum(len(value if isinstance(value, str) else json.dumps(value)) for value in data.values()) <= 65536


def test_more_nodes_than_anybody_has_are_shown_without_tabs():
    screen = Screen()
    for rank in range(600):
        screen.text(f"a-node-with-a-long-name-{rank}", "same\n", rank)
    assert "all 600 nodes" in "".join(screen.finish())
    assert described(screen) == []


def test_text_after_a_figure_is_another_row_of_the_same_cell():
    screen = Screen()
    for node in ("mini", "desk"):
        screen.text(node, "before\n")
        screen.image(node)
        screen.text(node, "after\n")
    screen.finish()
    first, second = described(screen)
    assert (first["row"], second["row"]) == (0, 2)
    assert first["cell"] == second["cell"]


@pytest.mark.parametrize(("allow_stdin", "expected"), [(True, {"text/plain", MIME_TYPE}), (False, {"text/plain"})])
def test_where_nobody_can_click_there_are_no_tabs(allow_stdin, expected):
    published = []
    shell = SimpleNamespace(
        kernel=SimpleNamespace(get_parent=lambda: {"content": {"allow_stdin": allow_stdin}}),
        display_pub=SimpleNamespace(publish=lambda data, **_: published.append(set(data))),
    )
    ShellPublisher(shell).publish({"text/plain": "x", MIME_TYPE: {}}, {}, "nbc-1", False)
    assert published == [expected]
