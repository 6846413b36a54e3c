"""What rounds of a model take on each node, said before anything is computed: memory, disk and network.

It is counted from the vectors that are there at once at the worst moment of a round: what is held all the time (theta,
momentum, error feedback), what a boundary makes (the contribution), what comes in, and the means that late nodes may
ask for. With overlap also the model as it was at the boundary, and the next state beside the one that is still good:
without it only for a moment while the state is read for a checkpoint or a node that joins, which is not counted.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from notebook_cluster.memory import amount
from notebook_cluster.memory.nameless import existing, is_in_memory
from notebook_cluster.processors import PLACE, count_nodes, machine_memory
from notebook_cluster.rounds.member.state import MemberSettings, most_kept
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.momentum import FLOAT32, NOT_KEPT, check_momentum_dtype, item_size
from notebook_cluster.rounds.numerics.outer import outer_step
from notebook_cluster.training.loop import encoding
from notebook_cluster.training.loop.encoding import encoded
from notebook_cluster.training.settings.arguments import DISK, MEMORY, check_codec, check_state

_TEMPORARY = 32 << 20
"""Bytes, beside the mean of a slice in float32, of what encoding, adding up and decoding of groups takes."""
_TRIED = 1 << 20
"""Elements with which the processor's time is tried out."""
_TCP_SHARE = 0.94
"""Of a cable's bits those that are not headers of Ethernet, IP and TCP."""


@dataclass(frozen=True)
class Costs:
    """In bytes, for one node, beside the model with its gradients and optimizer.

    Attributes:
        parameters: elements of the model that are exchanged.
        memory: at most, in a cell that trains; ``rest``: from its end on, while the job may go on.
        traffic: sent by each node in a round of all fragments, and as much received.
        checkpoint: of one checkpoint, without the optimizer's state.
        disk: of files in place of memory; twice theta and momentum, for a moment in which they are read and change.
    """

    parameters: int
    memory: int
    rest: int
    traffic: int
    checkpoint: int
    disk: int = 0

    @property
    def times(self) -> float:
        """``memory`` in multiples of the model in float32."""
        return self.memory / (4 * self.parameters)

    def seconds(self, bits: float) -> float:
        """The least that a round takes where each node sends and receives ``bits`` a second."""
        return 8 * self.traffic / (bits * _TCP_SHARE)

    def __str__(self) -> str:
        return (
            f"rounds of {self.parameters:,} parameters take up to {amount(self.memory)} of memory beside the model and "
            f"its optimizer ({self.times:.1f} times the model in float32) while a cell trains, {amount(self.rest)} "
            f"after it; each sends {amount(self.traffic)}; a checkpoint has {amount(self.checkpoint)}"
            + (f"; up to {amount(self.disk)} are in files on its disk" if self.disk else "")
        )


def costs_of(
    fragments: Fragments,
    nodes: int,
    *,
    overlap: bool = False,
    exact: bool = True,
    later: bool = True,
    disk: bool = False,
    together: int = 1,
) -> Costs:
    """Of a job of DiLoCo, Local SGD or SparseLoCo on ``nodes`` nodes.

    Args:
        overlap: training goes on while a round is open.
        exact: the model holds float32: what it was loaded with when work was left in it need not be kept.
        disk: theta, momentum and error feedback are in files.
        later: the error feedback of large models is computed when a round is applied, where the one before is (torch).
        together: of the nodes so many are on one machine, and read of each other what they send where it is: each has
            a share of that, as the system counts it.
    """
    whole, wire = 4 * fragments.size, max(one.size for one in fragments.wires)
    part = 4 * max(one.count for one in fragments.wires)
    lossy, several = fragments.codec.lossy, fragments.count > 1
    whole_mean, apart = wire * nodes if fragments.all_gather else wire, nodes - together
    mean, settings = whole_mean * (1 + apart) // nodes, MemberSettings()

    def kept(most: int) -> int:
        """Of means."""
        return min(settings.kept_rounds, most // whole_mean) * mean

    later = later and (disk or fragments.size >= encoding.LATER_FROM)
    kept_now = kept(most_kept(settings, fragments))
    state = whole + item_size(fragments.momentum_dtype) * fragments.size
    held = (overlap and not exact) * whole + (0 if disk else state + lossy * whole)
    boundary = (overlap or several) * part + lossy * (overlap or several or not later) * part
    working = lossy * min(part, _TEMPORARY) + fragments.all_gather * part // (4 * nodes)
    aside = 0 if several or fragments.size >= (settings.in_files_from if disk else settings.in_place_from) else state
    stepping = working + aside + overlap * 2 * whole + several * 4 * part
    if several and lossy and not disk:  # measured: vectors that are kept for the fragments to come
        stepping += 3 * part
    round_open = boundary + wire + wire * apart // nodes + mean + stepping
    late = overlap * (whole + 2 * part) + several * 2 * part
    applied = boundary + mean + overlap * 2 * whole + late
    sent = sum(one.size for one in fragments.wires) * (nodes - 1) // nodes
    return Costs(
        parameters=fragments.size,
        memory=held + kept_now + max(round_open, applied),
        rest=held + min(kept_now, kept(settings.kept_anyway)),
        traffic=sent + (sent * nodes if fragments.all_gather else sent),
        checkpoint=(2 if item_size(fragments.momentum_dtype) else 1) * whole,
        disk=disk * (2 * state + lossy * whole),
    )


def processor_seconds(fragments: Fragments, nodes: int) -> float:
    """How long one node computes for a round of all fragments, tried out on this machine with a million elements: to
    encode its contribution, add up its part of those of all, and take the outer step, once for its hash."""
    small = Fragments(fragments.codec.name, _TRIED, over_senders=fragments.over_senders)
    wire, zeros = small.made_for(1), np.zeros(_TRIED, np.float32)
    values = np.random.default_rng(0).normal(size=_TRIED).astype(np.float32)
    data = encoded(wire, values.__getitem__, zeros.__getitem__, None, np.float32(1))[0]
    decoded = (2 * nodes if fragments.all_gather else 3) + fragments.codec.lossy

    def encode() -> None:
        encoded(wire, values.__getitem__, zeros.__getitem__, None, np.float32(1))

    def step() -> None:
        stepped = outer_step(values, zeros, values, 0.6, 0.9, True)
        small.state_hash(*stepped)

    share = 1 if fragments.all_gather else 1 + 1 / nodes
    seconds = share * _fastest(encode) + decoded * _fastest(lambda: wire.decode(data)) + 2 * _fastest(step)
    return seconds * fragments.size / _TRIED


def _fastest(work: Callable[[], object]) -> float:
    """Seconds, of three times."""

    def once() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return min(once() for _ in range(3))


def ways_out(
    parameters: int, buffers: int = 0, count: int = 1, momentum_dtype: str = FLOAT32
) -> Iterator[tuple[str, Fragments]]:
    """What people may write, with how the model is sent then (in ``count`` fragments): from the exact one to the
    smallest, which is sent as a whole."""
    for codec in ("float32", "int8", "int4"):
        yield f"codec={codec!r}", Fragments(codec, parameters, buffers, count, momentum_dtype=momentum_dtype)
    yield "nc.SparseLoCo", Fragments("sparse", parameters, buffers, over_senders=True, momentum_dtype=NOT_KEPT)


def nodes_here() -> int:
    """Nodes that run on this machine, with this one."""
    place = os.environ.get(PLACE, "")
    return max(1, count_nodes(place)) if place else 1


def check_room(asked: Costs, held: int, nodes: int, others: Iterable[tuple[str, Costs]]) -> str:
    """Whether this machine has what ``asked`` takes, on each of its ``nodes`` nodes.

    Args:
        held: bytes of it that this process has already.
        others: what may be used instead, and what that takes.

    Returns:
        A line for people where the machine may get short of memory; empty where there is enough.

    Raises:
        MemoryError: there is not so much free memory, or not on the machine for so many nodes; says what would fit.
    """
    free, total = machine_memory()
    its = f"its {nodes} nodes" if nodes > 1 else "its node"

    def fits(costs: Costs) -> bool:
        return costs.memory - held <= free and costs.memory * nodes <= total

    if fits(asked):
        needed = (asked.memory - held) * nodes
        return "" if needed <= free else (
            f"{its} may need {amount(needed)} more for their rounds, and this machine has {amount(free)} free: end "
            "what else runs on it, or take fewer of its nodes"
        )  # fmt: skip
    ways = [f"{name} ({amount(costs.memory)})" for name, costs in others if fits(costs)]
    if nodes > 1 and asked.memory <= total and asked.memory - held <= free:
        ways.append(f"at most {total // asked.memory} of its nodes")
    raise MemoryError(
        f"{asked}. This machine has {amount(total)} for {its}, of which {amount(free)} are free: "
        + (f"use {' or '.join(ways)}" if ways else "use a smaller model, or a machine with more memory")
    )


def check_disk(asked: Costs, nodes: int, folder: Path) -> str:
    """Whether the filesystem of ``folder`` has what ``asked`` puts in files, for each of so many ``nodes`` here.

    Returns:
        A line for people where that saves no memory; empty where it does.

    Raises:
        MemoryError: it has not.
    """
    place = existing(folder)
    free = shutil.disk_usage(place).free
    if asked.disk * nodes > free:
        raise MemoryError(
            f"{asked}. The disk of {place} has {amount(free)} free for {nodes} node{'s' if nodes > 1 else ''}: free "
            "some, start the nodes in a folder on another disk, or use state='memory', a smaller codec or "
            "momentum_dtype='bfloat16'"
        )
    return "" if not is_in_memory(place) else (
        f"state='disk' saves no memory here: {place} is kept in memory itself (tmpfs); start the nodes in a folder "
        "on a disk"
    )  # fmt: skip


_RATES = ((1e8, "100 Mbit/s"), (1e9, "1 Gbit/s"), (1e10, "10 Gbit/s"))


def estimate(
    parameters: int, nodes: int, codec: str = "", fragments: int = 1, momentum: str = FLOAT32, state: str = MEMORY
) -> list[list[str]]:
    """Rows for people: the heads of columns, then one for ``codec``, or for each of those to choose from.

    Raises:
        ValueError: there is no such codec or momentum, or the model cannot be sent in so many fragments.
    """
    dtype, on_disk = check_momentum_dtype(momentum), check_state(state) == DISK
    if codec:
        codec = check_codec(codec)
        ways = [(codec, Fragments(codec, parameters, count=fragments, momentum_dtype=dtype))]
    else:
        ways = [*ways_out(parameters, count=fragments, momentum_dtype=dtype)]
    rows = [
        ["codec", "in a cell", "after it", *["in files"] * on_disk, "checkpoint", "sent", *(name for _, name in _RATES)]
    ]
    for name, one in ways:
        costs, computing = costs_of(one, nodes, disk=on_disk and not one.over_senders), processor_seconds(one, nodes)
        rows.append([
            name if one.over_senders else one.codec.name, f"{amount(costs.memory)} ({costs.times:.1f}x)",
            amount(costs.rest), *([amount(costs.disk)] * on_disk), amount(costs.checkpoint), amount(costs.traffic),
            *(_seconds(computing + costs.seconds(bits)) for bits, _ in _RATES),
        ])  # fmt: skip
    return rows


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 100 else f"{value / 60:.0f} min" if value < 6000 else f"{value / 3600:.1f} h"
