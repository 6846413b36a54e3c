"""Text of several nodes as few blocks: what is the same is shown once, with the names of the nodes that wrote it.

:class:`Tabs` is what JupyterLab's renderer (``labextension/``) needs to show the blocks as tabs. It stands beside
text/plain and text/html in the same bundle and repeats none of the text: which nodes there are, how they ended, and
which block of text is whose. Frontends that do not know the type show the HTML.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from html import escape
from typing import Any

from notebook_cluster.magics.display import terminal
from notebook_cluster.magics.display.slots import Bundle, NodeOutput, Slot
from notebook_cluster.magics.errors import shortened
from notebook_cluster.security.chart_grammar import NO_TEX
from notebook_cluster.widgets.formatting import node_colour

MIME_TYPE = "application/vnd.notebook-cluster.output+json"
MOST_CHARACTERS = 8192
"""With more nodes than fit in here there are no tabs."""


@dataclass(frozen=True)
class Tabs:
    """Tabs over the texts of one place (``row``) below the cell named ``cell``."""

    cell: str
    row: int
    states: Mapping[str, str] = field(default_factory=dict)
    """Node -> what it does or how it ended, see ``CellView.nodes``."""

    def describe(self, blocks: Sequence[Sequence[NodeOutput]], first: int, count: int, page: int) -> dict[str, Any]:
        """The structure for page ``page`` (from 0), which holds ``count`` of the row's ``blocks`` from ``first`` on.

        ``blocks``: who wrote each block of text. Empty where there is nothing to choose: one node, or far too many.
        """
        nodes = sorted(
            ((output, number) for number, members in enumerate(blocks) for output in members),
            key=lambda pair: pair[0].order,
        )
        if len(nodes) < 2:
            return {}
        described = {
            "version": 1,
            "cell": self.cell,
            "row": self.row,
            "page": page,
            "first": first,
            "count": count,
            "names": [output.node for output, _ in nodes],
            "ranks": [output.rank for output, _ in nodes],
            "states": [self.states.get(output.node, "") for output, _ in nodes],
            "blocks": [number for _, number in nodes],
        }
        return described if len(json.dumps(described)) <= MOST_CHARACTERS else {}


MOST_BUNDLE_CHARACTERS = 64 * 1024
MOST_TEXT_CHARACTERS = 24 * 1024
"""Text is in a bundle twice, as plain text and as HTML."""
_LEAST_CHARACTERS = 400
_MOST_NAMES = 6
_MOST_COMPARED_ROWS = 400
_MOST_COMPARED_CHARACTERS = 2000
_PRE = (
    '<pre style="margin:0;padding:0;flex:none;white-space:pre-wrap;line-height:1.35;'
    'font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px)">'
)
_LONG_ROWS = 40
"""Text of more rows gets a scroll bar of its own, so that one block does not push the others off the page."""
_SCROLLED = '<div style="max-height:36em;overflow:auto;display:flex;flex-direction:column-reverse">'
"""Reversed columns begin at their end: while a cell runs the newest row is seen, whenever the display is replaced."""
_MARK = '<mark style="background:rgba(255,196,0,.35);color:inherit;border-radius:2px">'
_WORDS = re.compile(r"\s+|[\w.+-]+|[^\w\s]")

Member = tuple[NodeOutput, Slot]


@dataclass(frozen=True)
class Block:
    """The text that ``members`` have in common."""

    members: tuple[Member, ...]
    text: str
    whole: bool
    """Nothing of it is folded away."""


def blocks_of(members: Sequence[Member], limit: int, *, final: bool) -> list[Block]:
    """``members`` (in rank order) by what they wrote, each text at most ``limit`` characters in all blocks together.

    While a cell runs (not ``final``) a node that is behind, but has written the same so far, counts as the same: with
    nodes that print in step every look at them would differ otherwise.
    """
    found: list[list[Member]] = []
    for member in members:
        fitting = next((group for group in found if _same(group[0][1], member[1], final)), None)
        if fitting is None:
            found.append([member])
        else:
            fitting.append(member)
    each = max(_LEAST_CHARACTERS, limit // max(1, len(found)))
    blocks = []
    for group in found:
        furthest = max(group, key=lambda member: member[1].written.length)
        assert furthest[1].buffer is not None
        text, whole = furthest[1].buffer.render(min(each, MOST_TEXT_CHARACTERS), head=final)
        blocks.append(Block(tuple(group), text, whole))
    return blocks


def _same(one: Slot, other: Slot, final: bool) -> bool:
    if one.written.is_equal(other.written):
        return True
    if not final:
        return one.written.agrees(other.written)
    # Progress bars write different things on their way to the same line.
    assert one.buffer is not None
    assert other.buffer is not None
    return one.buffer.shows_the_same(other.buffer)


def pages_of(blocks: Sequence[Block], nodes: int, tabs: Tabs) -> list[Bundle]:
    """Bundles of at most 64 K characters that show ``blocks``. ``nodes``: how many run the cell."""
    common = max(blocks, key=lambda block: len(block.members), default=None)
    reference = common if common is not None and len(common.members) > 1 else None
    writers = [[output for output, _ in block.members] for block in blocks]
    room = MOST_BUNDLE_CHARACTERS - len(json.dumps(tabs.describe(writers, 0, len(blocks), len(blocks))))
    pages: list[list[tuple[str, str]]] = []
    size = room
    for block in blocks:
        plain, html = _shown(block, reference, nodes, room)
        size += len(plain) + len(html) + 1
        if size > room:
            pages.append([])
            size = len(plain) + len(html)
        pages[-1].append((plain, html))
    bundles: list[Bundle] = []
    first = 0
    for number, page in enumerate(pages):
        bundle = {"text/plain": "\n".join(plain for plain, _ in page), "text/html": "".join(html for _, html in page)}
        described = tabs.describe(writers, first, len(page), number)
        bundles.append(bundle | ({MIME_TYPE: described} if described else {}))
        first += len(page)
    return bundles


def _shown(block: Block, reference: Block | None, nodes: int, room: int) -> tuple[str, str]:
    """Plain text and HTML of one block, together at most ``room`` characters."""
    title = title_of([output for output, _ in block.members], nodes)
    text = block.text
    while True:
        marked = reference is not None and block is not reference
        inner = marked_html(text, reference.text) if marked and reference is not None else terminal.to_html(text)
        body = f"{_PRE}{inner}</pre>"
        if text.count("\n") >= _LONG_ROWS:
            body = f"{_SCROLLED}{body}</div>"
        plain = f"[{title}]\n{terminal.without_escapes(text)}"
        html = framed([output for output, _ in block.members], title, body)
        if len(plain) + len(html) <= room or len(text) < 1024:
            return plain, html
        # Colours and escaped characters made it longer than any limit foresaw.
        half = len(text) // 4
        text = f"{text[:half]}\n... {len(text) - 2 * half:,} characters folded ...\n{text[-half:]}"


def title_of(members: Sequence[NodeOutput], nodes: int) -> str:
    """``mini · rank 1``, ``all 6 nodes`` or ``5 of 6 nodes: air, desk, ...``."""
    if len(members) == 1:
        return members[0].label
    if len(members) >= nodes:
        return f"all {len(members)} nodes"
    names = [member.node for member in members]
    return f"{len(names)} of {nodes} nodes: {shortened(names, _MOST_NAMES)}"


def framed(members: Sequence[NodeOutput], title: str, body: str) -> str:
    """``body`` (HTML) below its title, with the node's colour at its left; grey for several nodes."""
    colour = node_colour(members[0]) if len(members) == 1 else "var(--jp-border-color1,#999)"
    every = escape(", ".join(member.label for member in members)) if len(members) > 1 else ""
    return (
        f'<div class="{NO_TEX}" style="border-left:3px solid {colour};padding-left:8px;margin-bottom:2px">'
        f'<div style="font-size:85%;font-weight:600;color:var(--jp-ui-font-color2,#666)" title="{every}">'
        f"{escape(title)}</div>{body}</div>"
    )


def label_bundle(output: NodeOutput) -> Bundle:
    """The node's label alone, to stand in front of a rich output."""
    return {"text/plain": f"[{output.label}]", "text/html": framed([output], output.label, "")}


def marked_html(text: str, reference: str) -> str:
    """``text`` as HTML with the words that differ from ``reference`` marked, where the two are alike row by row."""
    rows, others = text.split("\n"), reference.split("\n")
    if len(rows) != len(others) or len(rows) > _MOST_COMPARED_ROWS:
        return terminal.to_html(text)
    pairs = zip(rows, others, strict=True)
    return "\n".join(terminal.to_html(row) if row == other else _marked_row(row, other) for row, other in pairs)


def _marked_row(row: str, other: str) -> str:
    if len(row) + len(other) > _MOST_COMPARED_CHARACTERS or "\x1b" in row or "\x1b" in other:
        return terminal.to_html(row)
    words, others = _WORDS.findall(row), _WORDS.findall(other)
    parts: list[str] = []
    for kind, start, end, _, _ in SequenceMatcher(None, words, others, autojunk=False).get_opcodes():
        inner = terminal.to_html("".join(words[start:end]))
        parts.append(inner if kind == "equal" or not inner.strip() else f"{_MARK}{inner}</mark>")
    return "".join(parts)
