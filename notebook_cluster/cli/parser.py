"""argparse for people: one line for what was mistyped, with what may have been meant, and help for a bare command."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from notebook_cluster.protocol.names import did_you_mean


class UsageError(ValueError):
    """What was typed is not known; the text is one line with the way out."""


class Parser(argparse.ArgumentParser):
    """Raises :class:`UsageError` where argparse ends the process; ``--help`` and ``--version`` still do."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}: see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The same as a command's own parser: what it does not know is its error, not that of the parser above."""
        words = sys.argv[1:] if args is None else list(args)
        self._check_options(words)
        found, rest = super().parse_known_args(words, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def _check_options(self, words: Sequence[str]) -> None:
        """Before argparse looks, which would first miss what the mistyped option was to say."""
        for word in words:
            typed = word.partition("=")[0]
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return  # what follows are arguments, or those of the command
            is_option = typed.startswith("-") and len(typed) > 1 and not typed[1].isdigit()
            if is_option and typed not in self._option_string_actions:
                known = [name for name in self._option_string_actions if name.startswith("--")]
                self.error(f"there is no option {typed}{did_you_mean(typed, known)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = list(action.choices)
        what = action.dest if action.dest != argparse.SUPPRESS else "command"
        raise argparse.ArgumentError(
            None, f"there is no {what} {value!r}{did_you_mean(str(value), known)}. There are: {', '.join(known)}"
        )
