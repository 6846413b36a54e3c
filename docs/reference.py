"""``python -m docs.reference`` writes docs/reference.md from what the magics and the command line accept.

``--check`` only says whether it is as it would be written.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from notebook_cluster.cli.arguments import make_commands
from notebook_cluster.magics.grammar import COMMANDS, ON, ON_ALL, PULL, PUSH, Command

PAGE = Path(__file__).with_name("reference.md")
HEAD = """# Reference

Everything that may be typed, made from the code by `python -m docs.reference`. What each is for:
[Quick start](quickstart.md), [Cells](cells.md), [Sharing and pairing](sharing.md), [Machines from engines](engines.md),
[When the laptop goes home](heads.md), [Training](training.md).
"""


def page() -> str:
    """The whole page."""
    lines = [
        HEAD,
        "## In a notebook",
        "",
        "After `%load_ext notebook_cluster`. `%cluster` alone lists its commands.",
        "",
    ]
    for command in COMMANDS.values():
        lines += _of_magic(command)
    lines += ["## In front of a cell, and variables", ""]
    for command in (ON_ALL, ON, PUSH, PULL):
        lines += _of_magic(command)
    lines += [
        "## In a terminal", "", "`notebook-cluster COMMAND`; `--help` behind each says the same.", "",
        *_of_parsers("", make_commands().whole),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def _of_magic(command: Command) -> Iterator[str]:
    yield f"### `{command.prefix}{command.name}`"
    yield ""
    argument = f" `{command.argument}`" if command.argument else ""
    yield f"{_sentence(command.help)}{f' Takes{argument}.' if argument else ''}"
    yield ""
    yield from _table((option.usage, option.help) for option in command.options)


def _of_parsers(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """``parser`` and those below it."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if name:
        yield f"### `notebook-cluster {name}`"
        yield ""
        yield _sentence(parser.description or "")
        yield ""
        yield from _table(
            (_usage(action), _help(action)) for action in parser._actions if action not in below and _is_shown(action)
        )
    for action in below:
        for word, command in action.choices.items():
            yield from _of_parsers(f"{name} {word}".strip(), command)


def _is_shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)


def _usage(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.nargs != 0 and action.option_strings else action.dest)
    value = value[0] if isinstance(value, tuple) else value
    many = {"?": "[{}]", "+": "{} ...", "*": "[{} ...]"}.get(str(action.nargs), "{}")
    if not action.option_strings:
        return many.format(value)
    shown = "" if action.nargs == 0 else f" {many.format(value)}"
    return f"{action.option_strings[-1]}{shown}"


def _help(action: argparse.Action) -> str:
    return (action.help or "") % {**vars(action), "prog": "notebook-cluster"}


def _sentence(text: str) -> str:
    text = _plain(text)
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")


def _table(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    rows = list(rows)
    if not rows:
        return
    yield "| | |"
    yield "|---|---|"
    for usage, text in rows:
        shown = usage.replace("|", "\\|")
        yield f"| `{shown}` | {_plain(text)} |"
    yield ""


def _plain(text: str) -> str:
    """As Markdown shows it: no table, tag or emphasis comes of it."""
    text = re.sub(r"\s+", " ", text).strip().replace("%%", "%")
    return re.sub(r"([|<>*_])", r"\\\1", text)


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        current = PAGE.read_text() if PAGE.exists() else ""
        if current != text:
            print(f"{PAGE.name} is not as the code says: python -m docs.reference writes it anew", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    print(f"{PAGE} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
