"""Whether what nodes do not train, which does not travel, is the same on all of them.

Nodes of one framework have the same frozen parameters: names, shapes, dtypes and values. One with torch and one with
MLX may keep them under other names, or quantised in another way, and train one model all the same: of these, what is
called alike, of one shape and dtype, has to have the same values, and that the rest was not compared is told.

Buffers that no round averages may well differ (what a module has gathered of its own batches), so a difference in one
is told and nobody is refused: made at random they are as much a part of the model as a frozen parameter.
"""

from notebook_cluster.protocol.runs import FrozenRow, Register

_MOST_NAME, _MOST_SIZES = 200, 16
"""What a line says of a name and of a shape."""


def frozen_difference(register: Register, reference: Register, node: str, reference_node: str) -> str:
    """One line that names the first frozen parameter in which ``node`` differs from the reference, or empty. A hash
    that is missing on one of them differs from none."""
    name = first_frozen(register, reference)
    if name is None:
        return ""
    here, there = _rows(register.frozen).get(name), _rows(reference.frozen).get(name)
    return (
        f"frozen parameters differ: {_difference(name, here, there, node, reference_node)}. They do not travel, so load the same base on every node (after the "
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
    here, there = _rows(register.other_buffers).get(name), _rows(reference.other_buffers).get(name)
    return (
        f"buffers of {register.job!r} differ: {_difference(name, here, there, node, reference_node)}. No round sends or "
        "averages that one, so each node trains another model with its own: make it alike on every node (after the "
        "same torch.manual_seed where it is made at random, or with nc.broadcast); check_frozen=False where it is "
        "meant to differ"
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


def _difference(name: str, here: FrozenRow | None, there: FrozenRow | None, node: str, reference_node: str) -> str:
    if here is not None and there is not None and here[1:3] == there[1:3]:
        return f"{name[:_MOST_NAME]!r} has other values on {node} than on {reference_node}"
    return f"{node} has {_told(name, here)}, {reference_node} has {_told(name, there)}"


def _told(name: str, row: FrozenRow | None) -> str:
    said = repr(name[:_MOST_NAME])
    return (
        f"no {said}" if row is None else f"{said} {'x'.join(map(str, row[1][:_MOST_SIZES])) or 'scalar'} {row[2][:16]}"
    )
