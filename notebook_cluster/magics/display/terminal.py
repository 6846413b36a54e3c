"""Text as a terminal would show it: colours as HTML, progress bars that rewrite their line, long runs folded."""

import re
from html import escape

_ESCAPE = re.compile(r"\x1b\[([0-9;:?]*)[ -/]*([@-~])|\x1b.?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NORMAL = ("#3e424d", "#e75c58", "#00a250", "#ddb62b", "#208ffb", "#d160c4", "#60c6c8", "#c5c1b4")
_INTENSE = ("#282c36", "#b22b31", "#007427", "#b27d12", "#0065ca", "#a03196", "#258f8f", "#a1a6b2")
"""JupyterLab's own palette, so that a node's traceback looks like one of the notebook."""


def without_escapes(text: str) -> str:
    """``text`` without escape sequences and control characters; newlines and tabs stay."""
    if text.isprintable():
        return text
    return _ESCAPE.sub("", text)


def to_html(text: str) -> str:
    """``text`` with everything escaped for HTML and its colours as ``<span style=...>``."""
    if "\x1b" not in text:
        return escape(without_escapes(text), quote=False)
    parts: list[str] = []
    style: dict[str, str] = {}
    end = 0
    for found in _ESCAPE.finditer(text):
        _append(parts, text[end : found.start()], style)
        end = found.end()
        if found[2] == "m":
            _change(style, found[1])
    _append(parts, text[end:], style)
    return "".join(parts)


def _append(parts: list[str], text: str, style: dict[str, str]) -> None:
    if not text:
        return
    safe = escape(text, quote=False)
    if style:
        safe = f'<span style="{";".join(f"{name}:{value}" for name, value in style.items())}">{safe}</span>'
    parts.append(safe)


_SWITCHES = {1: ("font-weight", "bold"), 3: ("font-style", "italic"), 4: ("text-decoration", "underline")}
_RESETS = {22: "font-weight", 23: "font-style", 24: "text-decoration", 39: "color", 49: "background-color"}


def _change(style: dict[str, str], codes: str) -> None:
    """Apply the numbers of one SGR sequence (ECMA-48, 8.3.117) to ``style``."""
    numbers = [int(code) if code.isdigit() and len(code) < 4 else 0 for code in codes.replace(":", ";").split(";")]
    while numbers:
        code = numbers.pop(0)
        if code == 0:
            style.clear()
        elif code in _SWITCHES:
            name, value = _SWITCHES[code]
            style[name] = value
        elif code in _RESETS:
            style.pop(_RESETS[code], None)
        elif code in (38, 48):
            colour = _extended(numbers)
            if colour:
                style["color" if code == 38 else "background-color"] = colour
        elif 30 <= code <= 37 or 90 <= code <= 97:
            style["color"] = (_NORMAL if code < 90 else _INTENSE)[code % 10]
        elif 40 <= code <= 47 or 100 <= code <= 107:
            style["background-color"] = (_NORMAL if code < 100 else _INTENSE)[code % 10]


def _extended(numbers: list[int]) -> str:
    """The colour after 38 or 48: ``5;N`` of the 256-colour table or ``2;R;G;B``. Takes its numbers off the list."""
    kind = numbers.pop(0) if numbers else 0
    if kind == 2 and len(numbers) >= 3:
        red, green, blue = (min(numbers.pop(0), 255) for _ in range(3))
        return f"rgb({red},{green},{blue})"
    if kind != 5 or not numbers:
        numbers.clear()
        return ""
    index = min(numbers.pop(0), 255)
    if index < 16:
        return (_NORMAL if index < 8 else _INTENSE)[index % 8]
    if index >= 232:
        level = 8 + 10 * (index - 232)
        return f"rgb({level},{level},{level})"
    index -= 16
    levels = (0, 95, 135, 175, 215, 255)
    return f"rgb({levels[index // 36]},{levels[index // 6 % 6]},{levels[index % 6]})"


HEAD_CHARACTERS = 16 * 1024
TAIL_CHARACTERS = 64 * 1024
ROW_CHARACTERS = 8 * 1024
_ROW_END = 2 * 1024
"""A longer row keeps this much of its beginning and of its end."""

_CONTROL = re.compile(r"[\r\b\x1b]")
_TOKEN = re.compile(r"\n|\r|\x08|\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b[^\[]|\x1b\[|[^\n\r\x08\x1b]+")
_CUT_ESCAPE = re.compile(r"\x1b(\[[0-9;:?]*)?\Z")


class LineBuffer:
    """Rows of text with a cursor.

    Understood: newline, carriage return, backspace, cursor up and down, erase line; colours stay in the text, other
    escape sequences are dropped. Of long output the first 16 K and the last 64 K characters are kept.
    """

    def __init__(self, whole_text: str = "") -> None:
        """``whole_text``: the file in which everything is, for the marker."""
        self._whole_text = whole_text
        self._head: list[str] = []
        self._head_size = 0
        self._folded = 0
        self._rows = [""]
        self._row = 0
        self._column = 0
        self._row_folded = 0
        self._size = 0
        self._cut = ""
        self._missing: list[tuple[int, int]] = []
        """(row, counted from the first that was written; lines) of lines that stand for others."""

    @property
    def at_line_start(self) -> bool:
        """True when the next character begins a row."""
        return self._column == 0

    def shows_the_same(self, other: "LineBuffer") -> bool:
        """True when both look alike, whatever was written on the way there."""
        return (self._rows, self._head, self._folded) == (other._rows, other._head, other._folded)

    def write(self, text: str) -> None:
        """Add ``text`` at the cursor."""
        if self._cut:
            text, self._cut = self._cut + text, ""
        self._size += len(text)
        if _CONTROL.search(text) is None and self._at_end():
            self._extend(text.split("\n"))
        else:
            if cut := _CUT_ESCAPE.search(text):
                text, self._cut = text[: cut.start()], cut[0]
            for token in _TOKEN.findall(text):
                self._apply(token)
        if self._size > 2 * TAIL_CHARACTERS or len(self._rows[-1]) > ROW_CHARACTERS:
            self._shorten()

    def write_left_out(self, text: str, lines: int) -> None:
        """Add ``text``, which stands for ``lines`` others that never came here: where it is folded, they count."""
        self.write(text)
        self._missing.append((self._gone + self._row - 1, lines - text.count("\n")))

    def render(self, limit: int, *, head: bool = True) -> tuple[str, bool]:
        """At most about ``limit`` characters, and whether that is everything that was written.

        With ``head`` the beginning is shown too, else only the end; a marker says how many lines are folded.
        """
        rows = self._rows[:-1] if self._rows[-1] == "" and len(self._rows) > 1 else self._rows
        whole = [*self._head, *rows]
        if not self._folded and sum(map(len, whole)) + len(whole) <= limit:
            return "\n".join(whole), True
        first = _fitting(self._head or rows, limit // 4) if head else 0
        last = _fitting(rows[::-1], limit - limit // 4 if head else limit, at_least=1)
        shown_first = (self._head or rows)[:first]
        folded = len(whole) + self._folded - first - last
        if folded <= 0:
            return "\n".join(whole)[-limit:], False
        begin = first + (0 if self._head else self._folded)
        end = self._gone + len(rows) - last
        folded += sum(lines for row, lines in self._missing if begin <= row < end)
        where = f", all of it in {self._whole_text}" if self._whole_text else ""
        marker = f"... {folded:,} line{'s' if folded != 1 else ''} folded{where} ..."
        return "\n".join([*shown_first, marker, *rows[len(rows) - last :]]), False

    @property
    def _gone(self) -> int:
        """Rows that were written before those in ``_rows``."""
        return len(self._head) + self._folded

    def _at_end(self) -> bool:
        return self._row == len(self._rows) - 1 and self._column == len(self._rows[-1])

    def _extend(self, lines: list[str]) -> None:
        self._rows[-1] += lines[0]
        if len(lines) > 1:
            self._rows.extend(lines[1:])
            self._row_folded = 0
        self._row = len(self._rows) - 1
        self._column = len(self._rows[-1])

    def _apply(self, token: str) -> None:
        if token == "\n":
            self._move_down()
        elif token == "\r":
            self._column = 0
        elif token == "\b":
            self._column = max(0, self._column - 1)
        elif token[0] != "\x1b" or token.endswith("m"):
            self._put(token)
        elif token.endswith("A"):
            self._row = max(0, self._row - _count(token))
            self._column = min(self._column, len(self._rows[self._row]))
        elif token.endswith("B"):
            self._row = min(len(self._rows) - 1, self._row + _count(token))
            self._column = min(self._column, len(self._rows[self._row]))
        elif token.endswith("K"):
            kept = "" if token == "\x1b[2K" else self._rows[self._row][: self._column]
            self._rows[self._row] = kept
            self._column = min(self._column, len(kept))

    def _move_down(self) -> None:
        self._row += 1
        self._column = 0
        if self._row == len(self._rows):
            self._rows.append("")
            self._row_folded = 0

    def _put(self, text: str) -> None:
        row = self._rows[self._row]
        before, after = row[: self._column], row[self._column + len(text) :]
        if "\x1b" in row or "\x1b" in text:
            # Columns do not count here, because escape sequences have no width: what is rewritten is replaced.
            after = ""
        self._rows[self._row] = before + text + after
        self._column = len(before) + len(text)

    def _shorten(self) -> None:
        self._rows[-1], self._row_folded = _fold_row(self._rows[-1], self._row_folded)
        if self._row == len(self._rows) - 1:
            self._column = min(self._column, len(self._rows[-1]))
        for index, row in enumerate(self._rows[:-1]):
            if len(row) > ROW_CHARACTERS:
                self._rows[index] = _fold_row(row, 0)[0]
        self._size = sum(map(len, self._rows)) + len(self._rows)
        if self._size <= TAIL_CHARACTERS:
            return
        drop = 0
        while self._size > TAIL_CHARACTERS and drop < len(self._rows) - 1:
            row = self._rows[drop]
            self._size -= len(row) + 1
            drop += 1
            if not self._folded and self._head_size + len(row) < HEAD_CHARACTERS:
                self._head.append(row)
                self._head_size += len(row) + 1
            else:
                self._folded += 1
        del self._rows[:drop]
        self._row = max(0, self._row - drop)


def _fold_row(row: str, folded_before: int) -> tuple[str, int]:
    """``row`` without its middle when it is too long, and how many characters are missing there by now."""
    if len(row) <= ROW_CHARACTERS:
        return row, folded_before
    start = _ROW_END + (len(_row_marker(folded_before)) if folded_before else 0)
    rest = row[start:]
    folded = folded_before + len(rest) - _ROW_END
    return row[:_ROW_END] + _row_marker(folded) + rest[-_ROW_END:], folded


def _row_marker(characters: int) -> str:
    return f" ... {characters:,} characters folded ... "


def _fitting(rows: list[str], limit: int, at_least: int = 0) -> int:
    """How many of the first ``rows`` fit into ``limit`` characters."""
    size = 0
    for count, row in enumerate(rows):
        size += len(row) + 1
        if size > limit:
            return max(count, min(at_least, len(rows)))
    return len(rows)


def _count(token: str) -> int:
    digits = token[2:-1]
    return max(1, int(digits)) if digits.isdigit() and len(digits) < 6 else 1
