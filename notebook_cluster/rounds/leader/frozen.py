"""Whether what nodes do not train, which does not travel, is the same on all of them.

Nodes of one framework have the same frozen parameters: names, shapes, dtypes and values. One with torch and one with
MLX may keep them under other names, or quantised in another way, and train one model all the same: of these, what is
called alike, of one shape and dtype, has to have the same values, and that the rest was not compared is told.
"""

from notebook_cluster.protocol.runs import FrozenRow, Register


def frozen_difference(register: Register, reference: Register, node: str, reference_node: str) -> str:
    """One line that names the first frozen parameter in which ``node`` differs from the reference, or empty. A hash
    that is missing on one of them differs from none."""
    name = first_frozen(register, reference)
    if name is None:
        return ""
    here, there = _rows(register).get(name), _rows(reference).get(name)
    if here is not None and there is not None and here[1:3] == there[1:3]:
        difference = f"{name!r} has other values on {node} than on {reference_node}"
    else:
        difference = f"{node} has {_told(name, here)}, {reference_node} has {_told(name, there)}"
    return (
        f"frozen parameters differ: {difference}. They do not travel, so load the same base on every node (after the "
        "same torch.manual_seed where it is made at random, or with nc.broadcast); check_frozen=False where that is on "
        "purpose"
    )


def first_frozen(register: Register, reference: Register) -> str | None:
    """The first frozen parameter in which they differ; None: in none."""
    if register.frozen is None or reference.frozen is None or register.frozen == reference.frozen:
        return None
    mine, theirs = _rows(register), _rows(reference)
    for name in sorted(mine.keys() | theirs.keys()):
        here, there = mine.get(name), theirs.get(name)
        if here is None or there is None or here[1:3] != there[1:3]:
            if register.framework == reference.framework:
                return name
        elif here[3] and there[3] and here[3] != there[3]:
            return name
    return None


def not_compared(register: Register, reference: Register, node: str, reference_node: str) -> str:
    """One line where nodes of two frameworks have frozen parameters that cannot be compared, or empty."""
    if register.frozen is None or reference.frozen is None or register.framework == reference.framework:
        return ""
    mine, theirs = _rows(register), _rows(reference)
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


def _rows(register: Register) -> dict[str, FrozenRow]:
    return {row[0]: row for row in register.frozen or ()}


def _told(name: str, row: FrozenRow | None) -> str:
    return f"no {name!r}" if row is None else f"{name!r} {'x'.join(map(str, row[1])) or 'scalar'} {row[2]}"
