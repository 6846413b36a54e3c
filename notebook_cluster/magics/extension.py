"""The magics as functions, and how they come into and out of a shell."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from notebook_cluster.magics.cells import run_cell, visible_names
from notebook_cluster.magics.commands import run_command
from notebook_cluster.magics.completion import make_matcher
from notebook_cluster.magics.errors import CellInterrupted, ClusterProblem, UsageError
from notebook_cluster.magics.parsing import ON, ON_ALL, PUSH, did_you_mean, help_text, parse_cluster, parse_line
from notebook_cluster.magics.push import MOST_REPLAYED, PIECE_BYTES, push_sources
from notebook_cluster.magics.session import Session
from notebook_cluster.magics.targets import resolve

_MAGICS = {"cluster": "line", "push": "line", "on_all": "cell", "on": "cell"}


class Extension:
    """One loaded extension: its session, its magics, its completion."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.session = Session(shell)
        self._matcher = make_matcher(self.session)

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
        functions: dict[str, Callable[..., None]] = {
            "cluster": self._cluster, "push": self._push, "on_all": self._on_all, "on": self._on,
        }  # fmt: skip
        for name, kind in _MAGICS.items():
            self.shell.register_magic_function(functions[name], magic_kind=kind, magic_name=name)
        if hasattr(getattr(self.shell, "Completer", None), "custom_matchers"):
            self.shell.Completer.custom_matchers.append(self._matcher)
        self._hint()

    def unload(self) -> None:
        """Take everything back. A running cluster goes on."""
        for name, kind in _MAGICS.items():
            self.shell.magics_manager.magics[kind].pop(name, None)
        matchers = getattr(getattr(self.shell, "Completer", None), "custom_matchers", [])
        if self._matcher in matchers:
            matchers.remove(self._matcher)
        self.session.end()

    def _hint(self) -> None:
        """A notebook kernel that was restarted: its cluster is still there."""
        from notebook_cluster.client import list_clusters

        name = self.session.default_name
        if name in [file.cluster for file in list_clusters()]:
            print(f"cluster {name!r} is running: %cluster attach comes back to it")

    def _cluster(self, line: str) -> None:
        """Start, steer and end a cluster: %cluster start, %cluster alone shows all there is."""
        call = parse_cluster(line)
        if call is None:
            print(help_text())
            return
        with _plain_errors(f"%cluster {call.command.name}", self.session):
            run_command(self.session, call)

    def _on_all(self, line: str, cell: str) -> None:
        """Run the cell on every node: %%on_all [--timeout S] [--no-replay]."""
        self._run(parse_line(ON_ALL, line).options, cell, None)

    def _on(self, line: str, cell: str) -> None:
        """Run the cell on some nodes: %%on 0,2 or 1-3, mini,desk, cuda, !mini."""
        call = parse_line(ON, line)
        self._run(call.options, cell, call.arguments)

    def _run(self, options: dict[str, Any], cell: str, words: tuple[str, ...] | None) -> None:
        cluster = self.session.require()
        with _plain_errors("%%on_all" if words is None else "%%on", self.session):
            targets = [] if words is None else resolve(words, cluster.state().nodes)
            replay = not options.get("no_replay", False)
            run_cell(cluster, self.shell, cell, targets, timeout=options.get("timeout"), replay=replay)

    def _push(self, line: str) -> None:
        """Send variables to every node: %push NAME... (plain data, numpy arrays, torch tensors, 64 MiB each)."""
        names = parse_line(PUSH, line).arguments
        cluster = self.session.require()
        namespace = self.shell.user_ns
        for name in names:
            if not name.isidentifier() or name not in namespace:
                near = did_you_mean(name, visible_names(self.shell))
                raise UsageError(f"the notebook has no variable {name!r}{near}")
        sources = [source for name in names for source in push_sources(name, namespace[name])]
        replay = sum(map(len, sources)) <= MOST_REPLAYED
        with _plain_errors("%push", self.session):
            for source in _joined(sources):
                # The first line is what panel and run log show of a cell.
                run_cell(cluster, self.shell, f"# %push {' '.join(names)}\n{source}", replay=replay)
            count = sum(node.rank is not None for node in cluster.state().nodes)
        later = "" if replay else "; too large to be kept for nodes that restart or join later: push again then"
        print(f"pushed {', '.join(names)} to {count} node{'' if count == 1 else 's'}{later}")


def _joined(sources: list[str]) -> Iterator[str]:
    """Small cells together, so that pushing ten numbers is one cell."""
    batch: list[str] = []
    size = 0
    for source in sources:
        if batch and size + len(source) > PIECE_BYTES:
            yield "\n".join(batch)
            batch, size = [], 0
        batch.append(source)
        size += len(source)
    if batch:
        yield "\n".join(batch)


@contextmanager
def _plain_errors(what: str, session: Session) -> Iterator[None]:
    """Errors of the client as one line. A cluster that has ended is let go, so that the next line says so."""
    from notebook_cluster.client import ClusterError, list_clusters

    try:
        yield
    except ClusterError as error:
        held = session.cluster
        text = str(error)
        if held is not None and held.name not in [file.cluster for file in list_clusters()]:
            session.let_go()
            if "has ended" in text and "%cluster" not in text:
                text += " (%cluster start begins a new one)"
        raise ClusterProblem(text) from None
    except CellInterrupted:
        raise
    except KeyboardInterrupt:
        raise CellInterrupted(f"{what} was stopped") from None
