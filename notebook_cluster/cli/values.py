"""How the values of options are read. Each raises argparse.ArgumentTypeError: one line, the value and the way out."""

import argparse
import datetime
import math
import platform
import re
from collections.abc import Callable

from notebook_cluster.protocol import check_name
from notebook_cluster.protocol.names import as_name, is_name

RESERVED_NAMES = ("local", "all")
"""Words of ``%cluster add`` that mean something else than a peer of that name."""
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_MEMORY = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?) ?([KMGT]I?B)")
_DEVICE = re.compile(r"cpu|mps|(?:cuda|rocm)(?::[0-9]{1,3})?")
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_CLOCK = re.compile(r"([0-9]{1,2}):([0-9]{2})")


def default_name() -> str:
    """The machine's own name, as far as it can be a peer's."""
    return as_name(platform.node().partition(".")[0], fallback="peer")


def peer_name(text: str) -> str:
    """The name of a peer."""
    try:
        check_name(text, "peer")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if text in RESERVED_NAMES:
        raise argparse.ArgumentTypeError(f"{text!r} has a meaning in '%cluster add': choose another name")
    return text


def port(text: str) -> int:
    """0 to 65535."""
    if not _is_count(text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: use 1 to 65535, or 0 for any free one")
    return int(text)


def seconds(text: str) -> float:
    """A time above 0."""
    return _above_zero(text, "seconds")


def minutes(text: str) -> float:
    """A time above 0."""
    return _above_zero(text, "minutes")


def count(text: str) -> int:
    """A whole number above 0."""
    if not _is_count(text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes: use 1 or more")
    return int(text)


def percent(text: str) -> float:
    """0 to 100, with or without a percent sign."""
    value = _number(text.removesuffix("%").strip())
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a battery level: use 0 to 100 percent")
    return value


def code(text: str) -> str:
    """A code, in its usual form."""
    from notebook_cluster.security.codes import read_code

    try:
        return read_code(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def host_port(text: str) -> str:
    """``HOST:PORT``."""
    host, _, number = text.strip().rpartition(":")
    if not (_HOST.fullmatch(host) and _is_count(number) and 0 < int(number) < 65536):
        raise argparse.ArgumentTypeError(f"{text[:300]!r} is not HOST:PORT: write it like 192.168.1.20:4711")
    return f"{host}:{int(number)}"


def peer_or_address(text: str) -> str:
    """A peer's name or ``HOST:PORT``."""
    if ":" in text:
        return host_port(text)
    if not is_name(text):
        raise argparse.ArgumentTypeError(f"{text[:300]!r} is neither a peer's name nor HOST:PORT")
    return text


def devices(text: str) -> tuple[str, ...]:
    """Kinds or ids of devices with commas between."""
    what = "device: use cpu, mps, cuda, rocm or one like cuda:0"
    return words(what, lambda word: _DEVICE.fullmatch(word) is not None)(text)


def memory(text: str) -> int:
    """Bytes, from an amount with its unit."""
    match = _MEMORY.fullmatch(text.strip().upper())
    amount = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if amount < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of bytes: write it like 8GB or 500MB")
    return amount


def until(text: str) -> float:
    """The next time (Unix) at which the clock shows ``HH:MM``."""
    match = _CLOCK.fullmatch(text.strip())
    if match is None or int(match[1]) > 23 or int(match[2]) > 59:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time of day: write it like 17:00")
    return next_time(int(match[1]), int(match[2]), datetime.datetime.now().astimezone())


def next_time(hour: int, minute: int, now: datetime.datetime) -> float:
    """When the clock shows ``hour``:``minute`` next after ``now``, as Unix time."""
    # Without a zone: the wall clock tomorrow, also where the night is an hour longer or shorter.
    wall = now.replace(hour=hour, minute=minute, second=0, microsecond=0, tzinfo=None)
    if wall.timestamp() <= now.timestamp():
        wall += datetime.timedelta(days=1)
    return wall.timestamp()


def words(what: str, check: Callable[[str], bool]) -> Callable[[str], tuple[str, ...]]:
    """A reader of names with commas between, each of which ``check`` accepts; ``what`` is the word for people,
    with the way out."""

    def read(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
        wrong = [word for word in found if not check(word)]
        if wrong or not found:
            raise argparse.ArgumentTypeError(f"{wrong[0] if wrong else text!r} is not a {what}")
        return found

    return read


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value


def _above_zero(text: str, unit: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {unit} above 0")
    return value
