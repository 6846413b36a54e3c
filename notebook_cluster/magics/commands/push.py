"""``%push``: variables of the notebook as variables on the nodes. No pickle, in either direction."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from notebook_cluster.magics.display.progress import Progress, amount
from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.execution.cells import run_cell, visible_names
from notebook_cluster.magics.language.parsing import Invocation
from notebook_cluster.magics.language.targets import resolve
from notebook_cluster.magics.session import Session
from notebook_cluster.protocol.names import did_you_mean

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster, Packed


def push(session: Session, cluster: "Cluster", call: Invocation) -> None:
    """Set each named variable on the nodes. Small values are kept in the cluster's cell log, for nodes that come later.

    Raises:
        UsageError: the notebook has no such variable, or an unknown node.
        ClusterError: a value does not travel, or a node has no room for it.
        RemoteError, CellInterrupted: as for any cell.
    """
    from notebook_cluster.client import new_ticket, pack, small_source, take_source, write_value

    shell = session.shell
    names = call.names
    for name in names:
        if not name.isidentifier() or name not in shell.user_ns:
            raise UsageError(f"the notebook has no variable {name!r}{did_you_mean(name, visible_names(shell))}")
    nodes = cluster.state().nodes
    words = call.options.get("to", ())
    targets = resolve(words or ("all",), nodes)
    large: list[str] = []
    # Each value is made only when it is its turn: two copies of one are enough.
    small: list[Packed] = []
    for name in names:
        packed = pack(name, shell.user_ns[name])
        if packed.is_small:
            small.append(packed)
            continue
        large.append(name)
        ticket = new_ticket()
        with Progress(shell, f"pushing {name}") as progress:
            write_value(cluster, ticket, packed, targets, progress)
        source = f"# %push {name} ({amount(packed.size)})\n{take_source(packed, ticket)}"
        run_cell(cluster, shell, source, targets if words else (), replay=False)
    for batch in _batches(small):
        # The first line is what panel and journal show of a cell.
        first = f"# %push {' '.join(packed.name for packed in batch)}"
        source = "\n".join([first, *map(small_source, batch)])
        run_cell(cluster, shell, source, targets if words else ())
    count = f"{len(targets)} node{'' if len(targets) == 1 else 's'}"
    later = f"; nodes that restart or join later do not get {', '.join(large)}: push again then" if large else ""
    print(f"pushed {', '.join(names)} to {', '.join(targets) if words else count}{later}")


def _batches(small: "Sequence[Packed]") -> "Iterator[list[Packed]]":
    """Small values together, so that pushing ten numbers is one cell."""
    from notebook_cluster.client import MOST_REPLAYED

    batch: list[Packed] = []
    for packed in small:
        if batch and sum(other.size for other in batch) + packed.size > MOST_REPLAYED:
            yield batch
            batch = []
        batch.append(packed)
    if batch:
        yield batch
