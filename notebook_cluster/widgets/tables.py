"""What is asked for and shown once, as text and as HTML: the doctor's report, the variables of all nodes as a table,
name by node, and other tables. Pure functions.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from notebook_cluster.protocol.clock import ABSENT, ago
from notebook_cluster.protocol.interaction import NodeVariables, Variable
from notebook_cluster.protocol.views import Finding
from notebook_cluster.widgets.formatting import byte_count, escaped, plain, plural
from notebook_cluster.widgets.static_html import block, page, text_block
from notebook_cluster.widgets.text import aligned

_ORDER = ("error", "warning", "info", "ok")
_TONES = {"error": "bad", "warning": "warning", "info": "info", "ok": "good"}
_TEXT_LIMIT = 1000
_TABLE_LIMIT = 120


def findings_text(findings: Sequence[Finding]) -> str:
    """What is wrong first, each with its table and its fix below it, indented; then what was found to be well."""
    lines = [summary(findings)]
    for finding in _sorted(findings):
        lines.append(f"{finding.level:<8} {plain(finding.subject, 20):<11} {plain(finding.text, _TEXT_LIMIT)}")
        lines += [f"         {line}" for line in aligned(_table_rows(finding))]
        if finding.fix:
            lines += [
                f"         fix: {line}" if not index else f"              {line}" for index, line in _fix(finding)
            ]
    return "\n".join(lines)


def findings_html(findings: Sequence[Finding]) -> str:
    """The same as one ``<div>``: a fix is a ``<pre>`` to copy. Every text is escaped; there is no script."""
    rows = [_finding(finding) for finding in _sorted(findings)]
    return page([text_block("nbc-title", summary(findings)), *rows], "doctor")


def summary(findings: Sequence[Finding]) -> str:
    """``doctor: 1 error, 2 warnings, 9 checks are well``."""
    counts = {level: sum(finding.level == level for finding in findings) for level in _ORDER}
    parts = [plural(counts[level], level) for level in ("error", "warning") if counts[level]]
    parts += [f"{plural(counts['ok'], 'check')} well"] if counts["ok"] else []
    return "doctor: " + (", ".join(parts) or "nothing to say")


def _sorted(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: _ORDER.index(finding.level))


def _table_rows(finding: Finding) -> list[list[str]]:
    """The table with rows of one length."""
    width = max((len(row) for row in finding.table), default=0)
    return [[plain(cell, _TABLE_LIMIT) for cell in row] + [""] * (width - len(row)) for row in finding.table]


def _fix(finding: Finding) -> list[tuple[int, str]]:
    return list(enumerate(plain(line, _TEXT_LIMIT) for line in finding.fix.splitlines()))


def _finding(finding: Finding) -> str:
    head = [
        text_block(f"nbc-pill nbc-{_TONES[finding.level]}", finding.level),
        text_block("nbc-finding-subject nbc-muted", plain(finding.subject, 20)),
        text_block("nbc-finding-text nbc-grow", plain(finding.text, _TEXT_LIMIT)),
    ]
    parts = [block("nbc-row nbc-top", head)]
    if finding.table:
        parts.append(_table(_table_rows(finding)))
    if finding.fix:
        shown = "\n".join(line for _, line in _fix(finding))
        parts.append(f'<pre class="nbc-fix nbc-code">{escaped(shown)}</pre>')
    return block("nbc-finding", parts)


def table_text(rows: Sequence[Sequence[str]], before: str, after: str) -> str:
    """``rows``, heads first, in aligned columns, with a line before and lines after them where there are some."""
    return "\n".join(filter(None, [before, *aligned([list(row) for row in rows]), after]))


def table_html(rows: Sequence[Sequence[str]], before: str, after: str) -> str:
    """The same as one ``<div>``, which scrolls in a narrow window. Every text is escaped."""
    table = block("nbc-scroll", [_table([list(row) for row in rows])])
    around = [[text_block("nbc-small", line) for line in text.splitlines()] for text in (before, after)]
    return page([*around[0], table, *around[1]], "table")


def _table(rows: list[list[str]]) -> str:
    def row(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escaped(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows[1:])
    return f'<table class="nbc-table"><thead>{row(rows[0], "th")}</thead><tbody>{body}</tbody></table>'


DIFFERS = "≠"
_NAME_LIMIT = 60
_CELL_LIMIT = 160
_FRESH = 0.5
"""Seconds: an answer that is older is said to be."""
_MOST_NAMED = 8


@dataclass(frozen=True)
class _Row:
    """One name: what each answering node has under it (None: nothing), and which of them are not like most."""

    name: str
    cells: dict[str, Variable | None]
    odd: frozenset[str]

    @property
    def differs(self) -> bool:
        return bool(self.odd)

    @property
    def groups(self) -> list[tuple[list[str], str]]:
        """(nodes, text) for each different text, in rank order."""
        groups: dict[str, list[str]] = {}
        for node, variable in self.cells.items():
            groups.setdefault(_text(variable), []).append(node)
        return [(nodes, text) for text, nodes in groups.items()]


def variables_text(columns: Sequence[NodeVariables]) -> str:
    """A line for each name, or one for each group of nodes that have the same; ``≠`` marks names that differ."""
    rows, answering = _rows(columns), len(_answering(columns))
    lines = []
    for row in rows:
        for index, (nodes, text) in enumerate(row.groups):
            name = plain(row.name, _NAME_LIMIT) if index == 0 else ""
            where = "" if len(nodes) == answering else plain(", ".join(nodes), _NAME_LIMIT)
            lines.append([DIFFERS if row.differs and index == 0 else " ", name, where, text])
    if not any(where for _, _, where, _ in lines):
        lines = [[mark, name, text] for mark, name, _, text in lines]
    return "\n".join([_summary(columns, rows), *aligned(lines), *_notes(columns)])


def variables_html(columns: Sequence[NodeVariables]) -> str:
    """The grid as one ``<div>``: a column for each node, one wide cell where all have the same; cells that are not like
    most are coloured. Every text is escaped; there is no script."""
    rows, answering = _rows(columns), _answering(columns)
    body = [text_block("nbc-title", _summary(columns, rows))]
    if rows:
        head = "".join(f"<th>{escaped(text)}</th>" for text in ("", "name", *map(_heading, answering)))
        lines = "".join(_line(row) for row in rows)
        table = f'<table class="nbc-table"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
        body.append(block("nbc-variables", [table]))
    body += [text_block("nbc-small nbc-muted", note) for note in _notes(columns)]
    return page(body, "variables")


def _line(row: _Row) -> str:
    shown, odd = [_shown(variable) for variable in row.cells.values()], ' class="nbc-odd"'
    if len(set(shown)) == 1:
        cells = f'<td colspan="{len(shown)}">{shown[0]}</td>'
    else:
        cells = "".join(
            f"<td{odd if node in row.odd else ''}>{cell}</td>" for node, cell in zip(row.cells, shown, strict=True)
        )
    mark = f"<td>{DIFFERS if row.differs else ''}</td>"
    return f"<tr>{mark}<td><b>{escaped(plain(row.name, _NAME_LIMIT))}</b></td>{cells}</tr>"


def _rows(columns: Sequence[NodeVariables]) -> list[_Row]:
    answering = _answering(columns)
    tables = {column.node: {variable.name: variable for variable in column.variables} for column in answering}
    names = sorted({name for table in tables.values() for name in table})
    rows = []
    for name in names:
        cells = {node: table.get(name) for node, table in tables.items()}
        rows.append(_Row(name, cells, _odd(cells)))
    return rows


def _odd(cells: dict[str, Variable | None]) -> frozenset[str]:
    """The nodes whose content is not that of most; another device, or other room taken, is no difference."""
    # Where one node had no time for a hash, hashes say nothing.
    hashed = all(variable.hash for variable in cells.values() if variable is not None)
    contents = {
        node: None if variable is None else (variable.kind, variable.shape, variable.value, variable.hash * hashed)
        for node, variable in cells.items()
    }
    most, count = Counter(contents.values()).most_common(1)[0]
    # Where no value has the majority, none of them is the usual one.
    return frozenset(node for node, content in contents.items() if content != most or 2 * count <= len(contents))


def _answering(columns: Sequence[NodeVariables]) -> list[NodeVariables]:
    return [column for column in columns if column.asked is not None]


def _text(variable: Variable | None) -> str:
    """``float32 tensor [64, 10] · cpu · 2.6 kB · #3f9a01bc``, ``int 3``."""
    return " · ".join(part for part in _parts(variable) if part)


def _shown(variable: Variable | None) -> str:
    """The same in two lines, as HTML."""
    what, details = _parts(variable)
    below = f'<br><span class="nbc-muted">{escaped(details)}</span>' if details else ""
    return escaped(what) + below


def _parts(variable: Variable | None) -> tuple[str, str]:
    """(what it is, where and how large it is)."""
    if variable is None:
        return ABSENT, ""
    what = " ".join(part for part in (variable.kind, variable.shape, variable.value) if part)
    # Of a single value nobody asks how much room it takes.
    size = byte_count(variable.bytes) if variable.bytes is not None and (variable.shape or variable.hash) else ""
    approximate = variable.hash.startswith("~")
    digest = f"{'~' if approximate else ''}#{variable.hash.removeprefix('~')}" if variable.hash else ""
    details = " · ".join(part for part in (variable.device, size, digest) if part)
    return plain(what, _CELL_LIMIT), plain(details, _CELL_LIMIT)


def _heading(column: NodeVariables) -> str:
    rank = f" · rank {column.rank}" if column.rank is not None else ""
    return f"{plain(column.node, _NAME_LIMIT)}{rank}"


def _summary(columns: Sequence[NodeVariables], rows: Sequence[_Row]) -> str:
    """``12 variables on 3 nodes; 2 differ: model, seen``."""
    differing = [plain(row.name, _NAME_LIMIT) for row in rows if row.differs]
    shown = ", ".join(differing[:_MOST_NAMED]) + (", ..." if len(differing) > _MOST_NAMED else "")
    answering = len(_answering(columns))
    if not rows:
        return f"no variables on {plural(answering, 'node')}"
    said = f"{len(differing)} differ{'s' if len(differing) == 1 else ''}: {shown}" if differing else "all the same"
    return f"{plural(len(rows), 'variable')} on {plural(answering, 'node')}" + (f"; {said}" if answering > 1 else "")


def _notes(columns: Sequence[NodeVariables]) -> list[str]:
    """Which columns are not of this moment, and what was left out."""
    notes = []
    words = {"busy": "runs a cell", "silent": "did not answer in time", "lost": "cannot be reached"}
    for column in columns:
        node = plain(column.node, _NAME_LIMIT)
        if column.status != "ok":
            old = column.asked is not None and column.asked > _FRESH
            since = f"as it was {ago(column.asked)}" if old and column.asked is not None else "not asked yet"
            notes.append(f"{node} {words[column.status]}: {since}")
        if column.left_out:
            notes.append(f"{node} has {plural(column.left_out, 'variable')} more: %cluster vars PATTERN shows some")
    if any(row.hash.startswith("~") for column in columns for row in column.variables):
        notes.append("~#: only a sample of it was looked at")
    return notes
