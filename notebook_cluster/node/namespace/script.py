"""``notebook-cluster run``: a script as the program of this node, as ``python script.py`` would run it."""

import runpy
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import TracebackType

import msgspec

from notebook_cluster.node.namespace.script_surroundings import as_program
from notebook_cluster.protocol.transfers import SentScript
from notebook_cluster.training.runtime import current_runtime

_WAIT_S = 600.0
"""For the files of a script, on a node that came while it runs."""
_SAY_S = 3.0
_LOOK_S = 0.05
_BEFORE = ".notebook-cluster-run-before"
"""What was sent for the run before."""


class ScriptExit(Exception):
    """A script ended with an exit code other than 0: ``exit code 3``."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")


def run_script(script: str, arguments: Sequence[str], *, base: str, mark: tuple[str, str]) -> None:
    """Run ``script`` (a path relative to its folder) as ``__main__`` with ``arguments``.

    On the machine from which it was started it runs in ``base``, on others in the node's working folder: there the file
    ``mark[0]`` names run ``mark[1]`` once all files of it have come. Those of the run before that this one has not are
    removed.

    Raises:
        ScriptExit: it called ``sys.exit`` with another code than 0.
        FileNotFoundError: its files have not come.
        BaseException: whatever it raised; its traceback was printed.
    """
    runtime = current_runtime()
    folder, work = runtime.checkpoint_directory().parent, runtime.kept_directory()
    if work is not None and folder.is_relative_to(work):
        _remove_others(folder, _wait_for_files(folder, *mark))
    else:
        folder = Path(base)
    path = folder / script
    if not path.is_file():
        raise FileNotFoundError(f"there is no {script} in {folder}")
    try:
        with as_program(path, arguments, folder) as hook:
            try:
                runpy.run_path(str(path), run_name="__main__")
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                with suppress(AttributeError, ValueError):  # the script has closed it
                    sys.stdout.flush()
                hook(type(error), error, _own_traceback(error, path))
                sys.stderr.flush()
                raise
    except SystemExit as error:
        code = _exit_code(error)
    except BaseExceptionGroup:
        code = 1
    else:
        code = 0
    if code:
        # Not where the other one is handled: the shell would print a group once more.
        raise ScriptExit(code)


def _wait_for_files(folder: Path, name: str, run: str) -> SentScript:
    began, said = time.monotonic(), False
    while (sent := _read(folder / name)) is None or sent.run != run:
        waited = time.monotonic() - began
        if waited > _WAIT_S:
            raise FileNotFoundError(f"the files of the script have not come to {folder} within {_WAIT_S:g} s")
        if waited > _SAY_S and not said:
            said = True
            print("waiting for the files of the script", file=sys.stderr, flush=True)
        time.sleep(_LOOK_S)
    return sent


def _read(path: Path) -> SentScript | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=SentScript)
    except (OSError, msgspec.MsgspecError):
        return None


def _remove_others(folder: Path, sent: SentScript) -> None:
    """What was sent before and is not of this run; never what nodes have written. Several nodes of a machine may do it
    at once."""
    before = _read(folder / _BEFORE)
    for path in set(before.paths if before is not None else []) - set(sent.paths):
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            continue
        with suppress(OSError):
            (folder / path).unlink()
        for parent in PurePosixPath(path).parents[:-1]:
            with suppress(OSError):  # something else is in it
                (folder / parent).rmdir()
    with suppress(OSError):
        (folder / _BEFORE).write_bytes(msgspec.json.encode(sent))


def _exit_code(error: SystemExit) -> int:
    """As Python's own: None is 0, a text is printed and means 1."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr, flush=True)
    return 1


def _own_traceback(error: BaseException, path: Path) -> TracebackType | None:
    """From the script's own first line on; None where it cannot be read as Python."""
    entry = error.__traceback__
    while entry is not None and entry.tb_frame.f_code.co_filename != str(path):
        entry = entry.tb_next
    return entry
