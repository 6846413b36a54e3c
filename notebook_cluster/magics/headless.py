"""Whether somebody is there: to click, and to answer."""

import sys
from typing import Any


def is_headless(shell: Any) -> bool:
    """True when nobody can click: nbclient and papermill say so by refusing input, a terminal has no widgets."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return True
    parent = kernel.get_parent() or {}
    return not parent.get("content", {}).get("allow_stdin", True)


def can_ask(shell: Any) -> bool:
    """Whether somebody is there to answer: nbclient and papermill say no; a terminal must be one."""
    if getattr(shell, "kernel", None) is not None:
        return not is_headless(shell)
    return sys.stdin is not None and sys.stdin.isatty()
