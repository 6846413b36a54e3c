"""How the programs of an engine are run: never longer than some seconds, with their own words when they refuse."""

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from notebook_cluster.launchers.launcher import LaunchError
from notebook_cluster.security import without_tokens

_MOST = 1_000_000
_KILLED_S = 1.0
"""For a program to be gone that was killed; what it has started may hold on to its output."""


class NoAnswer(LaunchError):
    """Not in time: what was asked for may happen all the same."""


def environment(without: re.Pattern[str] | None = None) -> dict[str, str]:
    """This process's environment, as an engine may keep and pass it on: without Jupyter's tokens, and without the
    variables whose whole name is ``without``."""
    kept = without_tokens(os.environ)
    return {name: value for name, value in kept.items() if without is None or not without.fullmatch(name)}


def find_program(program: str, way_out: str) -> str:
    """Its path. LaunchError with ``way_out`` where it is not on PATH."""
    path = shutil.which(program)
    if path is None:
        raise LaunchError(f"there is no {program} on the PATH of this machine: {way_out}")
    return path


async def run(
    argv: Sequence[str],
    *,
    timeout: float,
    variables: Mapping[str, str],
    stdin: str = "",
    name: str = "",
    refused: str = "",
) -> str:
    """What ``argv`` prints, with ``variables`` as its environment. ``name``: what people call it.

    Raises:
        LaunchError: it ends with another code than 0 (``refused`` and its own words).
        NoAnswer: it does not end within ``timeout``.
    """
    name = name or os.path.basename(argv[0])
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables, cwd="/"
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(stdin.encode()), timeout)
    except TimeoutError:
        raise NoAnswer(f"{name} has not answered within {timeout:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                process.kill()
                await asyncio.wait_for(process.wait(), _KILLED_S)
    if process.returncode:
        said = own_words(errors.decode(errors="replace"), name) or f"exit code {process.returncode}"
        raise LaunchError(f"{refused or f'{name} failed'}: {said}")
    return output[:_MOST].decode(errors="replace")


def own_words(text: str, program: str) -> str:
    """What a program wrote to stderr as one line, without its name before each."""
    lines = []
    for line in text.splitlines():
        line = line.strip().removeprefix(f"{program}:").strip().removeprefix("error:").strip()
        line = "".join(letter for letter in line if letter.isprintable())
        if line and line not in lines:
            lines.append(line)
    return "; ".join(lines)[:500]
