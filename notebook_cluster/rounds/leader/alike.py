"""Whether nodes train one model together: what no check of a round can see, for its numbers are all in order.

What is not trained does not travel, and has to be the same on all nodes.

Nodes of one framework have the same frozen parameters: names, shapes, dtypes and values. One with torch and one with
MLX may keep them under other names, or quantised in another way, and train one model all the same: of these, what is
called alike, of one shape and dtype, has to have the same values, and that the rest was not compared is told.

Buffers that no round averages may well differ (what a module has gathered of its own batches), so a difference in one
is told and nobody is refused: made at random they are as much a part of the model as a frozen parameter.

So is what a round's work shows: optimizers that step unlike where each node makes the step, steps that change nothing,
nodes that do the same work.
"""

from collections.abc import Mapping

from notebook_cluster.protocol.rounds import Arrived
from notebook_cluster.protocol.runs import FrozenRow, Register
from notebook_cluster.rounds.leader.state import JobState, Transition

_MOST_NAME, _MOST_SIZES, _MOST_FACTS, _MOST_SETTINGS = 200, 16, 16, 240
"""What a line says of a name, a shape, nodes, and an optimizer."""
_MANY_STEPS = 10
"""So many may do nothing: a warm-up begins at a learning rate of 0, and a scaler of gradients skips its first steps."""
_SAME_ROUNDS = 2
"""In a row, before nodes that do the same are told of: the first steps of some optimizers are alike for all data."""


def frozen_difference(register: Register, reference: Register, node: str, reference_node: str) -> str:
    """One line that names the first frozen parameter in which ``node`` differs from the reference, or empty. A hash
    that is missing on one of them differs from none."""
    name = first_frozen(register, reference)
    if name is None:
        return ""
    difference = _difference(name, register.frozen, reference.frozen, node, reference_node)
    return (
        f"frozen parameters differ: {difference}. They do not travel, so load the same base on every node (after the "
        "same torch.manual_seed where it is made at random, or with nc.broadcast); check_frozen=False where that is on "
        "purpose"
    )


def first_frozen(register: Register, reference: Register) -> str | None:
    """The first frozen parameter in which they differ; None: in none."""
    return _first(register.frozen, reference.frozen, register.framework == reference.framework)


def buffers_difference(register: Register, reference: Register, node: str, reference_node: str) -> str:
    """One line that names the first buffer in which ``node`` differs from the reference, or empty."""
    name = _first(register.other_buffers, reference.other_buffers, register.framework == reference.framework)
    if name is None:
        return ""
    difference = _difference(name, register.other_buffers, reference.other_buffers, node, reference_node)
    return (
        f"buffers of {register.job!r} differ: {difference}. No round sends or averages that one, so each node trains "
        "another model with its own: make it alike on every node (after the same torch.manual_seed where it is made at "
        "random, or with nc.broadcast); check_frozen=False where it is meant to differ"
    )


def _first(mine: list[FrozenRow] | None, theirs: list[FrozenRow] | None, one_framework: bool) -> str | None:
    if mine is None or theirs is None or mine == theirs:
        return None
    here, there = _rows(mine), _rows(theirs)
    for name in sorted(here.keys() | there.keys()):
        one, other = here.get(name), there.get(name)
        if one is None or other is None or one[1:3] != other[1:3]:
            if one_framework:
                return name
        elif one[3] and other[3] and one[3] != other[3]:
            return name
    return None


def not_compared(register: Register, reference: Register, node: str, reference_node: str) -> str:
    """One line where nodes of two frameworks have frozen parameters that cannot be compared, or empty."""
    if register.frozen is None or reference.frozen is None or register.framework == reference.framework:
        return ""
    mine, theirs = _rows(register.frozen), _rows(reference.frozen)
    same = sum(name in theirs and row[1:3] == theirs[name][1:3] for name, row in mine.items())
    rest = max(len(mine), len(theirs)) - same
    if not rest:
        return ""
    return (
        f"of the frozen parameters of {node} ({register.framework}) and {reference_node} ({reference.framework}) "
        f"{same} were compared, {rest} have other names, shapes or dtypes: whether those are of one base is not known"
    )


def first_of_most(registers: list[Register]) -> int:
    """The first, in rank order, whose frozen parameters are those of more than half; 0 where there is no such half.
    Only those count whose trainable parameters are like the first one's."""
    alike = [index for index, one in enumerate(registers) if one.schema_hash == registers[0].schema_hash]
    for index in alike:
        same = sum(first_frozen(registers[other], registers[index]) is None for other in alike)
        if 2 * same > len(alike):
            return index
    return 0


def _rows(rows: list[FrozenRow] | None) -> dict[str, FrozenRow]:
    return {row[0]: row for row in rows or ()}


def _difference(
    name: str, mine: list[FrozenRow] | None, theirs: list[FrozenRow] | None, node: str, reference_node: str
) -> str:
    here, there = _rows(mine).get(name), _rows(theirs).get(name)
    if here is not None and there is not None and here[1:3] == there[1:3]:
        return f"{name[:_MOST_NAME]!r} has other values on {node} than on {reference_node}"
    return f"{node} has {_told(name, here)}, {reference_node} has {_told(name, there)}"


def _told(name: str, row: FrozenRow | None) -> str:
    said = repr(name[:_MOST_NAME])
    return (
        f"no {said}" if row is None else f"{said} {'x'.join(map(str, row[1][:_MOST_SIZES])) or 'scalar'} {row[2][:16]}"
    )


# ---- what the work of a round shows ----------------------------------------------------------------------------


def tell_unlike_steps(transition: Transition, job: JobState, arrivals: Mapping[str, Arrived]) -> None:
    """Say which nodes step with other settings than the lowest rank, where each makes the step of a round itself:
    nothing else would find that, for all get the same mean. ``arrivals`` are in rank order."""
    steps = {
        name: "".join(filter(str.isprintable, arrived.optimizer[:_MOST_SETTINGS])) for name, arrived in arrivals.items()
    }
    stepping = [name for name, text in steps.items() if text]
    differ = tuple(name for name in stepping if steps[name] != steps[stepping[0]])
    if not set(differ) <= set(job.steps_differ):
        said = ", ".join(f"{name!r} {steps[name]}" for name in (stepping[0], *differ)[:_MOST_FACTS])
        transition.tell(
            "warning",
            f"optimizers of {job.name!r} differ in round {job.round + 1} ({said}): every node makes the step itself, "
            "so the models drift apart; make optimizer and schedule alike, with as many steps, on all nodes",
            in_cell=True,
        )
    job.steps_differ = (*differ, *(name for name in job.steps_differ if name not in steps))


def tell_unchanged(transition: Transition, job: JobState, arrivals: Mapping[str, Arrived]) -> None:
    """Say whose steps have changed nothing, over a round of each fragment at least: what is trained is another model
    than the one that is averaged, which no error would ever show."""
    round, before = job.round + 1, job.unchanged
    now = dict(before)
    for name, arrived in arrivals.items():
        last, rounds, steps = before.get(name, (0, 0, 0))
        if last != round and arrived.steps > 0 and arrived.finite:  # a round that is sealed again counts once
            now[name] = (round, 0, 0) if arrived.norm else (round, rounds + 1, min(steps + arrived.steps, _MANY_STEPS))
    job.unchanged = now
    found = [name for name in arrivals if _unchanged(job, now, name) and not _unchanged(job, before, name)]
    if found and first_time(job, "unchanged", *found):
        who = ", ".join(map(repr, found[:_MOST_FACTS]))
        what = "all gradients are 0" if job.settings.every_step else "the steps of the loop change nothing in it"
        transition.tell(
            "warning",
            f"the model of {job.name!r} is not trained on {who}: {what}. Is it the one that the loop and its optimizer "
            f"have (not made anew after the sync object), and is the learning rate above 0{_too_small(job)}?",
            in_cell=True,
        )


def _too_small(job: JobState) -> str:
    """What steps are lost in as well that are too small for it."""
    other = sorted({row[2][:16] for row in job.settings.schema} - {"float32"})
    if job.settings.every_step or not other:
        return ""
    if other == ["float64"]:
        return ", and large enough to change float32, in which rounds are (a float64 model keeps no more after one)"
    return f", and large enough to change a number in {' or '.join(other)}"


def tell_same_work(transition: Transition, job: JobState, arrivals: Mapping[str, Arrived]) -> None:
    """Say which nodes bring the same contribution, to the bit, one round after the other: they have the same data, and
    are together no faster than one of them."""
    round, groups = job.round + 1, dict[tuple[object, ...], list[str]]()
    for name, arrived in arrivals.items():
        if arrived.samples and arrived.norm and arrived.sample:
            groups.setdefault((arrived.sample, arrived.norm, arrived.steps), []).append(name)
    same = max(groups.values(), key=len, default=[])
    last, names, rounds = job.same_work
    if len(same) < 2:
        job.same_work = (round, (), 0)
    elif last != round:  # a round that is sealed again counts once
        job.same_work = (round, tuple(same), rounds + 1 if names == tuple(same) else 1)
        if job.same_work[2] >= _SAME_ROUNDS and first_time(job, "same work", *same):
            transition.tell(
                "warning",
                f"{', '.join(map(repr, same[:_MOST_FACTS]))} did the same work for {job.name!r} in rounds {round - 1} "
                f"and {round}, to the bit: with the same data in the same order they are no faster than one node. "
                "nc.shard(data, batch_size=...) gives each its part; where you shuffle yourself, do it after "
                "torch.manual_seed(nc.rank())",
                in_cell=True,
            )


def first_time(job: JobState, what: str, *names: str) -> bool:
    """Whether ``what`` was not told of one of these nodes in this cell; from now on it was."""
    told = job.told[1] if job.told[0] == job.cell else frozenset()
    new = {(what, name) for name in names}
    job.told = job.cell, told | new
    return not new <= told


def _unchanged(job: JobState, rows: Mapping[str, tuple[int, int, int]], name: str) -> bool:
    _, rounds, steps = rows.get(name, (0, 0, 0))
    return rounds >= job.settings.fragments and steps >= _MANY_STEPS
