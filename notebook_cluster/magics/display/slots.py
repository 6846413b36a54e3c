"""What one node shows below a cell: blocks of text and rich outputs in order, and whether two nodes wrote the same."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash

from notebook_cluster.magics.display.terminal import LineBuffer

_LINES_REMEMBERED = 256
_LINES_LOOKED_AT = 64


class Written:
    """A running hash (xxh3, 128 bits) of a text, and its values after the last line ends.

    Attributes:
        length: characters so far.
    """

    def __init__(self) -> None:
        self.length = 0
        self._hash = xxhash.xxh3_128()
        self._lines: OrderedDict[int, bytes] = OrderedDict()

    def add(self, text: str) -> None:
        """``text`` follows. How it is cut into pieces makes no difference to the hash."""
        *lines, rest = text.split("\n", _LINES_LOOKED_AT)
        for line in lines:
            self._feed(line + "\n")
            self._remember()
        if "\n" in rest:
            # Many lines at once: only the last place between them is worth its price.
            whole, _, rest = rest.rpartition("\n")
            self._feed(whole + "\n")
            self._remember()
        self._feed(rest)

    def is_equal(self, other: "Written") -> bool:
        """True when both texts are the same."""
        return self.length == other.length and self._hash.digest() == other._hash.digest()

    def agrees(self, other: "Written") -> bool:
        """True when the shorter text, up to its last line end, is how the longer one begins (as far as remembered)."""
        behind, ahead = (self, other) if self.length <= other.length else (other, self)
        if not behind._lines:
            return behind.length == 0
        place, digest = next(reversed(behind._lines.items()))
        return ahead._lines.get(place) == digest

    def _feed(self, text: str) -> None:
        if text:
            self._hash.update(text.encode("utf-8", "surrogatepass"))
            self.length += len(text)

    def _remember(self) -> None:
        self._lines[self.length] = self._hash.digest()
        if len(self._lines) > _LINES_REMEMBERED:
            self._lines.popitem(last=False)


MOST_RICH_OUTPUTS = 100
"""Images and tables of one node below one cell; the rest is counted in the node's text."""
Bundle = dict[str, Any]
_NOTHING: Bundle = {"text/plain": ""}
"""What a node shows in place of a display that is to go."""


@dataclass
class Slot:
    """Text while ``buffer`` is set, which is shown together with that of other nodes at the same place; else the rich
    output ``data`` in a display of its own."""

    display_id: str
    reusable: bool
    """The id is ours, so that what comes after clear_output can take this place."""
    buffer: LineBuffer | None = None
    written: Written = field(default_factory=Written)
    data: Bundle = field(default_factory=dict)
    metadata: Bundle = field(default_factory=dict)
    plain: str = ""
    """The text that stands for the rich output; ``data`` is given away when it is published."""
    dirty: bool = True
    on_page: bool = False
    blank: bool = True
    """Nothing to see there (yet, or since clear_output)."""
    labelled: bool = False
    """A display for the node's label was published in front of it."""
    label_shown: bool = False
    changed_at: float = 0.0
    """When it was last published."""

    @property
    def label_id(self) -> str:
        return f"{self.display_id}/label"


class NodeOutput:
    """The slots of one node below one cell, and what fills them."""

    def __init__(
        self, node: str, rank: int | None, token: str, *, place: int | None = None, label: str = "",
        whole_text: str = "",
    ) -> None:  # fmt: skip
        self.node = node
        self.place = place
        self._whole_text = whole_text
        self.rank = rank
        self.label = label or (node if rank is None else f"{node} · rank {rank}")
        self._token = token
        self._made = 0
        self._slots: list[Slot] = []
        self._used = 0
        self._clear_at_next = False
        self._rich = 0

    @property
    def order(self) -> tuple[bool, int, str]:
        """By this, nodes stand in rank order, those without a rank behind."""
        return self.rank is None, self.rank or 0, self.node

    def write(self, text: str, *, own_line: bool = False, left_out: int = 0) -> None:
        """Add text at the node's cursor; with ``own_line`` on a new line. ``left_out``: it stands for so many lines."""
        self._clear_if_waiting()
        slot = self._slots[self._used - 1] if self._used else None
        if slot is None or slot.buffer is None:
            slot = self._take("")
            slot.buffer, slot.written = LineBuffer(self._whole_text), Written()
        assert slot.buffer is not None
        if own_line and not slot.buffer.at_line_start:
            text = "\n" + text
        if left_out:
            slot.buffer.write_left_out(text, left_out)
        else:
            slot.buffer.write(text)
        slot.written.add(text)
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
        slot.plain = str(data.get("text/plain", ""))

    def update(self, data: Bundle, metadata: Bundle, display_id: str) -> bool:
        """Change the outputs shown under the node's ``display_id``; False when there is none in this cell."""
        found = [slot for slot in self._slots[: self._used] if slot.display_id == self.public_id(display_id)]
        if data == _NOTHING:
            data = {}
        for slot in found:
            slot.data, slot.metadata, slot.dirty = data, metadata, True
            slot.plain = str(data.get("text/plain", ""))
        return bool(found)

    def clear(self, wait: bool) -> None:
        """Take everything of the node away, now or (``wait``) when its next output comes."""
        self._clear_at_next = wait
        if not wait:
            self._clear()

    def public_id(self, display_id: str) -> str:
        """The node's ``display_id`` in the notebook: nodes run the same code and repeat their ids."""
        return f"{self.node}/{display_id}"

    def text_at(self, place: int) -> Slot | None:
        """The text at ``place``, counted from 0 over text and rich outputs; None when there is none."""
        slot = self._slots[place] if place < self._used else None
        return slot if slot is not None and slot.buffer is not None else None

    def text(self, limit: int) -> str:
        """Everything as text, of long text the beginning and the end."""
        used = self._slots[: self._used]
        parts = [slot.plain if slot.buffer is None else slot.buffer.render(limit, head=True)[0] for slot in used]
        return "\n".join(part.removesuffix("\n") for part in parts if part)

    @property
    def places(self) -> int:
        """How many outputs there are now."""
        return self._used

    def dirty_displays(self) -> Iterator[tuple[int, Slot]]:
        """(place, slot) of rich outputs whose display is out of date; those to be blanked last."""
        for place, slot in enumerate(self._slots[: self._used]):
            if slot.buffer is None and slot.dirty:
                yield place, slot
        for place, slot in enumerate(self._slots):
            unused = place >= self._used or slot.buffer is not None
            if unused and slot.on_page and not slot.blank:
                slot.data, slot.metadata = {}, {}
                yield place, slot

    def _take(self, display_id: str) -> Slot:
        """The next free slot: the place of something cleared, or a new one."""
        free = self._slots[self._used] if self._used < len(self._slots) else None
        wanted = self.public_id(display_id) if display_id else ""
        if free is None or (free.display_id != wanted if wanted else not free.reusable):
            self._made += 1
            free = Slot(wanted or f"{self._token}/{self.node}/{self._made}", reusable=not wanted)
            self._slots.insert(self._used, free)
        self._used += 1
        return free

    def _clear_if_waiting(self) -> None:
        if self._clear_at_next:
            self._clear_at_next = False
            self._clear()

    def _clear(self) -> None:
        self._used = 0
        self._rich = 0
