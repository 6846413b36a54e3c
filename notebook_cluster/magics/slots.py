"""What one node shows below a cell: blocks of text and rich outputs in order, each in a display of its own."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any

from notebook_cluster.magics import ansi
from notebook_cluster.magics.line_buffer import LineBuffer
from notebook_cluster.widgets.palette import rank_colour

MOST_RICH_OUTPUTS = 100
"""Images and tables of one node below one cell; the rest is counted in the node's text."""
MOST_BUNDLE_CHARACTERS = 64 * 1024
MOST_TEXT_CHARACTERS = 24 * 1024
"""Text is in a bundle twice, as plain text and as HTML."""
_PRE = (
    '<pre style="margin:0;padding:0;flex:none;white-space:pre-wrap;line-height:1.35;'
    'font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px)">'
)
_LONG_ROWS = 40
"""Text of more rows gets a scroll bar of its own, so that one node's output does not push the others' off the page."""
_SCROLLED = '<div style="max-height:36em;overflow:auto;display:flex;flex-direction:column-reverse">'
"""Reversed columns begin at their end: while a cell runs the newest row is seen, whenever the display is replaced."""

Bundle = dict[str, Any]


@dataclass
class Slot:
    """One display on the page. Text while ``buffer`` is set, else the rich output ``data``."""

    display_id: str
    reusable: bool
    """The id is ours, so that what comes after clear_output can take this place."""
    buffer: LineBuffer | None = None
    data: Bundle = field(default_factory=dict)
    metadata: Bundle = field(default_factory=dict)
    dirty: bool = True
    on_page: bool = False
    blank: bool = True
    """Nothing to see there (yet, or since clear_output)."""
    labelled: bool = False
    """A display for the node's label was published in front of it."""
    label_shown: bool = False
    whole: bool = True
    """What is on the page is not shortened."""
    changed_at: float = 0.0
    """When it was last published."""

    @property
    def label_id(self) -> str:
        return f"{self.display_id}/label"


class NodeOutput:
    """The slots of one node below one cell, and what fills them."""

    def __init__(self, node: str, rank: int | None, token: str, *, label: str = "") -> None:
        self.node = node
        self.rank = rank
        self.label = label or (node if rank is None else f"{node} · rank {rank}")
        self._token = token
        self._made = 0
        self._slots: list[Slot] = []
        self._used = 0
        self._clear_at_next = False
        self._rich = 0

    def write(self, text: str, *, own_line: bool = False) -> None:
        """Add text at the node's cursor; with ``own_line`` on a new line."""
        self._clear_if_waiting()
        slot = self._slots[self._used - 1] if self._used else None
        if slot is None or slot.buffer is None:
            slot = self._take("")
            slot.buffer = LineBuffer()
        assert slot.buffer is not None
        if own_line and not slot.buffer.at_line_start:
            slot.buffer.write("\n")
        slot.buffer.write(text)
        slot.dirty = True

    def show(self, data: Bundle, metadata: Bundle, display_id: str) -> None:
        """Add a rich output after what is there. ``display_id``: the node's own one, or empty."""
        self._clear_if_waiting()
        self._rich += 1
        if self._rich > MOST_RICH_OUTPUTS:
            if self._rich == MOST_RICH_OUTPUTS + 1:
                self.write(f"... more than {MOST_RICH_OUTPUTS} rich outputs in one cell: the rest is left out ...\n")
            return
        slot = self._take(display_id)
        slot.buffer, slot.data, slot.metadata, slot.dirty = None, data, metadata, True

    def update(self, data: Bundle, metadata: Bundle, display_id: str) -> bool:
        """Change the outputs shown under the node's ``display_id``; False when there is none in this cell."""
        found = [slot for slot in self._slots[: self._used] if slot.display_id == self.public_id(display_id)]
        for slot in found:
            slot.data, slot.metadata, slot.dirty = data, metadata, True
        return bool(found)

    def clear(self, wait: bool) -> None:
        """Take everything of the node away, now or (``wait``) when its next output comes."""
        self._clear_at_next = wait
        if not wait:
            self._clear()

    def public_id(self, display_id: str) -> str:
        """The node's ``display_id`` in the notebook: nodes run the same code and repeat their ids."""
        return f"{self.node}/{display_id}"

    def dirty(self) -> Iterator[Slot]:
        """Slots whose place on the page is out of date, in order; those to be blanked last."""
        for slot in self._slots[: self._used]:
            if slot.dirty:
                yield slot
        for slot in self._slots[self._used :]:
            if slot.on_page and not slot.blank:
                slot.buffer, slot.data, slot.metadata = None, {}, {}
                yield slot

    def shortened(self) -> Iterator[Slot]:
        """Text slots that show only their end."""
        return (slot for slot in self._slots[: self._used] if slot.on_page and not slot.whole)

    def _take(self, display_id: str) -> Slot:
        """The next free slot: the place of something cleared, or a new one."""
        free = self._slots[self._used] if self._used < len(self._slots) else None
        wanted = self.public_id(display_id) if display_id else ""
        if free is None or (free.display_id != wanted if wanted else not free.reusable):
            self._made += 1
            free = Slot(wanted or f"{self._token}/{self.node}/{self._made}", reusable=not wanted)
            self._slots.insert(self._used, free)
        self._used += 1
        free.whole = True
        return free

    def _clear_if_waiting(self) -> None:
        if self._clear_at_next:
            self._clear_at_next = False
            self._clear()

    def _clear(self) -> None:
        self._used = 0
        self._rich = 0


def text_bundle(output: NodeOutput, buffer: LineBuffer, limit: int, *, head: bool) -> tuple[Bundle, bool]:
    """The node's label and its text as plain text and HTML, at most 64 K characters together; and whether it is all."""
    limit = min(limit, MOST_TEXT_CHARACTERS)
    while True:
        text, whole = buffer.render(limit, head=head)
        body = f"{_PRE}{ansi.to_html(text)}</pre>"
        if text.count("\n") >= _LONG_ROWS:
            body = f"{_SCROLLED}{body}</div>"
        bundle = {
            "text/plain": f"[{output.label}]\n{ansi.without_escapes(text)}",
            "text/html": _html(output, body),
        }
        if len(bundle["text/plain"]) + len(bundle["text/html"]) <= MOST_BUNDLE_CHARACTERS or limit < 1024:
            return bundle, whole
        limit //= 2


def label_bundle(output: NodeOutput) -> Bundle:
    """The node's label alone, to stand in front of a rich output."""
    return {"text/plain": f"[{output.label}]", "text/html": _html(output, "")}


def _html(output: NodeOutput, body: str) -> str:
    return (
        f'<div style="border-left:3px solid {rank_colour(output.rank)};padding-left:8px">'
        '<div style="font-size:85%;font-weight:600;color:var(--jp-ui-font-color2,#666)">'
        f"{escape(output.label)}</div>{body}</div>"
    )
