"""What may be typed after ``%cluster``, ``%%on_all``, ``%%on``, ``%push`` and ``%pull``, as data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from notebook_cluster.magics import reading


@dataclass(frozen=True)
class Option:
    """``--name``, with a value when ``read`` is given."""

    name: str
    help: str
    value: str = ""
    read: Callable[[str], Any] | None = None
    short: str = ""
    """``-o``, which is the same."""
    alone: Any = None
    """Its value when it stands alone; None: it needs one."""

    @property
    def usage(self) -> str:
        value = self.value if self.alone is None else f"[{self.value}]"
        return f"{self.short or '--' + self.name} {value}".rstrip()


@dataclass(frozen=True)
class Command:
    """One subcommand of ``%cluster``, or one other magic."""

    name: str
    help: str
    argument: str = ""
    """Its argument's name as shown, in brackets when it may be left out, with ``...`` when there may be several."""
    options: tuple[Option, ...] = ()
    read_argument: Callable[[str], str] = str
    prefix: str = "%cluster "

    @property
    def usage(self) -> str:
        words = [f"{self.prefix}{self.name}", *([f"[{option.usage}]" for option in self.options])]
        if self.argument:
            words.insert(1, self.argument)
        return " ".join(words)


_RUN = "a run that was kept (see runs), as lesson@2026-11-19T14:03; default: this notebook's"
_NO_REPLAY = "do not run the cluster's earlier cells on it first"

_LAUNCH_OPTIONS = (
    Option("on", "have an engine start machines", "slurm|ssh:HOST,...|ipp:LAUNCHER", str),
    Option("hosts", "so many of them (of ssh: those named)", "N", reading.whole(1, 1000)),
    Option("gpus", "of each (default: whole hosts)", "N", reading.whole(1, 64)),
    Option("nodes-per-host", "nodes on each (default: one per GPU, else one)", "N", reading.whole(1, 64)),
    Option("time", "how long they are wanted, as the engine writes it", "2:00:00", str),
    Option("partition", "of the engine", "NAME", str),
    Option("setup", "a shell line that each runs first", "LINE", str),
    Option("address", "of this machine, for them (default: they try all)", "HOST", str),
    Option("folder", "one that they share with this machine", "DIR", str),
)

COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command(
            "start",
            "start a cluster, or attach to it when it runs already",
            "[NAME]",
            (
                Option("local", "nodes on this machine (default 1)", "N", reading.whole(0, 64)),
                Option("nodes", "at least N nodes in all: local ones fill up", "N", reading.whole(1, 64)),
                Option(
                    "peers",
                    "a node on each of these machines",
                    "all|NAME,...",
                    reading.names("'all', or names of peers"),
                ),
                Option("code", "pair with machines that share with this code; alone: with all", "CODE", reading.code),
                Option("invite", "let machines join by themselves, see invite"),
                Option("head", "lead it from that machine: it goes on without this one", "PEER", str),
                *_LAUNCH_OPTIONS,
                Option("fake", "N machines that are played on this one, for a lesson", "N", reading.whole(1, 16)),
                Option("slow", "of those, one that takes 4 times as long", "NAME=4,...", reading.names("NAME=4")),
                Option(
                    "kill", "of those, one that dies so long after it came", "NAME@60s,...", reading.names("NAME@60s")
                ),
                Option("fresh", "new kernels, also when the cluster runs already"),
                Option("no-panel", "do not show the panel"),
            ),
            reading.name_to_start,
        ),
        Command(
            "take-over",
            "begin anew from what machines keep of a cluster whose head is gone",
            "[NAME]",
            (
                Option("local", "nodes on this machine (default 1)", "N", reading.whole(0, 64)),
                Option("nodes", "at least N nodes in all: local ones fill up", "N", reading.whole(1, 64)),
                Option(
                    "peers", "ask and use only these (default: all)", "all|NAME,...", reading.names("names of peers")
                ),
                Option("no-panel", "do not show the panel"),
            ),
            reading.cluster_name,
        ),
        Command(
            "hand-over",
            "lead the running cluster from another machine, or from this one again",
            "PEER|HOST:PORT|local",
            (
                Option("code", "the code that is shown there, the first time", "CODE", reading.code),
                Option("survive", "not now, but each time that this machine is about to sleep"),
            ),
        ),
        Command(
            "add",
            "add a machine's nodes to the cluster ('local': this machine)",
            "PEER|HOST:PORT",
            (
                Option("code", "the code that is shown there, the first time", "CODE", reading.code),
                Option("count", "nodes on it (default: one per accelerator)", "N", reading.whole(1, 64)),
            ),
        ),
        Command(
            "invite",
            "let machines join by themselves that cannot be reached from here",
            "",
            (
                Option("code", "the code they need (default: one is made)", "CODE", reading.code),
                Option("minutes", "how long it is valid (default 120)", "M", reading.minutes),
                Option("close", "let nobody else join"),
            ),
        ),
        Command(
            "class",
            "a class comes in with one code: its page, files for it, files and variables from it",
            "start [NAME]|hand-out FILE|collect FILE|close...",
            (
                Option("code", "start: the code on the board (default: one is made)", "CODE", reading.code),
                Option("minutes", "start: how long one can come in with it (default 60)", "M", reading.minutes),
                Option("local", "start: nodes on this machine (default 1)", "N", reading.whole(0, 64)),
                Option("to", "hand-out, collect: only these nodes, as after %%on", "TARGETS", reading.targets),
                Option("into", "collect: the folder here (default: collected)", "DIR", str),
            ),
        ),
        Command("grow", "have an engine start more machines, which join when they run", "", _LAUNCH_OPTIONS),
        Command("shrink", "give N machines back to their engines, highest ranks first", "N", (), reading.machines),
        Command("remove", "take a node out and end its kernel", "NODE"),
        Command(
            "restart",
            "a new kernel under the same name; all: every node's",
            "NODE...",
            (
                Option("no-replay", _NO_REPLAY),
                Option("all-cells", "also run earlier cells that it did without"),
            ),
        ),
        Command("skip", "end the replay of the earlier cell that a node runs now", "NODE"),
        Command("peers", "machines found on the network, and why one cannot be added"),
        Command(
            "doctor",
            "what is wrong with machines, network and versions, and the way out",
            "",
            (Option("packages", "compare these packages too", "NAME,...", reading.names("names of packages")),),
        ),
        Command(
            "bench",
            "bandwidth and round trip between the nodes",
            "",
            (Option("mb", "megabytes to send each way (default 16)", "N", reading.whole(1, 64)),),
        ),
        Command("status", "nodes, memory, steps and rounds"),
        Command("panel", "show the panel"),
        Command(
            "report",
            "write the run as one HTML page that needs no network",
            "FILE.html",
            (Option("overwrite", "replace a file that is there"),),
        ),
        Command(
            "replay",
            "write the run as one HTML page that plays it in the panel",
            "FILE.html",
            (Option("run", _RUN, "NAME[@STARTED]", str), Option("overwrite", "replace a file that is there")),
        ),
        Command(
            "estimate",
            "what rounds of a model take: memory, disk, traffic, time",
            "PARAMETERS",
            (
                Option("codec", "only this one (default: those to choose from)", "NAME", str),
                Option("nodes", "default: those of the cluster, or 2", "N", reading.whole(1, 1024)),
                Option("fragments", "the model is sent in", "N", reading.whole(1, 1024)),
                Option("momentum", "float32 (default) or bfloat16: how DiLoCo keeps it", "DTYPE", str),
                Option("state", "memory (default) or disk: where DiLoCo has it", "WHERE", str),
            ),
            read_argument=reading.parameters,
        ),
        Command(
            "export",
            "write the curves: a table, or event files for TensorBoard into DIR/",
            "FILE.csv|FILE.parquet|DIR/",
            (
                Option("job", "only those of this training job", "NAME", str),
                Option("run", _RUN, "NAME[@STARTED]", str),
                Option("overwrite", "replace what is there"),
            ),
        ),
        Command(
            "track",
            "log the run's curves once, for all nodes; alone: say how it is",
            "[wandb|mlflow|tensorboard|off]",
            (
                Option("project", "default: the cluster's name", "NAME", str),
                Option("run", _RUN, "NAME[@STARTED]", str),
            ),
        ),
        Command("runs", "the runs that were kept: strategy, nodes, rounds, final loss"),
        Command(
            "compare",
            "lay kept runs over each other: one chart, and their settings",
            "RUN...",
            (
                Option("metric", "another number that was reported (default: loss)", "NAME", str),
                Option("job", "of this training job alone", "NAME", str),
                Option("log", "a logarithmic axis"),
            ),
        ),
        Command(
            "vars",
            "what is in the namespace of each node, and where nodes differ",
            "[PATTERN]",
            (Option("all", "also modules, functions and classes"),),
        ),
        Command(
            "logs",
            "what a node's process wrote to its log",
            "NODE",
            (Option("lines", "how many of the last lines (default 100)", "N", reading.whole(1, 10_000)),),
        ),
        Command(
            "attach",
            "come back to a running cluster and its running cell; NAME@PEER: to one led from there",
            "[NAME]",
            (Option("async", "show the running cell, but do not wait for it"),),
            reading.cluster_at_peer,
        ),
        Command("cells", "on which nodes cells without %% run from now on; alone: say it", "[all|local]"),
        Command(
            "send",
            "put a file or folder into the working folder of every node",
            "FILE|DIR",
            (Option("to", "only of these nodes, as after %%on", "TARGETS", reading.targets),),
        ),
        Command("detach", "free the cell that waits; the nodes go on"),
        Command("stop", "end a cluster and every kernel of it", "[NAME]", (), reading.cluster_name),
    )
}

_CELL_OPTIONS = (
    Option("timeout", "interrupt the cell after S seconds", "S", reading.seconds),
    Option("no-replay", "nodes that restart or join later do not run this cell"),
    Option("async", "return at once: a handle to wait for the cell, stop it, take its results"),
    Option("output", "keep each node's last value in VAR (with --async: the handle)", "VAR", reading.variable, "-o"),
    Option(
        "canary", "NODE (default: the lowest rank) runs it first, the others if it worked", "NODE", reading.node, "", ""
    ),
)
ON_ALL = Command("on_all", "run the cell on every node", "", _CELL_OPTIONS, prefix="%%")
ON = Command("on", "run the cell on some nodes", "TARGETS...", _CELL_OPTIONS, prefix="%%")
PUSH = Command(
    "push",
    "send variables of the notebook to every node",
    "NAME...",
    (Option("to", "only to these nodes, as after %%on", "TARGETS", reading.targets),),
    prefix="%",
)
PULL = Command(
    "pull",
    "bring variables of the nodes here, as {node: value}",
    "NAME...",
    (
        Option(
            "from", "only from these nodes, as after %%on; from a single one its bare value", "TARGETS", reading.targets
        ),
        Option("as", "into this variable", "VAR", reading.variable),
    ),
    prefix="%",
)
