"""What may be typed after ``notebook-cluster``."""

import argparse
import platform
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from notebook_cluster.protocol import VERSION, check_name
from notebook_cluster.protocol.names import as_name

RESERVED_NAMES = ("local", "all")
"""Words of ``%cluster add`` that mean something else than a peer of that name."""

Command = Callable[[argparse.Namespace], int]


class UsageError(ValueError):
    """What was typed is not known; the text is one line with the way out."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}: see {self.prog} --help")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of one command; ``load()`` gives the function that runs it. UsageError for anything unknown."""
    parser = _Parser(
        prog="notebook-cluster",
        description="Train one model on the machines you already have, from a Jupyter notebook.",
        epilog="In a notebook: %%load_ext notebook_cluster, then %%cluster start.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"notebook-cluster {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    share = _command(commands, "share", "share", "offer this machine to clusters")
    share.add_argument("--name", type=_peer_name, default=_default_name(), help="how others see it (%(default)s)")
    share.add_argument("--port", type=_port, default=0, help="the one port to listen on (default: any free one)")
    share.add_argument("--data-dir", type=Path, default=None, metavar="DIR", help="where its key, logs and work are")
    share.add_argument(
        "--lease", type=_seconds, default=None, metavar="S",
        help="end a cluster's kernels when nothing was heard of it for so many seconds (default: 600)",
    )  # fmt: skip

    peers = _command(commands, "look", "peers", "list the peers of this network")
    peers.add_argument("--seconds", type=_seconds, default=2.0, help="how long to listen (%(default)g)")

    status = _command(commands, "look", "status", "show a running cluster, or all of them")
    status.add_argument("cluster", nargs="?", metavar="CLUSTER")
    stop = _command(commands, "steer", "stop", "end a cluster and every kernel of it")
    stop.add_argument("cluster", metavar="CLUSTER")
    detach = _command(commands, "steer", "detach", "free the notebook cell that waits; what runs goes on")
    detach.add_argument("cluster", metavar="CLUSTER")
    return parser.parse_args(arguments)


def _command(
    commands: "argparse._SubParsersAction[_Parser]", module: str, name: str, summary: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    parser.allow_abbrev = False

    def load() -> Command:
        command: Command = getattr(import_module(f"notebook_cluster.cli.{module}"), name)
        return command

    parser.set_defaults(load=load)
    return parser


def _default_name() -> str:
    return as_name(platform.node().partition(".")[0], fallback="peer")


def _peer_name(text: str) -> str:
    try:
        check_name(text, "peer")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if text in RESERVED_NAMES:
        raise argparse.ArgumentTypeError(f"{text!r} has a meaning in '%cluster add': choose another name")
    return text


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: use 1 to 65535, or 0 for any free one")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
