"""What may be typed after ``notebook-cluster``, read by argparse for people.

What was mistyped is one line with what may have been meant; a bare command shows its help.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from notebook_cluster.cli import values
from notebook_cluster.cli.run_arguments import add_run_options, split_at_script
from notebook_cluster.cli.values import add_code_options
from notebook_cluster.protocol import VERSION
from notebook_cluster.protocol.names import did_you_mean, is_distribution

__all__ = ["UsageError", "make_commands", "parse"]

Command = Callable[[argparse.Namespace], int]


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
        meant = f" (did you mean 'run {value}'?)" if "run" in known and str(value).endswith(".py") else ""
        meant = meant or did_you_mean(str(value), known)
        raise argparse.ArgumentError(None, f"there is no {what} {value!r}{meant}. There are: {', '.join(known)}")


class Commands(NamedTuple):
    """The parser of the whole command line, and those of two commands of which more has to be known."""

    whole: "Parser"
    trust: argparse.ArgumentParser
    run: argparse.ArgumentParser


def make_commands() -> Commands:
    """All commands with what may be typed after each."""
    parser = Parser(
        prog="notebook-cluster",
        description="Train one model on the machines you already have, from a Jupyter notebook.",
        epilog="In a notebook: %load_ext notebook_cluster, then %cluster start.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"notebook-cluster {VERSION}")
    parser.set_defaults(load=lambda: _help(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _share(_command(commands, "share", "share", "offer this machine to clusters"))

    peers = _command(commands, "clusters", "peers", "list the peers and clusters of this network")
    peers.add_argument("--seconds", type=values.seconds, default=2.0, help="how long to listen (%(default)g)")
    pair = _command(commands, "trust", "pair", "let your notebooks use a peer that shows a code")
    pair.add_argument("peer", metavar="PEER|HOST:PORT", type=values.peer_or_address)
    add_code_options(pair, "what 'notebook-cluster share' shows there (default: it is asked for)")
    trust = _command(commands, "trust", "trust", "see who is trusted, and take trust back")
    _trust(trust)

    run = _command(commands, "run", "run", "run a script on every node of a cluster")
    add_run_options(run)
    status = _command(commands, "clusters", "status", "show a running cluster, or all of them")
    status.add_argument("cluster", nargs="?", metavar="CLUSTER")
    status.add_argument("--json", action="store_true", help="print a list with an object for each cluster, as JSON")
    report = _command(commands, "clusters", "report", "write a cluster's run as one HTML page that needs no network")
    report.add_argument("cluster", metavar="CLUSTER")
    report.add_argument("file", metavar="FILE.html")
    report.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    replay = _command(commands, "clusters", "replay", "write a run as one HTML page that plays it in the panel")
    replay.add_argument("run", metavar="RUN", help="a cluster (as it is now, or its last run), or CLUSTER@STARTED")
    replay.add_argument("file", metavar="FILE.html")
    replay.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    _export(_command(commands, "clusters", "export", "write the curves of a run as a table, or for TensorBoard"))
    _command(commands, "clusters", "runs", "list the runs that were kept")
    compare = _command(commands, "clusters", "compare", "lay kept runs beside each other: results and settings")
    compare.add_argument("runs", metavar="RUN", nargs="+", help="a cluster's last run, or CLUSTER@STARTED")
    compare.add_argument("--metric", default="loss", metavar="NAME", help="a number that was reported (%(default)s)")
    compare.add_argument("--job", metavar="NAME", help="of this training job alone")
    hand_over = _command(commands, "clusters", "hand-over", "lead a running cluster from another machine")
    hand_over.add_argument("cluster", metavar="CLUSTER")
    hand_over.add_argument("to", metavar="PEER|local", help="a paired peer (name or HOST:PORT), or this machine")
    hand_over.add_argument("--survive", action="store_true", help="each time that this machine is about to sleep")
    take_over = _command(
        commands, "clusters", "take-over", "begin anew from what machines keep of a cluster whose head is gone"
    )
    take_over.add_argument("cluster", metavar="CLUSTER")
    take_over.add_argument("--local", type=int, default=1, metavar="N", help="nodes on this machine (%(default)s)")
    take_over.add_argument(
        "--peers", type=values.peers, default=("all",), metavar="all|NAME,...", help="ask and use these (default: all)"
    )
    stop = _command(commands, "clusters", "stop", "end a cluster and every kernel of it")
    stop.add_argument("cluster", metavar="CLUSTER")
    detach = _command(commands, "clusters", "detach", "free the notebook cell that waits; what runs goes on")
    detach.add_argument("cluster", metavar="CLUSTER")
    skip = _command(commands, "clusters", "skip", "end the replay of the earlier cell that a node runs now")
    skip.add_argument("cluster", metavar="CLUSTER")
    skip.add_argument("node", metavar="NODE")
    doctor = _command(commands, "doctor", "doctor", "say what is wrong with network, clocks and versions")
    doctor.add_argument("cluster", nargs="?", metavar="CLUSTER")
    doctor.add_argument(
        "--packages", type=values.words("package", is_distribution), default=(), metavar="A,B",
        help="compare the versions of these packages on all peers",
    )  # fmt: skip
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    bench = _command(commands, "bench", "bench", "measure bandwidth and round trip between the nodes of a cluster")
    bench.add_argument("cluster", nargs="?", metavar="CLUSTER", help="default: the one that runs")
    bench.add_argument(
        "--mb", type=values.megabytes, default=16, metavar="N", help="megabytes to send each way (%(default)s)"
    )
    bench.add_argument("--json", action="store_true", help="print the figures as JSON")
    return Commands(parser, trust, run)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of one command; ``load()`` gives the function that runs it, or shows its help where one has to be
    named. UsageError for anything unknown."""
    parser, trust, run = make_commands()
    words = sys.argv[1:] if arguments is None else arguments
    of_script: list[str] = []
    behind: list[str] = []
    if words[:1] == ["run"]:
        ours, of_script, behind = split_at_script(words[1:], run)
        words = ["run", *ours]
    try:
        options = parser.parse_args(words)
    except UsageError as error:
        if behind:
            raise UsageError(f"{error}; an option of the script's own stands behind --") from None
        raise
    options.of_script, options.behind = of_script, behind
    if getattr(options, "action", "") is None:
        options.load = lambda: _help(trust)
    return options


def _help(parser: argparse.ArgumentParser) -> Command:
    def run(options: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    return run


def _share(share: argparse.ArgumentParser) -> None:
    share.add_argument(
        "--name", type=values.peer_name, default=values.default_name(), help="how others see it (%(default)s)"
    )
    share.add_argument(
        "--port", type=values.port, default=0, metavar="P",
        help="listen on P, and on P+1 for pairing (default: any free ports)",
    )  # fmt: skip
    share.add_argument("--data-dir", type=Path, default=None, metavar="DIR", help="where its key, logs and work are")
    share.add_argument(
        "--lease", type=values.seconds, default=None, metavar="S",
        help="end a cluster's kernels when nothing was heard of it for so many seconds (default: 600)",
    )  # fmt: skip
    _share_with(share.add_argument_group("with whom"))
    limits = share.add_argument_group("limits (default: none)")
    limits.add_argument("--max-nodes", type=values.count, default=None, metavar="N", help="at most N nodes at a time")
    limits.add_argument(
        "--owners", type=values.count, default=1, metavar="N",
        help="nodes of at most N owners at a time (default: 1); those of several run as one user: they can read each "
        "other's files and run code in each other's kernels",
    )  # fmt: skip
    limits.add_argument(
        "--devices", type=values.devices, default=(), metavar="D,D", help="only on these: cpu, cuda, cuda:0 ..."
    )
    limits.add_argument("--memory", type=values.memory, default=None, metavar="8GB", help="for all nodes together")
    limits.add_argument(
        "--files", type=values.memory, default=None, metavar="10GB", help="of files that each cluster may send here"
    )
    limits.add_argument("--idle-only", action="store_true", help="only while nobody uses this machine")
    limits.add_argument(
        "--on-power", type=values.percent, nargs="?", const=30.0, default=None, metavar="PERCENT",
        help="stop nodes when the battery is below this level and not charged (30 without a number)",
    )  # fmt: skip
    limits.add_argument("--confirm", action="store_true", help="ask here before each node is started")
    limits.add_argument(
        "--until",
        type=values.until,
        default=None,
        metavar="HH:MM",
        help="stop sharing at this time (or 2026-11-19T14:03)",
    )


def _share_with(group: "argparse._ArgumentGroup") -> None:
    add_code_options(group, "accept this code from any number of people (default: made-up codes, each good for one)")
    group.add_argument(
        "--code-minutes", type=values.minutes, default=None, metavar="M",
        help="how long --code is accepted (default: 120)",
    )  # fmt: skip
    group.add_argument("--no-code", action="store_true", help="accept no new coordinators, only those trusted already")
    group.add_argument(
        "--dial", type=values.host_ports, default=None, metavar="HOST:PORT",
        help="go to a cluster that invited you, with its --code: for machines that cannot be reached from outside",
    )  # fmt: skip
    group.add_argument("--join", action="store_true", help="choose a cluster of this network and join it")
    group.add_argument("--no-qr", action="store_true", help="do not draw the code as a QR picture")
    group.add_argument(
        "--launch-key", default=None, metavar="FILE|-",
        help="given by an engine that starts hosts for the cluster at --dial (%%cluster start --on): a file, or the "
        "first line of standard input, whose end then ends this",
    )  # fmt: skip
    group.add_argument(
        "--place", type=values.place, default=0, metavar="N|any", help="which host of the launch this is; any free one"
    )
    group.add_argument("--start", type=values.whole, default=0, metavar="N", help="how often it was started before")


def _export(export: argparse.ArgumentParser) -> None:
    export.add_argument(
        "run", metavar="RUN", help="a cluster (as it is now, or its last run), or CLUSTER@STARTED of one that was kept"
    )
    export.add_argument(
        "file", metavar="FILE.csv|FILE.parquet|DIR/", help="a table, or a folder for TensorBoard's event files"
    )
    export.add_argument("--job", default=None, metavar="NAME", help="only the curves of this training job")
    export.add_argument("--overwrite", action="store_true", help="replace what is there")


def _trust(trust: argparse.ArgumentParser) -> None:
    actions = trust.add_subparsers(title="actions", metavar="list|remove", dest="action")
    shown = "show who is trusted on this machine, in both directions"
    listing = actions.add_parser("list", help=shown, description=shown, allow_abbrev=False)
    taken = "trust somebody no more: in force at once, also for what runs"
    removing = actions.add_parser("remove", help=taken, description=taken, allow_abbrev=False)
    removing.add_argument("who", metavar="NAME|OWNER|FINGERPRINT")
    for action in (listing, removing):
        action.add_argument(
            "--data-dir", type=Path, default=None, metavar="DIR", help="of an agent that was shared with this option"
        )


def _command(
    commands: "argparse._SubParsersAction[Parser]", module: str, name: str, summary: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    parser.allow_abbrev = False

    def load() -> Command:
        command: Command = getattr(import_module(f"notebook_cluster.cli.{module}"), name.replace("-", "_"))
        return command

    parser.set_defaults(load=load)
    return parser
