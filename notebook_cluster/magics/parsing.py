"""What was typed after ``%cluster``, ``%%on_all``, ``%%on``, ``%push`` and ``%pull``, read by :mod:`.grammar`; and
which nodes ``%%on TARGETS`` means. Pure functions.

argparse is not used: it ends the process on an error and cannot say "did you mean".
"""

import operator
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.grammar import COMMANDS, ON, ON_ALL, PULL, PUSH, Command
from notebook_cluster.protocol.names import did_you_mean
from notebook_cluster.protocol.state import NodeView, by_rank
from notebook_cluster.security.codes import is_a_new_code

_OTHER_WORDS = {
    **dict.fromkeys(("nodes", "list", "ls", "ps", "info"), "%cluster status shows nodes, %cluster peers machines"),
    **dict.fromkeys(("end", "kill", "quit", "exit", "close", "shutdown"), "%cluster stop ends a cluster"),
    **dict.fromkeys(("devices", "discover", "find", "scan"), "%cluster peers shows the machines that were found"),
    **dict.fromkeys(("interrupt", "cancel"), "interrupt the kernel (■): it ends the cell on all nodes"),
    **dict.fromkeys(("checkpoint", "save"), "call sync.checkpoint(NAME) in the cell that trains"),
    **dict.fromkeys(("load", "resume"), "resume=NAME of nc.DiLoCo and the others takes a checkpoint"),
    **dict.fromkeys(("share", "join"), "type notebook-cluster share in a terminal of the other machine"),
    **dict.fromkeys(("run", "exec", "on", "on_all"), "write %%on_all in the first line of a cell"),
    **dict.fromkeys(("reset", "clear", "reboot"), "%cluster restart all --no-replay empties all nodes"),
    "push": "%push NAME sends a variable to the nodes",
    "pull": "%pull NAME brings a variable of the nodes here",
    "leave": "%cluster remove NODE takes a node out",
}
"""What people try, and what there is for it."""


@dataclass(frozen=True)
class Invocation:
    """A parsed line. ``options`` holds only what was typed; names with ``_`` for ``-``."""

    command: Command
    arguments: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def argument(self) -> str:
        """The first argument, or an empty string."""
        return self.arguments[0] if self.arguments else ""

    @property
    def names(self) -> list[str]:
        """The arguments, cut at their commas, each once."""
        return list(dict.fromkeys(name for word in self.arguments for name in word.split(",") if name))


def parse_cluster(line: str) -> Invocation | None:
    """The subcommand of a ``%cluster`` line; None when it is empty or asks for help, see :func:`help_on`.

    Raises:
        UsageError: unknown subcommand or option, a missing, surplus or bad value. One line, with the way out.
    """
    words = _split(line)
    if not words or words[0] == "help" or wants_help(line):
        return None
    command = COMMANDS.get(words[0])
    if command is None:
        if words[0] in _OTHER_WORDS:
            raise UsageError(f"%cluster has no subcommand {words[0]!r}: {_OTHER_WORDS[words[0]]}")
        near = did_you_mean(words[0], COMMANDS)
        raise UsageError(f"%cluster has no subcommand {words[0]!r}{near}. There are: {', '.join(COMMANDS)}")
    return _parse(command, words[1:])


def parse_line(command: Command, line: str) -> Invocation:
    """The options and arguments of a magic without subcommands.

    Raises:
        UsageError: as :func:`parse_cluster`.
    """
    return _parse(command, _split(line))


def wants_help(line: str) -> bool:
    """Whether what follows a magic asks what it does."""
    return not {"-h", "--help"}.isdisjoint(_split(line))


def help_on(line: str) -> str:
    """:func:`help_text` of the subcommand that a ``%cluster`` line names, or of everything."""
    named = [COMMANDS[word] for word in _split(line) if word in COMMANDS]
    return help_text(*named[:1])


def help_text(*commands: Command) -> str:
    """Each magic, subcommand and option with a line that says what it does; ``commands``: of these only."""
    lines = []
    for command in commands or (*COMMANDS.values(), ON_ALL, ON, PUSH, PULL):
        lines.append(f"{command.prefix + command.name + ' ' + command.argument:<30} {command.help}")
        lines += [f"    {option.usage:<26} {option.help}" for option in command.options]
    return "\n".join(lines)


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{line.strip()!r} cannot be read: {str(error).lower()}") from None


def _parse(command: Command, words: Sequence[str]) -> Invocation:
    arguments: list[str] = []
    options: dict[str, Any] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word.startswith("-") and len(word) > 1:
            name, value = _read_option(command, word, queue)
            options[name] = value
        else:
            arguments.append(word)
    return Invocation(command, _check_arguments(command, arguments), options)


def _read_option(command: Command, word: str, queue: list[str]) -> tuple[str, Any]:
    """The key and value of option ``word``; a value that stands apart is taken from ``queue``."""
    typed, equals, value = word.partition("=")
    known = {f"--{option.name}": option for option in command.options}
    option = known.get(typed) or next((one for one in command.options if one.short == typed), None)
    if option is None:
        have = f"There are: {', '.join(known)}" if known else "It has none"
        near = " (did you mean '--count'?)" if typed == "--nodes" and "--count" in known else did_you_mean(typed, known)
        raise UsageError(f"{command.prefix}{command.name} has no option {typed}{near}. {have}")
    key = option.name.replace("-", "_")
    if option.read is None:
        if equals:
            raise UsageError(f"{typed} takes no value, got {value!r}: write {typed} alone")
        return key, True
    if not equals and option.alone is not None and (not queue or queue[0].startswith("-")):
        return key, option.alone
    if not equals:
        if not queue or queue[0].startswith("--"):
            raise UsageError(f"{typed} needs a value: {command.prefix}{command.name} {option.usage}")
        value = queue.pop(0)
    try:
        return key, option.read(value)
    except ValueError as error:
        raise UsageError(f"{typed} takes {error}, got {value!r}") from None


def _check_arguments(command: Command, arguments: list[str]) -> tuple[str, ...]:
    most = 0 if not command.argument else (len(arguments) if command.argument.endswith("...") else 1)
    if len(arguments) > most:
        below = ", and the code below it" if command is ON_ALL else ""
        is_code = is_a_new_code(arguments[most]) and any(option.name == "code" for option in command.options)
        meant = f" (did you mean '--code {arguments[most]}'?)" if is_code else ""
        raise UsageError(
            f"{command.prefix}{command.name} does not take {arguments[most]!r}{meant}: {command.usage}{below}"
        )
    if command.argument and not command.argument.startswith("[") and not arguments:
        what = command.argument.removesuffix("...")
        raise UsageError(f"{command.prefix}{command.name} needs {what}: {command.usage}")
    return tuple(command.read_argument(argument) for argument in arguments)


DEVICE_WORDS = ("cuda", "mps", "rocm", "cpu")
MEMORY_WORDS = ("vram>=", "ram>=")
_RANKS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_MEMORY = re.compile(r"(vram|ram)(>=|<=|>|<)(\d{1,7}(?:\.\d{1,3})?)(gb|gib|mb|mib)", re.IGNORECASE)
_UNITS = {"gb": 10**9, "gib": 2**30, "mb": 10**6, "mib": 2**20}
_GONE = ("dead", "lost", "stopping")


def resolve(words: Sequence[str], nodes: Sequence[NodeView]) -> list[str]:
    """Names of the nodes that ``words`` mean, in rank order.

    A word is one or more of these with commas between them: a rank ``0``, ranks ``0-3``, a node's name, a device
    kind (``cuda mps rocm cpu``), an amount of memory (``vram>=8GB``, ``ram<16GB``), ``all``; with ``!`` in front it
    takes nodes away, from all when nothing else is named.

    Raises:
        UsageError: something unknown, or nothing left; names what is known.
    """
    items = [item for word in words for item in word.split(",") if item]
    usable = [node for node in by_rank(nodes) if node.condition not in _GONE]
    wanted = [item for item in items if not item.startswith("!")]
    unwanted = [item[1:] for item in items if item.startswith("!")]
    chosen = {name for item in wanted for name in _one(item, nodes, usable)}
    if not wanted:
        chosen = {node.name for node in usable}
    chosen -= {name for item in unwanted for name in _one(item, nodes, usable, taken_away=True)}
    if not chosen:
        raise UsageError(f"no node is left for {' '.join(words)!r}: {_known(nodes)}")
    return [node.name for node in usable if node.name in chosen]


def choose_canary(text: str, targets: Sequence[str], nodes: Sequence[NodeView]) -> str:
    """The node that runs a cell first: the one that ``text`` means, or (empty) the lowest rank among ``targets``
    (names; empty: all).

    Raises:
        UsageError: no such node, or it is not among the targets.
    """
    usable = [node.name for node in by_rank(nodes) if node.condition not in _GONE and node.rank is not None]
    among = [name for name in usable if not targets or name in targets]
    if not text:
        return among[0] if among else ""
    name = find_node(text, nodes)
    if name not in among:
        raise UsageError(f"--canary {text}: {name} is not among the nodes that run the cell: {', '.join(among)}")
    return name


def memory_words(nodes: Sequence[NodeView]) -> list[str]:
    """``vram>=8GB`` and the like, one for each size that a node has."""
    kinds = {"VRAM": "vram", "unified": "vram", "RAM": "ram"}
    sizes = {
        (kinds[node.memory_kind], int(node.memory_total * 1.03 / 1e9)) for node in nodes if node.memory_kind in kinds
    }
    return [f"{kind}>={size}GB" for kind, size in sorted(sizes) if size]


def find_node(text: str, nodes: Sequence[NodeView]) -> str:
    """The name of the one node that ``text`` (its name or its rank) means, whatever its condition.

    Raises:
        UsageError: there is none; names those that are there.
    """
    for node in nodes:
        if text == node.name:
            return node.name
    for node in nodes:
        if node.rank is not None and text == str(node.rank):
            return node.name
    raise _unknown(text, nodes)


def _one(
    item: str, nodes: Sequence[NodeView], usable: Sequence[NodeView], *, taken_away: bool = False
) -> Sequence[str]:
    """Names for one item. An explicit name of a node that is gone is an error, unless it is taken away anyway."""
    named = next((node for node in nodes if node.name == item), None)
    if named is not None and not item.isdigit():
        if named in usable or taken_away:
            return [named.name]
        reason = f" ({named.reason})" if named.reason else ""
        raise UsageError(f"node {item!r} is {named.condition}{reason}: %cluster restart {item}")
    if item == "all":
        return [node.name for node in usable]
    if item in DEVICE_WORDS:
        return _of_kind(item, usable)
    if item.lower().startswith(("vram", "ram")) and any(sign in item for sign in "<>="):
        return _of_memory(item, usable)
    if ranks := _RANKS.fullmatch(item):
        return _of_ranks(item, int(ranks[1]), int(ranks[2] or ranks[1]), usable)
    raise _unknown(item, nodes)


def _of_kind(kind: str, usable: Sequence[NodeView]) -> list[str]:
    found = [node.name for node in usable if node.device.partition(":")[0] == kind]
    if not found:
        devices = ", ".join(f"{node.name} {node.device}" for node in usable) or "no nodes"
        raise UsageError(f"no node has the device {kind!r}: there are {devices}")
    return found


def _of_memory(item: str, usable: Sequence[NodeView]) -> list[str]:
    """Nodes by the memory of their device: ``vram`` of accelerators (unified memory counts), ``ram`` of the rest."""
    found = _MEMORY.fullmatch(item)
    if found is None:
        raise UsageError(f"{item!r} is not an amount of memory: write vram>=8GB or ram<16GB, with GB, GiB, MB or MiB")
    kind, sign, limit = found[1].lower(), found[2], float(found[3]) * _UNITS[found[4].lower()]
    kinds = ("VRAM", "unified") if kind == "vram" else ("RAM",)
    of_kind = [node for node in usable if node.memory_kind in kinds]
    compare = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}[sign]
    # A card sold with 8 GB tells of a little less: what it keeps for itself is not counted against it.
    slack = 0.03 * limit if sign == ">=" else 0.0
    chosen = [node.name for node in of_kind if compare(node.memory_total + slack, limit)]
    if not chosen:
        there = ", ".join(f"{node.name} {node.memory_total / 1e9:.1f} GB" for node in of_kind) or f"none with {kind}"
        raise UsageError(f"no node has {item}: there are {there}")
    return chosen


def _of_ranks(item: str, first: int, last: int, usable: Sequence[NodeView]) -> list[str]:
    by_rank = {node.rank: node.name for node in usable if node.rank is not None}
    if first > last:
        raise UsageError(f"ranks {item!r} run backwards: write {last}-{first}")
    top = max(by_rank, default=-1)
    if last > top:
        raise UsageError(f"no node has rank {last}: {_known(usable)}")
    return [by_rank[rank] for rank in range(first, last + 1) if rank in by_rank]


def _unknown(item: str, nodes: Sequence[NodeView]) -> UsageError:
    words = [*(node.name for node in nodes), *DEVICE_WORDS]
    return UsageError(f"no node is called {item!r}{did_you_mean(item, words)}: {_known(nodes)}")


def _known(nodes: Sequence[NodeView]) -> str:
    if not nodes:
        return "the cluster has no nodes, %cluster add PEER adds one"
    named = (node.name if node.rank is None else f"{node.rank} {node.name}" for node in by_rank(nodes))
    return f"there are {', '.join(named)}"
