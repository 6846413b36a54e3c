"""What was typed after ``%cluster``, ``%%on_all``, ``%%on``, ``%push`` and ``%pull``, read by :mod:`.grammar`.

argparse is not used: it ends the process on an error and cannot say "did you mean".
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.language.grammar import COMMANDS, ON, ON_ALL, PULL, PUSH, Command
from notebook_cluster.protocol.names import did_you_mean


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
    """The subcommand of a ``%cluster`` line; None when it is empty or asks for help.

    Raises:
        UsageError: unknown subcommand or option, a missing, surplus or bad value. One line, with the way out.
    """
    words = _split(line)
    if not words or words[0] in ("help", "-h", "--help"):
        return None
    command = COMMANDS.get(words[0])
    if command is None:
        near = did_you_mean(words[0], COMMANDS)
        raise UsageError(f"%cluster has no subcommand {words[0]!r}{near}. There are: {', '.join(COMMANDS)}")
    return _parse(command, words[1:])


def parse_line(command: Command, line: str) -> Invocation:
    """The options and arguments of a magic without subcommands.

    Raises:
        UsageError: as :func:`parse_cluster`.
    """
    return _parse(command, _split(line))


def help_text() -> str:
    """Each magic, subcommand and option with a line that says what it does."""
    lines = []
    for command in (*COMMANDS.values(), ON_ALL, ON, PUSH, PULL):
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
        raise UsageError(f"{command.prefix}{command.name} has no option {typed}{did_you_mean(typed, known)}. {have}")
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
        raise UsageError(f"{command.prefix}{command.name} does not take {arguments[most]!r}: {command.usage}")
    if command.argument and not command.argument.startswith("[") and not arguments:
        what = command.argument.removesuffix("...")
        raise UsageError(f"{command.prefix}{command.name} needs {what}: {command.usage}")
    return tuple(command.read_argument(argument) for argument in arguments)
