"""Output of all nodes of a running cell, shown within what a Jupyter server lets through.

jupyter_server drops what comes faster than 1,000 messages a second. So the text of all nodes at one place (before,
between and after rich outputs) is one display that is changed at most four times a second, and everything together
stays under 200 messages and about 300 KB a second.
Everything is published by the thread that calls :meth:`CellDisplay.flush`: the notebook's waiting main thread.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence

import msgspec

from notebook_cluster.magics.display import terminal
from notebook_cluster.magics.display.folding import (
    MOST_TEXT_CHARACTERS,
    Member,
    Tabs,
    blocks_of,
    label_bundle,
    pages_of,
)
from notebook_cluster.magics.display.publishing import Publisher
from notebook_cluster.magics.display.slots import Bundle, NodeOutput, Slot
from notebook_cluster.protocol.views import LINES_LEFT_OUT, Output

FLUSH_SECONDS = 0.25
GATHER_SECONDS = 0.01
"""A first output waits this long for those of other nodes, or for the cell's end."""
MOST_MESSAGES = 50
"""Per flush: 200 a second."""
BYTES_PER_SECOND = 300_000
_LONGEST_PAUSE = 3.0
_MOST_EARLIER = 500
_BLANK: Bundle = {"text/plain": ""}


class _TextRow:
    """The texts of all nodes at one place, and the displays in which they are."""

    def __init__(self, token: str, place: int) -> None:
        self._token = token
        self._place = place
        self.members: list[Member] = []
        self._states: dict[str, str] = {}
        """Of the members, as they are on the page."""
        self.pages = 0
        """Displays on the page."""
        self.shown = 0
        """Those of them that are not blank."""
        self.whole = True
        """What is there is also its final form, unless something is added."""
        self.changed_at = 0.0

    def page_id(self, number: int) -> str:
        return f"{self._token}/{self._place}/{number}"

    def is_behind(self, states: Mapping[str, str]) -> bool:
        """Its tabs are on the page with other states."""
        changed = (self._states.get(node.node) != states.get(node.node) for node, _ in self.members)
        return len(self.members) > 1 and any(changed)

    def tabs(self, states: Mapping[str, str]) -> Tabs:
        """The tabs to publish it with."""
        self._states = {node.node: states[node.node] for node, _ in self.members if node.node in states}
        return Tabs(self._token, self._place, self._states)


_Item = tuple[float, int, int, _TextRow | tuple[NodeOutput, Slot]]
"""(last published, place, rank, what): the order in which changes are published."""


class CellDisplay:
    """Shows the outputs of one cell. Call :meth:`flush` when :meth:`due` says 0, and :meth:`finish` at the end."""

    def __init__(self, publisher: Publisher, cluster: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._publisher = publisher
        self._clock = clock
        self.text_file: Callable[[str], str] = lambda node: ""
        """Path of the file in which all text of a node in this cell is."""
        # Not the cell's number: %cluster attach may show the same cell again in the same notebook.
        self._token = f"nbc-{uuid.uuid4().hex[:12]}"
        self._nodes: dict[str, NodeOutput] = {}
        self._rows: list[_TextRow] = []
        self._notes = NodeOutput("", None, f"{self._token}/notes", label=f"cluster {cluster}")
        self._note_row = _TextRow(f"{self._token}/notes", 0)
        self._last_note = ""
        self._running = 0
        self._states: dict[str, str] = {}
        self._earlier: dict[str, tuple[Bundle, Bundle]] = {}
        self._last_shown: NodeOutput | None = None
        self._dirty_since: float | None = None
        self._next_flush = 0.0

    def add(self, outputs: Sequence[Output]) -> None:
        """Take in outputs, in order; nothing is published yet."""
        for output in outputs:
            self._take(output)
        if outputs:
            self._touch()

    def note(self, text: str) -> None:
        """Show a line about the cell itself (what it waits for); the same line twice in a row only once."""
        if text and text != self._last_note:
            self._last_note = text
            self._notes.write(text + "\n")
            self._touch()

    def expect(self, nodes: int) -> None:
        """So many nodes run the cell: ``5 of 6 nodes`` counts those that are silent too."""
        self._running = max(self._running, nodes)

    def states(self, states: Mapping[str, str]) -> None:
        """What nodes do or how they ended (node -> status): shown in the tabs of the nodes."""
        self._states.update(states)
        if any(row.is_behind(self._states) for row in self._rows):
            self._touch()

    def label(self, node: str) -> str:
        """``mini · rank 1`` for a node that has shown something, else its name."""
        return self._nodes[node].label if node in self._nodes else node

    def nodes(self) -> dict[str, int | None]:
        """Rank of each node that has shown something, in rank order."""
        return {node.node: node.rank for node in self._ranked()}

    def text_of(self, node: str) -> str:
        """What ``node`` has shown, as plain text; of long text the beginning and the end."""
        return terminal.without_escapes(self._nodes[node].text(MOST_TEXT_CHARACTERS)) if node in self._nodes else ""

    def due(self) -> float | None:
        """Seconds until the next flush is wanted; None when there is nothing to show."""
        if self._dirty_since is None or not self._publisher.live:
            return None
        return max(0.0, max(self._next_flush, self._dirty_since + GATHER_SECONDS) - self._clock())

    def flush(self) -> None:
        """Publish what changed, within the limits; of long text its end."""
        now = self._clock()
        self._publisher.begin()
        dirty = self._dirty()
        texts = sum(1 for item in dirty if isinstance(item[3], _TextRow)) or 1
        limit = max(1024, int(BYTES_PER_SECOND * FLUSH_SECONDS) // (2 * texts))
        size = 0
        room = MOST_MESSAGES
        while dirty and room > 0:
            what = dirty.pop(0)[3]
            if isinstance(what, _TextRow):
                sent, messages = self._publish_row(what, limit, final=False)
            else:
                # A label may stand in front of a rich output.
                sent, messages = self._publish_rich(*what), 2
            size, room = size + sent, room - messages
        size += self._publish_earlier(max(0, room))
        self._dirty_since = now if dirty or self._earlier else None
        self._next_flush = now + min(_LONGEST_PAUSE, max(FLUSH_SECONDS, size / BYTES_PER_SECOND))

    def finish(self) -> None:
        """Publish everything in its final form: of long text its beginning and its end."""
        self._publisher.begin()
        for count, (_, _, _, what) in enumerate(self._dirty(final=True), start=1):
            if isinstance(what, _TextRow):
                self._publish_row(what, MOST_TEXT_CHARACTERS * max(1, len(what.members)), final=True)
            else:
                self._publish_rich(*what)
            if count % 200 == 0:
                time.sleep(FLUSH_SECONDS)  # jupyter_server drops what is over 1,000 messages a second
        self._publish_earlier(len(self._earlier))
        self._dirty_since = None

    def _touch(self) -> None:
        if self._dirty_since is None:
            self._dirty_since = self._clock()

    def _take(self, output: Output) -> None:
        node = self._nodes.get(output.node)
        if node is None:
            file = self.text_file(output.node)
            node = self._nodes[output.node] = NodeOutput(
                output.node, output.rank, self._token, place=output.place, whole_text=file
            )
            self._states.setdefault(output.node, "running")
        content = output.content
        if output.kind == "stream":
            node.write(str(content.get("text", "")), left_out=int(content.get(LINES_LEFT_OUT, 0)))
        elif output.kind == "error":
            node.write("\n".join(map(str, content.get("traceback", ()))) + "\n", own_line=True)
        elif output.kind == "clear_output":
            node.clear(bool(content.get("wait", False)))
        else:
            self._take_data(node, output)

    def _take_data(self, node: NodeOutput, output: Output) -> None:
        content = output.content
        data, metadata = content.get("data") or {}, content.get("metadata") or {}
        display_id = str((content.get("transient") or {}).get("display_id") or "")
        if output.kind == "update_display_data":
            if display_id and not node.update(data, metadata, display_id):
                self._earlier[node.public_id(display_id)] = (data, metadata)
                if len(self._earlier) > _MOST_EARLIER:
                    self._earlier.pop(next(iter(self._earlier)))
        elif set(data) <= {"text/plain"} and not display_id:
            text = str(data.get("text/plain", ""))
            if output.kind == "execute_result":
                text = f"Out:\n{text}" if "\n" in text else f"Out: {text}"
            node.write(text + "\n", own_line=True)
        else:
            node.show(data, metadata, display_id)

    def _ranked(self) -> list[NodeOutput]:
        return sorted(self._nodes.values(), key=lambda node: node.order)

    def _dirty(self, *, final: bool = False) -> list[_Item]:
        """What is to be published: longest not changed first, new ones by place and rank."""
        nodes = self._ranked()
        places = max((node.places for node in nodes), default=0)
        while len(self._rows) < places:
            self._rows.append(_TextRow(self._token, len(self._rows)))
        found: list[_Item] = []
        for place, (row, members) in enumerate(
            [(self._note_row, [self._notes]), *((row, nodes) for row in self._rows)]
        ):
            texts = [(node, slot) for node in members if (slot := node.text_at(max(0, place - 1))) is not None]
            moved = [node for node, _ in texts] != [node for node, _ in row.members]
            row.members = texts
            changed = moved or row.is_behind(self._states) or any(slot.dirty for _, slot in texts)
            if changed or (final and texts and not row.whole):
                found.append((row.changed_at, place - 1, -1, row))
        for rank, node in enumerate(nodes):
            found += [(slot.changed_at, place, rank, (node, slot)) for place, slot in node.dirty_displays()]
        return sorted(found, key=lambda item: item[:3])

    def _publish_row(self, row: _TextRow, limit: int, *, final: bool) -> tuple[int, int]:
        """Bring the displays of one place up to date; returns characters and messages sent."""
        blocks = blocks_of(row.members, limit, final=final)
        pages = pages_of(blocks, max(self._running, len(self._nodes)), row.tabs(self._states))
        in_step = len(blocks) == 1 and len({slot.written.length for _, slot in row.members}) == 1
        row.whole = all(block.whole for block in blocks) and (final or in_step)
        messages = max(len(pages), row.shown)
        for number in range(messages):
            data = pages[number] if number < len(pages) else _BLANK
            self._publisher.publish(data, {}, row.page_id(number), number < row.pages)
        if messages > row.pages:
            self._last_shown = None
        row.pages, row.shown, row.changed_at = max(row.pages, len(pages)), len(pages), self._clock()
        for _, slot in row.members:
            slot.dirty = False
        return sum(map(_size, pages)), messages

    def _publish_rich(self, node: NodeOutput, slot: Slot) -> int:
        """Bring the display of one rich output up to date; returns the characters sent."""
        wanted = slot.buffer is None and bool(slot.data)
        data, metadata = (slot.data or _BLANK, slot.metadata) if wanted else (_BLANK, {})
        self._publish_label(node, slot, wanted=wanted)
        self._publisher.publish(data, metadata, slot.display_id, slot.on_page)
        if not slot.on_page:
            self._last_shown = node
        slot.blank = not wanted
        slot.on_page, slot.changed_at = True, self._clock()
        if slot.buffer is None:
            slot.dirty = False
        slot.data, slot.metadata = {}, {}
        return _size(data)

    def _publish_label(self, node: NodeOutput, slot: Slot, *, wanted: bool) -> None:
        """A rich output has the node's label in a display of its own in front, unless the node's output is there."""
        if slot.labelled:
            if slot.label_shown != wanted:
                self._publisher.publish(label_bundle(node) if wanted else _BLANK, {}, slot.label_id, True)
        elif wanted and not slot.on_page and self._last_shown is not node:
            self._publisher.publish(label_bundle(node), {}, slot.label_id, False)
            slot.labelled = True
        slot.label_shown = slot.labelled and wanted

    def _publish_earlier(self, most: int) -> int:
        """Changes of displays that an earlier cell made."""
        size = 0
        for display_id in list(self._earlier)[:most]:
            data, metadata = self._earlier.pop(display_id)
            self._publisher.publish(data, metadata, display_id, True)
            size += _size(data)
        return size


def _size(data: Bundle) -> int:
    return sum(len(value) if isinstance(value, str) else len(msgspec.json.encode(value)) for value in data.values())
