"""How the words after a magic's options and names are read: each function returns the value, or raises ValueError that
says what it takes (UsageError: the whole line)."""

import keyword
import math
from collections.abc import Callable

from notebook_cluster.magics.errors import UsageError
from notebook_cluster.protocol.names import check_name


def whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return int(text)

    return read


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError("a number of seconds above 0")
    return number


def minutes(text: str) -> float:
    try:
        return seconds(text)
    except ValueError:
        raise ValueError("a number of minutes above 0") from None


def variable(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise ValueError("the name of a variable")
    return text


def node(text: str) -> str:
    if "," in text or not text:
        raise ValueError("one node, by name or rank")
    return text


def targets(text: str) -> tuple[str, ...]:
    words = tuple(text.split())
    if not words or words == (",",):
        raise ValueError("nodes as after %%on: ranks, names, cuda, !name")
    return words


def code(text: str) -> str:
    from notebook_cluster.security import read_code

    try:
        return read_code(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


def names(what: str) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        if not names:
            raise ValueError(f"{what} with commas between them")
        return names

    return read


def cluster_name(text: str) -> str:
    try:
        return check_name(text, "cluster")
    except ValueError as error:
        raise UsageError(str(error)) from None


def name_to_start(text: str) -> str:
    """Of a cluster that may have to be started: a small number is one of nodes."""
    option, equals, value = text.partition("=")
    if equals and option.isidentifier():
        raise UsageError(f"%cluster start {text}: an option has two dashes, %cluster start --{option} {value}".rstrip())
    if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
        raise UsageError(
            f"%cluster start {text}: %cluster start --local {text} has so many nodes on this machine, and a name is no "
            f"number below {10**_MOST_DIGITS}"
        )
    return cluster_name(text)


def cluster_at_peer(text: str) -> str:
    """``NAME``, or ``NAME@PEER`` where the peer is a name or HOST:PORT."""
    name, at, peer = text.partition("@")
    if at and not peer:
        raise UsageError(f"{text!r} names no peer after @: %cluster attach NAME@PEER")
    return cluster_name(name) + at + peer


def parameters(text: str) -> str:
    """The number as ``1100000000``; people write 124M, 1.1B or 1.1e9."""
    try:
        number = float(text[:-1]) * _LARGE[text[-1].lower()] if text[-1:].lower() in _LARGE else float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number <= 1e13:
        raise UsageError(f"%cluster estimate {text}: say how many parameters the model has, as 124M, 1.1B or 1.1e9")
    return str(round(number))


def machines(text: str) -> str:
    try:
        return str(whole(1, 1000)(text))
    except ValueError as error:
        raise UsageError(f"%cluster shrink {text}: say how many machines, {error}") from None


_MOST_DIGITS = 3
_LARGE = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
