"""Where a code comes from: the terminal, standard input, a file, or an argument, which others can read.

The arguments of a process stand in the list of processes, which every user of a machine reads (``ps``,
``/proc/PID/cmdline``). A code that came as one is taken out of it where the system lets a process do that.
"""

import argparse
import ctypes
import getpass
import stat
import sys
from pathlib import Path
from typing import TextIO

from notebook_cluster.cli import values

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
    return text if text == ASK else values.code(text)


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
    with path.open(encoding="utf-8") as file:
        code = _checked(_line(file), f"the first line of {path}")
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            print(f"{path} can be read by others of this machine: chmod 600 {path}", file=sys.stderr, flush=True)
    return code


def _line(file: TextIO | None) -> str:
    return file.readline(_MAX_CHARACTERS) if file is not None else ""


def _checked(text: str, where: str) -> str:
    try:
        return values.code(text.strip())
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


def _place_of_code(argument: bytes, code: str) -> int | None:
    """Where ``code`` begins in ``CODE`` or ``--code=CODE``; None for another argument."""
    text = argument.decode(errors="replace")
    option = "--code=" if text.startswith("--code=") else ""
    try:
        return len(option) if values.code(text.removeprefix(option)) == code else None
    except argparse.ArgumentTypeError:
        return None
