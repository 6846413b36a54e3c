"""Text of one node as a terminal would show it, bounded in memory: progress bars rewrite their line, long runs fold."""

import re

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
