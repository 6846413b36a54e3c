"""The doctor's report as text and as HTML. Pure functions."""

import html
from collections.abc import Sequence

from notebook_cluster.protocol.views import Finding
from notebook_cluster.widgets.formatting import plain, plural
from notebook_cluster.widgets.static_html import block, page, text_block
from notebook_cluster.widgets.text import aligned

_ORDER = ("error", "warning", "info", "ok")
_TONES = {"error": "bad", "warning": "warning", "info": "info", "ok": "good"}
_TEXT_LIMIT = 1000
_CELL_LIMIT = 120


def findings_text(findings: Sequence[Finding]) -> str:
    """What is wrong first, each with its table and its fix below it, indented; then what was found to be well."""
    lines = [summary(findings)]
    for finding in _sorted(findings):
        lines.append(f"{finding.level:<8} {plain(finding.subject, 20):<11} {plain(finding.text, _TEXT_LIMIT)}")
        lines += [f"         {line}" for line in aligned(_rows(finding))]
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


def _rows(finding: Finding) -> list[list[str]]:
    """The table with rows of one length."""
    width = max((len(row) for row in finding.table), default=0)
    return [[plain(cell, _CELL_LIMIT) for cell in row] + [""] * (width - len(row)) for row in finding.table]


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
        parts.append(_table(_rows(finding)))
    if finding.fix:
        shown = "\n".join(line for _, line in _fix(finding))
        parts.append(f'<pre class="nbc-fix nbc-code">{html.escape(shown, quote=True)}</pre>')
    return block("nbc-finding", parts)


def _table(rows: list[list[str]]) -> str:
    def row(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell, quote=True)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows[1:])
    return f'<table class="nbc-table"><thead>{row(rows[0], "th")}</thead><tbody>{body}</tbody></table>'
