"""How output of many nodes becomes displays: text, colours, rich outputs, clearing, and the limits."""

import pytest

from notebook_cluster.magics.display import terminal as ansi
from notebook_cluster.magics.display.output import CellDisplay
from notebook_cluster.magics.display.terminal import LineBuffer
from notebook_cluster.protocol.views import Output


class Page:
    """A frontend: keeps displays in order of appearance and applies changes."""

    def __init__(self, live=True):
        self.live = live
        self.displays = {}
        self.messages = []

    def begin(self):
        pass

    def publish(self, data, metadata, display_id, update):
        known = display_id in self.displays
        assert known == update or (update and not display_id.startswith("nbc-"))
        self.messages.append((display_id, data))
        if not update or display_id in self.displays:
            self.displays[display_id] = data

    @property
    def plain(self):
        return [data.get("text/plain", "") for data in self.displays.values()]

    @property
    def bytes(self):
        return sum(len(str(value)) for _, data in self.messages for value in data.values())


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Screen:
    """A CellDisplay on a page, and a clock that the test moves."""

    def __init__(self, live=True):
        self.page, self.clock = Page(live), Clock()
        self.display = CellDisplay(self.page, "digits", self.clock)

    def put(self, node, kind, rank=None, **content):
        rank = {"mini": 0, "desk": 1}.get(node, rank)
        self.display.add([Output(node=node, rank=rank, kind=kind, content=content)])

    def text(self, node, text, rank=None):
        self.put(node, "stream", rank, name="stdout", text=text)

    def image(self, node, data="aGk=", display_id=None, kind="display_data"):
        transient = {"transient": {"display_id": display_id}} if display_id else {}
        self.put(node, kind, data={"image/png": data, "text/plain": "<Figure>"}, metadata={}, **transient)

    def run(self, seconds, every=None):
        """Let time pass as the waiting main thread does; ``every`` is called every 10 ms."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            if every is not None:
                every()
            due = self.display.due()
            if due is not None and due <= 0:
                self.display.flush()
            self.clock.now += 0.01

    def finish(self):
        self.display.finish()
        return self.page.plain


# ---- text as a terminal shows it


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (["a\nb\n"], "a\nb"),
        (["a", "b\n", "c"], "ab\nc"),
        (["10%\r20%\r30%\n"], "30%"),
        (["long line\rab"], "abng line"),
        (["a\r\nb\r\n"], "a\nb"),
        (["a\r", "\nb"], "a\nb"),
        (["abc\b\bX"], "aXc"),
        (["1\n2\x1b[A\rone"], "one\n2"),
        (["first\nsecond\n\x1b[2A\rFIRST\n\n"], "FIRST\nsecond"),
        (["old text\r\x1b[Knew"], "new"),
        (["\x1b[31", "mred\x1b[0m"], "\x1b[31mred\x1b[0m"),
        (["\x1b[?25la\x1b[?25h"], "a"),
        (["\x1b[32m 10%\x1b[0m\r\x1b[32m 20%\x1b[0m"], "\x1b[32m 20%\x1b[0m"),
        (["\n\nx"], "\n\nx"),
    ],
)
def test_line_buffer(written, shown):
    buffer = LineBuffer()
    for text in written:
        buffer.write(text)
    assert buffer.render(10_000) == (shown, True)


def test_long_text_keeps_its_beginning_and_its_end_and_counts_the_rest():
    buffer = LineBuffer()
    for number in range(50_000):
        buffer.write(f"line {number}\n")
    text, whole = buffer.render(1000)
    lines = text.split("\n")
    marker = next(index for index, line in enumerate(lines) if "folded" in line)
    assert not whole
    assert lines[0] == "line 0"
    assert lines[-1] == "line 49999"
    assert lines[marker] == f"... {50_000 - (len(lines) - 1):,} lines folded ..."
    assert len(text) < 1100


def test_while_running_the_end_is_shown():
    buffer = LineBuffer()
    buffer.write("".join(f"{number}\n" for number in range(1000)))
    assert buffer.render(30, head=False)[0].split("\n")[-1] == "999"
    assert buffer.render(30, head=False)[0].startswith("... 9")


def test_a_line_without_an_end_does_not_grow_without_bound():
    buffer = LineBuffer()
    for _ in range(1000):
        buffer.write("x" * 1000)
    text = buffer.render(100_000)[0]
    assert len(text) < 10_000
    assert text.count("characters folded") == 1
    folded = int(text.split("... ")[1].split(" ")[0].replace(",", ""))
    assert folded + text.count("x") == 1_000_000


# ---- colours


def test_html_is_escaped_inside_and_outside_colours():
    html = ansi.to_html("<b>\x1b[31m<script>&\x1b[0m</b>")
    assert html == '&lt;b&gt;<span style="color:#e75c58">&lt;script&gt;&amp;</span>&lt;/b&gt;'


@pytest.mark.parametrize(
    ("codes", "style"),
    [
        ("1;34", "font-weight:bold;color:#208ffb"),
        ("91", "color:#b22b31"),
        ("38;5;196", "color:rgb(255,0,0)"),
        ("48;2;1;2;300", "background-color:rgb(1,2,255)"),
        ("38;5;244", "color:rgb(128,128,128)"),
    ],
)
def test_colour_codes(codes, style):
    assert ansi.to_html(f"\x1b[{codes}mx") == f'<span style="{style}">x</span>'


@pytest.mark.parametrize("codes", ["38", "38;5", "38;2;1", "999999999999", "", ":::"])
def test_cut_off_colour_codes_do_no_harm(codes):
    assert ansi.to_html(f"\x1b[{codes}mx").endswith(("x", "x</span>"))


def test_plain_text_has_no_escapes():
    assert ansi.without_escapes("\x1b[1;31mred\x1b[0m\ttab\x07\n") == "red\ttab\n"


# ---- the text of all nodes at one place is one display


def test_results_of_all_nodes_are_published_once_in_rank_order():
    screen = Screen()
    for node, value in (("desk", 3), ("mini", 2)):
        screen.put(node, "execute_result", data={"text/plain": str(value)}, metadata={})
    assert screen.finish() == ["[mini · rank 0]\nOut: 2\n[desk · rank 1]\nOut: 3"]
    assert len(screen.page.messages) == 1


def test_what_all_nodes_wrote_is_shown_once():
    screen = Screen()
    for node in ("desk", "mini"):
        screen.text(node, "ready\n")
    assert screen.finish() == ["[all 2 nodes]\nready"]


SIX = ("air", "box", "den", "mac", "pro", "zoe")


def six_nodes(*, odd):
    """Six nodes print the same row, the last one ``odd``."""
    screen = Screen()
    for rank, node in enumerate(SIX):
        screen.put(node, "stream", rank, name="stdout", text=odd if node == "zoe" else "epoch 3 loss 0.25\n")
    return screen


def test_what_most_nodes_wrote_is_one_block_with_their_names():
    shown = six_nodes(odd="epoch 3 loss nan\n").finish()
    assert shown == ["[5 of 6 nodes: air, box, den, mac, pro]\nepoch 3 loss 0.25\n[zoe · rank 5]\nepoch 3 loss nan"]


def test_words_that_differ_from_most_nodes_are_marked():
    screen = six_nodes(odd="epoch 3 loss nan\n")
    screen.finish()
    (bundle,) = screen.page.displays.values()
    assert "epoch 3 loss <mark" in bundle["text/html"]
    assert bundle["text/html"].count("<mark") == 1
    assert ">nan</mark>" in bundle["text/html"]


def test_marked_words_are_escaped():
    screen = six_nodes(odd="epoch 3 loss <img src=x onerror=alert(1)>\n")
    screen.finish()
    (bundle,) = screen.page.displays.values()
    assert "<img" not in bundle["text/html"]


def test_a_silent_node_is_counted():
    screen = Screen()
    screen.display.expect(3)
    for node in ("desk", "mini"):
        screen.text(node, "ready\n")
    assert screen.finish() == ["[2 of 3 nodes: mini, desk]\nready"]


def test_a_node_that_is_a_little_behind_counts_as_the_same_while_the_cell_runs():
    screen = Screen()
    for step in range(3):
        screen.text("mini", f"step {step}\n")
    screen.text("desk", "step 0\nst")
    screen.run(0.5)
    assert screen.page.plain == ["[all 2 nodes]\nstep 0\nstep 1\nstep 2"]
    assert screen.finish() == ["[mini · rank 0]\nstep 0\nstep 1\nstep 2\n[desk · rank 1]\nstep 0\nst"]


def test_a_node_that_begins_to_differ_gets_a_block_of_its_own():
    screen = Screen()
    for node in ("desk", "mini"):
        screen.text(node, "start\n")
    screen.run(0.5)
    screen.text("mini", "a\n")
    screen.text("desk", "b\n")
    screen.run(0.5)
    assert screen.page.plain == ["[mini · rank 0]\nstart\na\n[desk · rank 1]\nstart\nb"]


def test_progress_bars_that_ended_alike_are_folded_at_the_end():
    screen = Screen()
    screen.text("mini", " 10%\r 50%\r100%\n")
    screen.text("desk", " 30%\r100%\n")
    assert screen.finish() == ["[all 2 nodes]\n100%"]


def test_the_same_traceback_of_several_nodes_is_shown_once():
    screen = Screen()
    for node in ("desk", "mini"):
        screen.put(node, "error", ename="NameError", evalue="x", traceback=["Traceback", "NameError: x"])
    assert screen.finish() == ["[all 2 nodes]\nTraceback\nNameError: x"]


def test_texts_of_many_nodes_that_differ_are_spread_over_displays():
    screen = Screen()
    for rank in range(40):
        screen.text(f"node{rank:02d}", f"node {rank} " + "x" * 6000 + "\n", rank)
    shown = screen.finish()
    assert len(shown) > 1
    assert all(sum(map(len, data.values())) <= 64 * 1024 for data in screen.page.displays.values())
    assert [f"node {rank} " in "".join(shown) for rank in range(40)] == [True] * 40


def test_the_bundle_has_html_with_the_label_and_escaped_text():
    screen = Screen()
    screen.text("mini", "<img src=x onerror=alert(1)>\n")
    screen.finish()
    (bundle,) = screen.page.displays.values()
    assert "mini · rank 0" in bundle["text/html"]
    assert "<img" not in bundle["text/html"]
    assert set(bundle) == {"text/plain", "text/html"}


@pytest.mark.parametrize(("rows", "scrolled"), [(20, False), (200, True)])
def test_only_long_text_of_a_node_scrolls_by_itself(rows, scrolled):
    screen = Screen()
    screen.text("mini", "row\n" * rows)
    screen.finish()
    (bundle,) = screen.page.displays.values()
    assert ("max-height" in bundle["text/html"]) == scrolled
    assert bundle["text/plain"].count("row") == rows


def test_a_first_output_is_shown_within_the_gathering_time():
    screen = Screen()
    screen.text("mini", "epoch 1\n")
    assert screen.display.due() <= 0.011
    screen.run(0.05)
    assert screen.page.plain == ["[mini · rank 0]\nepoch 1"]


def test_later_text_changes_the_same_display():
    screen = Screen()
    screen.text("mini", "1\n")
    screen.run(0.5)
    screen.text("mini", "2\n")
    assert screen.finish() == ["[mini · rank 0]\n1\n2"]


def test_nothing_more_is_published_at_the_end_when_all_is_shown():
    screen = Screen()
    screen.text("mini", "1\n")
    screen.run(0.5)
    screen.finish()
    assert len(screen.page.messages) == 1


def test_an_error_begins_on_a_line_of_its_own():
    screen = Screen()
    screen.text("mini", "50%")
    screen.put("mini", "error", ename="ValueError", evalue="bad", traceback=["\x1b[31mValueError\x1b[0m: bad"])
    assert screen.finish() == ["[mini · rank 0]\n50%\nValueError: bad"]


def test_a_result_of_several_lines_begins_below_its_mark():
    screen = Screen()
    screen.put("mini", "execute_result", data={"text/plain": "[[1],\n [2]]"}, metadata={})
    assert screen.finish() == ["[mini · rank 0]\nOut:\n[[1],\n [2]]"]


def test_a_note_is_shown_once_with_the_clusters_name():
    screen = Screen()
    for _ in range(2):
        screen.display.note("waiting for desk: lost")
    assert screen.finish() == ["[cluster digits]\nwaiting for desk: lost"]


def test_without_a_live_frontend_everything_comes_at_the_end():
    screen = Screen(live=False)
    screen.text("mini", "a\n")
    assert screen.display.due() is None
    assert screen.finish() == ["[mini · rank 0]\na"]


# ---- rich outputs


def test_a_rich_output_stands_behind_its_nodes_label_in_order():
    screen = Screen()
    screen.image("desk")
    screen.text("mini", "before\n")
    screen.image("mini")
    screen.text("mini", "after\n")
    shown = screen.finish()
    assert shown == [
        "[mini · rank 0]\nbefore",
        "[desk · rank 1]",
        "<Figure>",
        "[mini · rank 0]",
        "<Figure>",
        "[mini · rank 0]\nafter",
    ]


def test_update_display_changes_only_the_nodes_own_display():
    screen = Screen()
    for node in ("mini", "desk"):
        screen.image(node, "one", display_id="figure")
    screen.run(0.5)
    screen.image("desk", "two", display_id="figure", kind="update_display_data")
    screen.finish()
    assert screen.page.displays["mini/figure"]["image/png"] == "one"
    assert screen.page.displays["desk/figure"]["image/png"] == "two"


def test_many_updates_of_one_display_become_few():
    screen = Screen()
    screen.image("mini", "0", display_id="figure")
    screen.run(
        2.0, every=lambda: screen.image("mini", str(screen.clock.now), display_id="figure", kind="update_display_data")
    )
    assert len(screen.page.messages) <= 10


def test_a_display_of_an_earlier_cell_can_be_changed():
    screen = Screen()
    screen.page.displays["mini/figure"] = {"image/png": "old"}
    screen.image("mini", "new", display_id="figure", kind="update_display_data")
    screen.finish()
    assert screen.page.displays["mini/figure"]["image/png"] == "new"


def test_clear_output_empties_only_that_node():
    screen = Screen()
    for node in ("mini", "desk"):
        screen.text(node, "old\n")
        screen.image(node)
    screen.run(0.5)
    screen.put("mini", "clear_output", wait=False)
    screen.text("mini", "new\n")
    assert screen.finish() == [
        "[mini · rank 0]\nnew\n[desk · rank 1]\nold",
        "",
        "",
        "[desk · rank 1]",
        "<Figure>",
    ]


def test_an_animation_with_clear_output_stays_in_place():
    screen = Screen()
    for frame in range(5):
        screen.put("mini", "clear_output", wait=True)
        screen.image("mini", str(frame))
        screen.run(0.5)
    screen.finish()
    label, figure = screen.page.displays.values()
    assert label["text/plain"] == "[mini · rank 0]"
    assert figure["image/png"] == "4"


def test_clear_output_with_wait_keeps_the_old_output_until_there_is_new():
    screen = Screen()
    screen.text("mini", "old\n")
    screen.put("mini", "clear_output", wait=True)
    assert screen.finish() == ["[mini · rank 0]\nold"]


def test_text_that_takes_the_place_of_a_figure_has_one_label():
    screen = Screen()
    screen.image("mini")
    screen.run(0.5)
    screen.put("mini", "clear_output", wait=True)
    screen.text("mini", "done\n")
    assert screen.finish() == ["", "", "[mini · rank 0]\ndone"]


def test_too_many_rich_outputs_of_a_node_are_left_out_visibly():
    screen = Screen()
    for _ in range(150):
        screen.image("mini")
    shown = screen.finish()
    assert shown.count("<Figure>") == 100
    assert "more than 100 rich outputs" in shown[-1]


# ---- limits


def test_sixty_noisy_nodes_stay_below_the_limits_and_all_are_shown():
    screen = Screen()
    nodes = [f"node{number}" for number in range(60)]

    def noise():
        for rank, node in enumerate(nodes):
            screen.text(node, f"a line of {node} with <tags> & \x1b[31mcolours\x1b[0m\n" * 20, rank)

    screen.run(5.0, every=noise)
    assert len(screen.page.messages) <= 200 * 5 + 50
    assert screen.page.bytes <= 300_000 * 5 + 100_000
    shown = "".join(screen.page.plain)
    assert all(f"[{node} · rank {rank}]" in shown or f"[{node}]" in shown for rank, node in enumerate(nodes))


def test_one_update_is_at_most_64_kib_even_when_colours_blow_it_up():
    screen = Screen()
    for _ in range(200):
        screen.text("mini", "\x1b[31m<\x1b[32m>\x1b[0m" * 100 + "\n")
    screen.run(1.0)
    screen.finish()
    assert max(sum(map(len, data.values())) for _, data in screen.page.messages) <= 64 * 1024
    assert "folded" in screen.page.plain[0]


def test_text_folded_while_running_is_shown_with_its_beginning_at_the_end():
    screen = Screen()
    screen.run(1.0, every=lambda: screen.text("mini", f"at {screen.clock.now:.2f} " + "x" * 2000 + "\n"))
    assert screen.page.plain[0].split("\n")[1].startswith("... ")
    assert screen.finish()[0].split("\n")[1].startswith("at 1000.00")


def test_hundreds_of_rich_outputs_are_spread_over_time():
    screen = Screen()
    for rank in range(8):
        for _ in range(50):
            screen.put(f"node{rank}", "display_data", rank, data={"text/html": "<b>x</b>"}, metadata={})
    screen.run(0.2)
    assert len(screen.page.messages) <= 55
    screen.run(10.0)
    assert len([text for text in screen.page.displays.values() if "<b>" in text["text/html"]]) == 400
