"""What may be typed after ``notebook-cluster run``: our options may stand on both sides of the script."""

import argparse
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from notebook_cluster.cli import values
from notebook_cluster.cli.values import add_code_options


def add_run_options(run: argparse.ArgumentParser) -> None:
    """Declare them."""
    run.usage = "notebook-cluster run [options] SCRIPT.py [arguments of the script] [options] [-- more arguments of it]"
    run.epilog = (
        "Options of notebook-cluster may also stand behind the script, which is then said; what stands behind -- goes "
        "to the script as it is. Exit code: that of the script, of the first node that failed; 130 after Ctrl-C."
    )
    run.add_argument("script", metavar="SCRIPT.py", type=Path, help="runs on every node as python SCRIPT.py would")
    run.add_argument(
        "--nodes",
        type=values.count,
        default=0,
        metavar="N",
        help="begin with N nodes (default: 1); local ones fill up, but with --on",
    )
    run.add_argument(
        "--local", type=values.whole, default=None, metavar="N", help="on this machine (default: 1; with --on 0)"
    )
    run.add_argument(
        "--peers", type=values.peers, default=(), metavar="all|NAME,HOST:PORT", help="machines that are shared with you"
    )
    run.add_argument(
        "--head", type=values.peer_or_address, metavar="PEER",
        help="run the coordinator on that machine: the run goes on without this one",
    )  # fmt: skip
    add_code_options(run, "pairs with peers that share with this code")
    hosts = run.add_argument_group("hosts from an engine")
    hosts.add_argument("--on", default="", metavar="ENGINE", help="slurm, ssh:HOST,HOST ...")
    hosts.add_argument("--hosts", type=values.count, default=0, metavar="N", help="so many hosts")
    hosts.add_argument("--gpus", type=values.count, default=0, metavar="N", help="of each host")
    hosts.add_argument(
        "--nodes-per-host", type=values.count, default=0, metavar="N", help="default: one for each GPU, else one"
    )
    hosts.add_argument("--time", default="", metavar="2:00:00", help="how long, as the engine writes it")
    hosts.add_argument("--partition", default="", metavar="NAME", help="of the engine")
    hosts.add_argument("--setup", default="", metavar="LINE", help="a shell line that each host runs first")
    hosts.add_argument("--address", default="", metavar="HOST", help="of this machine, for the hosts")
    hosts.add_argument("--folder", default="", metavar="DIR", help="one that the hosts share with this machine")
    run.add_argument(
        "--cluster", default="", metavar="NAME",
        help="run it in this cluster: in one that runs, which then goes on, or in a new one of this name",
    )  # fmt: skip
    run.add_argument("--keep", action="store_true", help="leave the cluster running when the script has ended")
    run.add_argument("--script-only", action="store_true", help="send the script alone, not the folder it runs in")


def split_at_script(
    words: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[list[str], list[str], list[str]]:  # fmt: skip
    """(words for ``parser``, those of the script, those of the former that stood behind the script)."""
    rest, ours, behind = deque(words), list[str](), list[str]()
    of_script: list[str] = []
    found = False
    while rest:
        word = rest.popleft()
        if word == "--":
            if not found and rest:
                ours.append(rest.popleft())
            of_script += rest
            break
        typed = [word]
        action = parser._option_string_actions.get(word.partition("=")[0])
        if action is None or (found and "--help" in action.option_strings):
            if found:
                of_script.append(word)
                continue
            found = not word.startswith("-")
        elif "=" not in word and action.nargs != 0 and rest and not (action.nargs == "?" and rest[0][:1] == "-"):
            typed.append(rest.popleft())
        ours += typed
        if found and action is not None:
            behind.append(" ".join(typed))
    return ours, of_script, behind
