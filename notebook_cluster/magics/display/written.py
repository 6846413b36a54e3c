"""What a node has written so far, as numbers: enough to see whether two nodes wrote the same, in little memory."""

from collections import OrderedDict

import xxhash

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
