"""Output of nodes in a terminal: whole lines, each with its node's name before it."""

import re
from collections.abc import Sequence
from typing import TextIO

from notebook_cluster.magics.display.terminal import without_escapes
from notebook_cluster.protocol.views import Output

_STEERING = re.compile("[\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Ends of lines and directions of writing, with which a line looks like another one."""
UNFINISHED_S = 5.0
"""After which a line that is not ended is shown as it is: a progress bar, a question."""
_MOST = 10_000
"""Characters after which a line is broken."""


class NodeLines:
    """Prints to ``out`` what nodes print, and to ``errors`` what they print to stderr.

    What others print steers no terminal: escape sequences and control characters are left out. Of a line that is
    written over (``\\r``: a progress bar) the last text is shown, and every UNFINISHED_S seconds how it stands.
    """

    def __init__(self, out: TextIO, errors: TextIO) -> None:
        self._files = {"stdout": out, "stderr": errors}
        self._open: dict[tuple[str, str], str] = {}
        self._shown: dict[tuple[str, str], tuple[float, str]] = {}
        """When something was shown of the line that is open, and what."""

    def add(self, outputs: Sequence[Output]) -> None:
        """Show what ended a line. A traceback is not shown here: the node has printed the script's own."""
        for output in outputs:
            content = output.content
            if output.kind == "stream":
                name = "stderr" if content.get("name") == "stderr" else "stdout"
                self._write(output.node, name, str(content.get("text", "")))
            elif output.kind in ("display_data", "execute_result"):
                text = content.get("data", {}).get("text/plain", "")
                self._write(output.node, "stdout", f"{text}\n" if text else "")

    def show_unfinished(self, now: float) -> None:
        """Lines that have not ended since a while."""
        for key, text in list(self._open.items()):
            since, shown = self._shown.setdefault(key, (now, ""))
            if now - since >= UNFINISHED_S:
                text = _last(text)
                if text != shown:
                    self._print(key, text)
                self._shown[key] = now, text

    def finish(self) -> None:
        """Show what is left."""
        for key, text in self._open.items():
            if _last(text) != self._shown.get(key, (0.0, ""))[1]:
                self._print(key, _last(text))
        self._open.clear()
        for file in self._files.values():
            file.flush()

    def _write(self, node: str, name: str, text: str) -> None:
        key = node, name
        *lines, rest = (self._open.pop(key, "") + text).split("\n")
        for line in lines:
            self._print(key, _last(line))
            self._shown.pop(key, None)
        if "\r" in rest:
            rest = rest[rest.rindex("\r", 0, len(rest) - 1) :] if rest.count("\r") > 1 else rest
        while len(rest) > _MOST:
            self._print(key, _last(rest[:_MOST]))
            rest = rest[_MOST:]
        if rest:
            self._open[key] = rest
        self._files[name].flush()

    def _print(self, key: tuple[str, str], line: str) -> None:
        self._files[key[1]].write(f"[{key[0]}] {_STEERING.sub('', without_escapes(line))}\n")


def _last(line: str) -> str:
    """What a terminal shows of ``line`` that was written over."""
    return next((part for part in reversed(line.split("\r")) if part), "")
