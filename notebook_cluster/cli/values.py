"""How the values of options are read, and where a code comes from: the terminal, standard input, a file, an argument.

Each reader of a value raises argparse.ArgumentTypeError: one line, the value and the way out.

The arguments of a process stand in the list of processes, which every user of a machine reads (``ps``,
``/proc/PID/cmdline``). A code that came as one is taken out of it where the system lets a process do that.
"""

import argparse
import ctypes
import datetime
import getpass
import math
import platform
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from notebook_cluster.protocol import check_name
from notebook_cluster.protocol.launches import ANY_PLACE
from notebook_cluster.protocol.measuring import MOST_MEGABYTES
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


def megabytes(text: str) -> int:
    """What is sent to measure a way."""
    if not _is_count(text) or not 1 <= int(text) <= MOST_MEGABYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of megabytes: use 1 to {MOST_MEGABYTES}")
    return int(text)


def whole(text: str) -> int:
    """A whole number, 0 too."""
    if not _is_count(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number: use 0 or more")
    return int(text)


def place(text: str) -> int:
    """A whole number, or ``any``."""
    if text == "any":
        return ANY_PLACE
    if not _is_count(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a place: use 0 or more, or any")
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


def host_ports(text: str) -> str:
    """One or more ``HOST:PORT`` with commas between."""
    return ",".join(dict.fromkeys(host_port(part) for part in text.split(",")))


def peer_or_address(text: str) -> str:
    """A peer's name or ``HOST:PORT``."""
    if ":" in text:
        return host_port(text)
    if not is_name(text):
        raise argparse.ArgumentTypeError(f"{text[:300]!r} is neither a peer's name nor HOST:PORT")
    return text


def peers(text: str) -> tuple[str, ...]:
    """``all``, or peers with commas between: names or ``HOST:PORT``."""
    return tuple(dict.fromkeys(peer_or_address(part.strip()) for part in text.split(",")))


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
    """The next time (Unix) at which the clock shows ``HH:MM``, or the one that stands there with its date."""
    if "T" in text:
        try:
            return datetime.datetime.fromisoformat(text.strip()).timestamp()
        except (ValueError, OverflowError, OSError):
            raise argparse.ArgumentTypeError(f"{text[:100]!r} is not a time: write it like 2026-11-19T14:03") from None
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


ASK = "-"
"""In place of a code: it is asked for, or read from standard input."""
_MAX_CHARACTERS = 1000
_ARGUMENTS_START, _ARGUMENTS_END = 47, 48
"""Fields of ``/proc/self/stat`` (48 and 49 in proc(5)): between which addresses the arguments lie."""


def add_code_options(group: "argparse._ActionsContainer", code_help: str) -> None:
    """``--code [CODE]`` and ``--code-file FILE``; :func:`read_code` takes what they say."""
    one = group.add_mutually_exclusive_group()
    one.add_argument(
        "--code", type=_code_or_ask, nargs="?", const=ASK, default=None, metavar="CODE",
        help=f"{code_help}; without CODE, or with {ASK}, it is asked for, or read from standard input",
    )  # fmt: skip
    one.add_argument("--code-file", type=Path, default=None, metavar="FILE", help="read that code from FILE")


def _code_or_ask(text: str) -> str:
    return text if text == ASK else code(text)


def read_code(options: argparse.Namespace, *, runs_long: bool = True) -> str:
    """The code that ``options`` of :func:`add_code_options` mean, in its usual form; empty where there is none. Warns
    on stderr when others can read it; of an argument that could be hidden only where the process ``runs_long``, with
    a code that is good for as long.

    Raises:
        ValueError: what was read is not a code. OSError: the file cannot be read.
    """
    if options.code_file is not None:
        return _from_file(options.code_file)
    if options.code == ASK:
        asks = sys.stdin is not None and sys.stdin.isatty()
        typed = getpass.getpass("code: ") if asks else _line(sys.stdin)
        return _checked(typed, "what was typed" if asks else "standard input")
    if options.code:
        hidden = hide_arguments(options.code)
        if runs_long or not hidden:
            _warn_of_argument(hidden)
    return options.code or ""


def _from_file(path: Path) -> str:
    try:
        opened = path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        way_out = f"name the file that holds it, or use --code {ASK}, which asks for it"
        raise OSError(f"--code-file {path}: no code can be read there ({error.strerror}): {way_out}") from None
    with opened as file:
        code = _checked(_line(file), f"the first line of {path}")
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            print(f"{path} can be read by others of this machine: chmod 600 {path}", file=sys.stderr, flush=True)
    return code


def _line(file: TextIO | None) -> str:
    return file.readline(_MAX_CHARACTERS) if file is not None else ""


def _checked(text: str, where: str) -> str:
    try:
        return code(text.strip())
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{where} is not a code: {error}") from None


def _warn_of_argument(hidden: bool) -> None:
    seen = "until now" if hidden else "as long as this runs"
    print(
        f"the code stands in the list of processes {seen}, where every user of this machine can read it, and perhaps "
        f"in your shell's history: give it with --code {ASK}, which asks for it, or --code-file FILE",
        file=sys.stderr,
        flush=True,
    )  # fmt: skip


def hide_arguments(code: str) -> bool:
    """Overwrite each argument of this process that is ``code``, in any form that means it; True when none is left.

    Linux only: elsewhere, and where the process may not see its own addresses, nothing is done.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        # Behind the name come the fields from the third on.
        start, end = int(fields[_ARGUMENTS_START - 2]), int(fields[_ARGUMENTS_END - 2])
        if not 0 < start < end:
            return False
        place = start
        for argument in ctypes.string_at(start, end - start).split(b"\0"):
            offset = _place_of_code(argument, code)
            if offset is not None:
                ctypes.memset(place + offset, ord("x"), len(argument) - offset)
            place += len(argument) + 1
        left = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError, IndexError):
        return False
    return all(_place_of_code(argument, code) is None for argument in left)


def _place_of_code(argument: bytes, wanted: str) -> int | None:
    """Where the ``wanted`` code begins in ``CODE`` or ``--code=CODE``; None for another argument."""
    text = argument.decode(errors="replace")
    option = "--code=" if text.startswith("--code=") else ""
    try:
        return len(option) if code(text.removeprefix(option)) == wanted else None
    except argparse.ArgumentTypeError:
        return None
