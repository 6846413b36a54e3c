"""Errors as people see them in a notebook, one line or a few, and how a cell's end is told by one.

Never a traceback through this package: one line for each error, with the nodes that had it and the way out.
"""

import contextlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from IPython.core.error import UsageError

from notebook_cluster.protocol.views import CellEnded, NodeResult

__all__ = [
    "CellInterrupted", "CellSyntaxError", "CellTimeout", "ClusterProblem", "RemoteError", "UsageError",
    "interrupted_text", "reason_of", "remote_error", "shortened", "stopped_error",
]  # fmt: skip


class _Short(Exception):
    """An error whose message is the whole story: IPython shows it without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[31m{type(self).__name__}\x1b[39m: {self}"]


class RemoteError(_Short):
    """A cell failed on at least one node; the message has a line for each of them.

    The nodes' own tracebacks were shown already, in the output of each node.
    """


class ClusterProblem(_Short):
    """The cluster refused or could not do what was asked; the message names the way out."""


class CellTimeout(_Short, TimeoutError):
    """A cell ran longer than its ``--timeout``, or one with ``--async`` than its ``.wait()`` was given."""


class CellSyntaxError(_Short):
    """The cell is not Python: found in the notebook, so that it is said once and nothing is sent.

    Not a SyntaxError, because IPython would show the frames of this package for one.
    """

    def _render_traceback_(self) -> list[str]:
        return str(self.args[1] if len(self.args) > 1 else self).splitlines()

    def __str__(self) -> str:
        return str(self.args[0])


class CellInterrupted(KeyboardInterrupt):
    """Stop was pressed: the cell ends so that Run All stops, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[31mKeyboardInterrupt\x1b[39m: {self}"]


# Frontends, nbclient and papermill show and compare the class names.
ClusterProblem.__name__ = "ClusterError"
CellTimeout.__name__ = "TimeoutError"
CellSyntaxError.__name__ = "SyntaxError"
CellInterrupted.__name__ = "KeyboardInterrupt"

_LOG_LINES = 5
_MOST_CHARACTERS = 300


def remote_error(ended: CellEnded, label: Callable[[str], str], notebook_names: frozenset[str]) -> RemoteError:
    """The error of a cell that failed. Nodes that only missed another one in a collective come last."""
    failed = {name: result for name, result in ended.results.items() if result.status not in ("ok", "interrupted")}
    ordered = sorted(failed.items(), key=lambda entry: (entry[1].status == "cancelled", _is_consequence(entry[1])))
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, result in ordered:
        groups.setdefault(tuple(_describe(name, result, notebook_names)), []).append(name)
    ran = sum(result.status != "cancelled" for result in failed.values())
    where = f"failed on {ran} of {len(ended.results)} nodes" if ran else "did not run"
    lines = [f"cell {ended.cell} {where}"]
    for (first, *more), names in groups.items():
        lines += [f"  {_who(names, label, len(ended.results))}{first}", *more]
    return RemoteError("\n".join(lines))


def stopped_error(ended: CellEnded) -> CellInterrupted | CellTimeout:
    """The error of a cell that was interrupted: by Stop, or by its own ``--timeout``."""
    if ended.reason:
        return CellTimeout(f"cell {ended.cell} {ended.reason}")
    return CellInterrupted(interrupted_text(ended, ended.results))


def interrupted_text(ended: CellEnded | None, results: Mapping[str, NodeResult]) -> str:
    """What Stop did, for the KeyboardInterrupt that ends the cell."""
    if ended is None:
        return "some nodes did not stop in time: they are killed and restarted"
    reasons = [f"{name}: {result.reason}" for name, result in results.items() if result.reason]
    text = f"cell {ended.cell} was stopped" if ended.status != "ok" else f"cell {ended.cell} had finished on every node"
    return "\n  ".join([text, *map(_one_line, reasons)])


def reason_of(result: NodeResult) -> str:
    """Why a node has no value, on one line."""
    if result.status in ("lost", "cancelled"):
        return _one_line(result.reason or "another node failed first")
    if result.status == "interrupted":
        return "interrupted"
    text = f"{result.error_name}: {result.error_value}" if result.error_value else result.error_name
    return _one_line(text) + _hint(text)


def _is_consequence(result: NodeResult) -> bool:
    return result.error_name == "PeerLost"


def _who(names: Sequence[str], label: Callable[[str], str], nodes: int) -> str:
    """The nodes that had the same error: a typing error in a class of thirty is one line."""
    if len(names) == 1:
        return label(names[0])
    if len(names) == nodes:
        return f"all {nodes} nodes"
    return shortened(sorted(names))


def shortened(names: Sequence[str], most: int = 8) -> str:
    """``mini, desk and 4 more``: at most so many names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _describe(name: str, result: NodeResult, notebook_names: frozenset[str]) -> list[str]:
    """What stands behind the node's label, and further lines."""
    if result.status == "lost":
        text = f" was lost: {_one_line(result.reason or 'no reason known')}"
        way_out = f"%cluster restart {name}"
        if way_out not in text:
            text += f"; {way_out} brings it back"
        return [text, *(f"    | {_one_line(line)}" for line in result.log_tail[-_LOG_LINES:])]
    if result.status == "cancelled":
        return [f" did not run it: {_one_line(result.reason or 'another node failed first')}"]
    what = result.error_name or result.reason or "failed"
    text = ": " + _one_line(f"{what}: {result.error_value}" if result.error_value else what)
    if result.error_name == "StdinNotImplementedError":
        text += "; nobody can be asked while it runs (--async, nbclient, papermill): %push sends what it needs"
    missing = _missing_name(result, notebook_names)
    if missing and "%push" not in text:
        text += f"; {missing!r} is in the notebook but not there: %push {missing} sends it"
    text += _missing_module(result) + _missing_file(result)
    text += _hint(f"{what}: {result.error_value}")
    if result.error_name and result.reason:
        text += f"; {_one_line(result.reason)}"
    return [text]


def _missing_name(result: NodeResult, notebook_names: frozenset[str]) -> str:
    """The name in a NameError that the notebook has."""
    if result.error_name != "NameError":
        return ""
    return next((word for word in result.error_value.split("'")[1::2] if word in notebook_names), "")


def _hint(error: str) -> str:
    return next((f"; {hint}" for found, hint in _HINTS if found.search(error)), "")


_HINTS = (
    (
        re.compile("out of memory|Unable to allocate"),
        "it can take a smaller batch than the others, with samples=len(x) in sync.step()",
    ),
    (
        re.compile(
            "not compiled with CUDA|No CUDA GPUs|no NVIDIA driver|on the same device|weight type|on a CUDA device"
        ),
        "device, which every node has, is its own: model.to(device), x.to(device), map_location=device",
    ),
    (
        re.compile("not found or corrupted|BadZipFile|BadGzipFile|ended before the end-of-stream|ReadError"),
        "where nodes of one machine download into one folder, with nc.one_node_first(): around it lets one do it first",
    ),
    (
        re.compile("UsageError: .* magic .*%(cluster|on_all|on|push|pull)` not found"),
        "it works in the notebook, in a cell that does not begin with %%on_all",
    ),
    (
        re.compile("'(LOCAL_)?(RANK|WORLD_SIZE)'|group has not been initialized|env:// rendezvous|process group twice"),
        "nc.torch_distributed() in place of init_process_group() sets what torchrun does; nc.DiLoCo needs none",
    ),
)
"""What users of one machine, or of torchrun, meet first on several, as torch says it, and the way out."""

_DISTRIBUTIONS = {
    "bs4": "beautifulsoup4", "cv2": "opencv-python", "PIL": "pillow", "skimage": "scikit-image",
    "sklearn": "scikit-learn", "yaml": "pyyaml",
}  # fmt: skip
"""What the package is called that brings a module of another name."""


def _missing_module(result: NodeResult) -> str:
    """Where a node lacks a module: it is the notebook's own, or one to install."""
    words = result.error_value.split("'") if result.error_name == "ModuleNotFoundError" else []
    name = words[1].partition(".")[0] if len(words) > 1 else ""
    if not name.isidentifier():
        return ""
    if result.error_value.startswith("No module named 'google.colab"):
        return "; only Colab has it"
    for path in (f"{name}.py", name):
        if Path(path).exists():
            return f"; {path} is in the notebook's folder: %cluster send {path} brings it there"
    return f"; an %%on_all cell with %pip install {_DISTRIBUTIONS.get(name, name)} installs it there"


def _missing_file(result: NodeResult) -> str:
    """Where a node lacks a file that lies in the notebook's folder. Of no other place, and of nothing hidden: what to
    send is said by the node, and it could be a key."""
    by_run = result.error_value.startswith("File `")  # of %run
    words = result.error_value.split("'") if by_run or result.error_name == "FileNotFoundError" else []
    if len(words) < 3 or not words[-2]:
        return ""
    here = Path.cwd()
    with contextlib.suppress(OSError, ValueError):  # a name that this system cannot have, or another folder's
        path = (here / words[-2]).resolve().relative_to(here.resolve())
        if path.parts and not any(part.startswith(".") for part in path.parts) and (here / path).exists():
            quoted = shlex.quote(str(path))
            return f"; {quoted} is in the notebook's folder: %cluster send {quoted} brings it into the node's"
    return ""


def _one_line(text: str) -> str:
    """Of an error that has another one's traceback in it, as that of a DataLoader's worker, what was raised there."""
    head, mark, rest = text.partition("Original Traceback (most recent call last):")
    if mark and rest.strip():
        text = f"{head.strip().rstrip('.:')}: {rest.strip().splitlines()[-1]}"
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + " ..."
