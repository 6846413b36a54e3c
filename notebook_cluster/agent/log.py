"""Where the agent's own log goes: a 0600 file for a private agent, the terminal for a shared one."""

import logging
import os
import sys
from pathlib import Path

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_MAX_BYTES = 5 * 1024 * 1024


def log_to_file(path: Path) -> None:
    """Append the log to ``path`` (mode 0600); one that is over 5 MB already begins anew."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)
    if os.fstat(descriptor).st_size > _MAX_BYTES:
        # Not another file: whoever started this process may have stderr in the same one.
        os.ftruncate(descriptor, 0)
    handler = logging.StreamHandler(os.fdopen(descriptor, "w", encoding="utf-8"))
    handler.setFormatter(logging.Formatter(_FORMAT))
    _install(handler)


def log_to_terminal() -> None:
    """Write the log to stderr, with rich's colours where it is a terminal."""
    handler: logging.Handler
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s", datefmt="%X"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT))
    _install(handler)


def _install(handler: logging.Handler) -> None:
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("notebook_cluster").setLevel(logging.INFO)
