"""Environment variables that stand from a call to the end of its cell: those by which other launchers' code knows its
world. Set all the time they would make libraries form groups that nobody asked for."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from notebook_cluster.node.namespace.api import node_runtime
from notebook_cluster.node.runtime.world import find, jax_variables
from notebook_cluster.protocol.node import NodeAddress

if TYPE_CHECKING:
    from notebook_cluster.node.runtime.node_runtime import NodeRuntime


def jax_distributed() -> dict[str, str | int]:
    """What ``jax.distributed.initialize`` wants to know about the nodes that run this cell, as its arguments::

        jax.distributed.initialize(**nc.jax_distributed())

    JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID and JAX_NUM_PROCESSES are set as well, until the cell ends. The group is
    JAX's own: it is not encrypted and lives as long as the kernel, or until ``jax.distributed.shutdown()``.

    Raises:
        RuntimeError: a node of the cell has left the cluster.
    """
    runtime = node_runtime("jax_distributed")
    rows = rows_of(runtime, runtime.collectives.names("jax_distributed"), "jax_distributed")
    values = jax_variables(next(row for row in rows if row.name == runtime.name), rows)
    set_until_cell_end(runtime, values)
    return {
        "coordinator_address": values["JAX_COORDINATOR_ADDRESS"],
        "num_processes": int(values["JAX_NUM_PROCESSES"]),
        "process_id": int(values["JAX_PROCESS_ID"]),
    }


def rows_of(runtime: "NodeRuntime", names: list[str], operation: str) -> list[NodeAddress]:
    """The rows of the nodes ``names``, for ``operation``.

    Raises:
        RuntimeError: one is in the cluster no more.
    """
    roster = runtime.roster
    rows = [find(roster, name) if roster is not None else None for name in names]
    missing = [name for name, row in zip(names, rows, strict=True) if row is None]
    if missing:
        raise RuntimeError(f"{operation}: {', '.join(missing)} left the cluster: run the cell again")
    return [row for row in rows if row is not None]


def set_until_cell_end(runtime: "NodeRuntime", values: Mapping[str, str]) -> None:
    """Put ``values`` into the environment; at the end of the cell what was there before is there again."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    runtime.at_cell_end(lambda status: _put_back(values, before))


def _put_back(values: Mapping[str, str], before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if os.environ.get(name) != values[name]:
            continue  # the cell has set another one, which is its own
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
