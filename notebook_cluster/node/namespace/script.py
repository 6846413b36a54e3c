"""``notebook-cluster run``: a script as the program of this node, as ``python script.py`` would run it."""

import os
import runpy
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

_WAIT_S = 600.0
"""For the files of a script, on a node that came while it runs."""
_SAY_S = 3.0
_LOOK_S = 0.05


class ScriptExit(Exception):
    """A script ended with an exit code other than 0: ``exit code 3``."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")


def run_script(script: str, arguments: Sequence[str], *, base: str, mark: tuple[str, str]) -> None:
    """Run ``script`` (a path relative to the working folder) as ``__main__`` with ``arguments``.

    ``base``: the folder from which it was started; elsewhere the file ``mark[0]`` says ``mark[1]`` once all files of
    the script are there. What the script imported from the working folder is forgotten in the end, so that a script
    that is run again after a change finds the change.

    Raises:
        ScriptExit: it called ``sys.exit`` with another code than 0.
        FileNotFoundError: its files have not come.
        BaseException: whatever it raised; its traceback was printed.
    """
    here = Path.cwd()
    if os.path.realpath(here) != os.path.realpath(base):
        _wait_for_files(here, *mark)
    path = here / script
    if not path.is_file():
        raise FileNotFoundError(f"there is no {script} in {here}")
    try:
        with _as_program(path, arguments, here):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as error:
        code = _exit_code(error)
        if code:
            raise ScriptExit(code) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _print_traceback(error, path)
        raise


def _wait_for_files(here: Path, name: str, run: str) -> None:
    began, said = time.monotonic(), False
    while not _says(here / name, run):
        waited = time.monotonic() - began
        if waited > _WAIT_S:
            raise FileNotFoundError(f"the files of the script have not come to {here} within {_WAIT_S:g} s")
        if waited > _SAY_S and not said:
            said = True
            print("waiting for the files of the script", file=sys.stderr, flush=True)
        time.sleep(_LOOK_S)


def _says(mark: Path, run: str) -> bool:
    try:
        return mark.read_text() == run
    except OSError:
        return False


@contextmanager
def _as_program(path: Path, arguments: Sequence[str], folder: Path) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as a program has them; afterwards they are as before."""
    argv, known = sys.argv, set(sys.modules)
    own = str(path.parent)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, own)
    try:
        yield
    finally:
        sys.argv = argv
        if own in sys.path:
            sys.path.remove(own)
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None)
            if isinstance(file, str) and Path(file).is_relative_to(folder) and not _is_installed(file):
                del sys.modules[name]


def _is_installed(file: str) -> bool:
    """A library of an environment that lies in the working folder."""
    return "site-packages" in file or "dist-packages" in file


def _exit_code(error: SystemExit) -> int:
    """As Python's own: None is 0, a text is printed and means 1."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr, flush=True)
    return 1


def _print_traceback(error: BaseException, path: Path) -> None:
    """As Python prints it: from the script's own first line on."""
    entry: TracebackType | None = error.__traceback__
    while entry is not None and entry.tb_frame.f_code.co_filename != str(path):
        entry = entry.tb_next
    # Without an entry it is not the script's line that is wrong, but that it cannot be read as Python.
    traceback.print_exception(type(error), error, entry)
    sys.stderr.flush()
