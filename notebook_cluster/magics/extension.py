"""The magics as functions, and how they come into and out of a shell."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from notebook_cluster.magics.cluster_command import run_command
from notebook_cluster.magics.completion import RemoteNames, make_matcher
from notebook_cluster.magics.errors import CellInterrupted, ClusterProblem, RemoteError, UsageError
from notebook_cluster.magics.execution.cells import run_cell
from notebook_cluster.magics.execution.handle import CellHandle, start_cell
from notebook_cluster.magics.execution.node_values import NodeValues
from notebook_cluster.magics.grammar import ON, ON_ALL, PULL, PUSH, Command
from notebook_cluster.magics.parsing import (
    choose_canary,
    help_on,
    help_text,
    parse_cluster,
    parse_line,
    resolve,
    wants_help,
)
from notebook_cluster.magics.session import LOCAL, NotebookSession, StickyCells, show_mark
from notebook_cluster.magics.transfer_commands import pull, push
from notebook_cluster.protocol.state import NodeView

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster

_MISPLACED = {"%on_all": "line", "%on": "line"}
"""``%%on_all`` below other lines, as IPython reads it."""
_HOISTED = re.compile(rf"(%%on_all|%%on|{LOCAL})(\s|$)")
_MAGICS = {"cluster": "line", "push": "line", "pull": "line", "on_all": "cell", "on": "cell"}


class Extension:
    """One loaded extension: its session, its magics, its completion."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.session = NotebookSession(shell)
        self._matcher = make_matcher(self.session)
        self._sticky = StickyCells(self.session)
        self._remote_names = RemoteNames(self.session)

    def load(self) -> None:
        """Register the magics, and say when a cluster of this notebook's name is running.

        Raises:
            UsageError: this kernel is itself a node.
        """
        node = os.environ.get("NOTEBOOK_CLUSTER_NODE")
        if node:
            raise UsageError(
                f"this kernel is node {node!r} of a cluster: %load_ext notebook_cluster belongs in the notebook, "
                "in a cell without %%on_all"
            )
        functions: dict[str, Callable[..., Any]] = {
            "cluster": self._cluster, "push": self._push, "pull": self._pull, "on_all": self._on_all, "on": self._on,
        }  # fmt: skip
        for name, kind in _MAGICS.items():
            self.shell.register_magic_function(functions[name], magic_kind=kind, magic_name=name)
        for name, kind in _MISPLACED.items():
            self.shell.register_magic_function(_misplaced(name), magic_kind=kind, magic_name=name)
        self.shell.input_transformers_cleanup.append(comments_below)
        if hasattr(getattr(self.shell, "Completer", None), "custom_matchers"):
            self.shell.Completer.custom_matchers += [self._matcher, self._remote_names.matcher]
        self._remote_names.load(getattr(self.shell, "kernel", None))
        self._sticky.load()
        self._hint()

    def unload(self) -> None:
        """Take everything back. A running cluster goes on."""
        for name, kind in (_MAGICS | _MISPLACED).items():
            self.shell.magics_manager.magics[kind].pop(name, None)
            self.shell.magics_manager.lazy_magics.pop(name, None)
        if comments_below in self.shell.input_transformers_cleanup:
            self.shell.input_transformers_cleanup.remove(comments_below)
        matchers = getattr(getattr(self.shell, "Completer", None), "custom_matchers", [])
        for matcher in (self._matcher, self._remote_names.matcher):
            if matcher in matchers:
                matchers.remove(matcher)
        self._remote_names.unload()
        self._sticky.unload()
        self.session.end()

    def _hint(self) -> None:
        """A notebook kernel that was restarted: its cluster is still there."""
        from notebook_cluster.client import running_clusters

        name = self.session.default_name
        with suppress(OSError):  # %cluster start says what it is
            if name in running_clusters():
                print(f"cluster {name!r} is running: %cluster attach comes back to it")

    def _cluster(self, line: str) -> Any:
        """Start, steer and end a cluster: %cluster start, %cluster alone shows all there is."""
        call = parse_cluster(line)
        if call is None:
            print(help_on(line))
            return None
        with _plain_errors(f"%cluster {call.command.name}", self.session):
            return run_command(self.session, call)

    def _on_all(self, line: str, cell: str) -> CellHandle | None:
        """Run the cell on every node: %%on_all [--timeout S] [--no-replay] [--async] [-o VAR] [--canary [NODE]]."""
        return None if _helped(ON_ALL, line) else self._run(parse_line(ON_ALL, line).options, cell, None)

    def _on(self, line: str, cell: str) -> CellHandle | None:
        """Run the cell on some nodes: %%on 0,2 or 1-3, mini,desk, cuda, vram>=8GB, !mini; options as %%on_all."""
        if _helped(ON, line):
            return None
        call = parse_line(ON, line)
        return self._run(call.options, cell, call.arguments)

    def _run(self, options: dict[str, Any], cell: str, words: tuple[str, ...] | None) -> CellHandle | None:
        added = self._sticky.take_added()
        cluster = self.session.require()
        with _plain_errors("%%on_all" if words is None else "%%on", self.session):
            if added:
                show_mark(self.session, cluster)
            nodes = cluster.state().nodes if words is not None or "canary" in options else []
            targets = [] if words is None else resolve(words, nodes)
            return _run_with_options(self.session, cluster, cell, targets, nodes, options)

    def _push(self, line: str) -> None:
        """Send variables to every node: %push NAME... [--to TARGETS] (plain data, numpy, torch, MLX, pandas)."""
        if _helped(PUSH, line):
            return
        call = parse_line(PUSH, line)
        cluster = self.session.require()
        with _plain_errors("%push", self.session):
            push(self.session, cluster, call)

    def _pull(self, line: str) -> None:
        """Bring variables of the nodes here, as {node: value}: %pull NAME... [--from TARGETS] [--as VAR]."""
        if _helped(PULL, line):
            return
        call = parse_line(PULL, line)
        cluster = self.session.require()
        with _plain_errors("%pull", self.session):
            pull(self.session, cluster, call)


def comments_below(lines: list[str]) -> list[str]:
    """The lines of a cell with ``%%on_all`` before the comments that stand above it, for IPython knows a cell magic in
    the first line alone. Each line of the code keeps its number."""
    first = next((index for index, line in enumerate(lines) if not _COMMENT.match(line)), 0)
    if not first or not _HOISTED.match(lines[first]):
        return lines
    return [lines[first].rstrip("\n") + "\n", *lines[:first], *lines[first + 1 :]]


_COMMENT = re.compile(r"\s*(#|$)")


def _misplaced(name: str) -> Callable[[str], None]:
    def say(line: str) -> None:
        raise UsageError(f"%{name} has to be the first line of its cell: put what is above it into a cell of its own")

    return say


def _helped(command: Command, line: str) -> bool:
    """Whether ``line`` asked what ``command`` does, which is printed."""
    asked = wants_help(line)
    if asked:
        print(help_text(command))
    return asked


def _run_with_options(
    session: NotebookSession,
    cluster: "Cluster",
    source: str,
    targets: Sequence[str],
    nodes: Sequence[NodeView],
    options: dict[str, Any],
) -> CellHandle | None:
    """Run ``source`` on ``targets`` (empty: all) as ``options`` say; ``nodes`` are those of the cluster, for a canary.

    Raises:
        UsageError: a canary that is none.
        CellSyntaxError, RemoteError, CellInterrupted, ClusterError: as :func:`.cells.run_cell`.
    """
    how: dict[str, Any] = {"timeout": options.get("timeout"), "replay": not options.get("no_replay", False)}
    if "canary" in options:
        how["canary"] = choose_canary(options["canary"], targets, nodes)
    variable = options.get("output")
    if options.get("async"):
        if not source.strip():
            return None
        handle = start_cell(cluster, session.shell, source, targets, **how)
        session.handles.append(handle)
        if variable:
            session.shell.user_ns[variable] = handle
        return handle
    if not variable:
        run_cell(cluster, session.shell, source, targets, **how)
        return None
    values = NodeValues()
    try:
        run_cell(cluster, session.shell, source, targets, values=values, **how)
    except (RemoteError, CellInterrupted):
        session.shell.user_ns[variable] = values.in_rank_order()
        raise
    session.shell.user_ns[variable] = values.in_rank_order()
    return None


@contextmanager
def _plain_errors(what: str, session: NotebookSession) -> Iterator[None]:
    """Errors of the client as one line. A cluster that has ended is let go, so that the next line says so."""
    from notebook_cluster.client import ClusterError, running_clusters

    try:
        yield
    except ClusterError as error:
        held = session.cluster
        text = str(error)
        if held is not None and held.name not in running_clusters():
            if session.sticky:
                text += "; cells run in the notebook again"
            session.let_go()
            if "has ended" in text and "%cluster" not in text:
                text += " (%cluster start begins a new one)"
        raise ClusterProblem(text) from None
    except OSError as error:
        from notebook_cluster.security import CannotWrite, in_words

        if isinstance(told := in_words(error), CannotWrite):
            raise ClusterProblem(str(told)) from None
        raise
    except CellInterrupted:
        raise
    except KeyboardInterrupt:
        raise CellInterrupted(f"{what} was stopped") from None
