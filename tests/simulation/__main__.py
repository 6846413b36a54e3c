"""``python -m tests.simulation [--from SEED] [--seeds N] [--seconds S] [--keep FILE] [--verbose]``: play worlds.

Prints the first and the last seed and how many a second. A seed that fails is printed with its last events, and played
again with fewer faults for as long as it still fails.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--from", dest="first", type=int, default=None, help="first seed; by default one of its own")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=None, help="real seconds after which no new seed is begun")
    parser.add_argument("--keep", type=Path, help="a file that knows how far this came; go on from there")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--stop", action="store_true", help="end at the first failure")
    parser.add_argument(
        "--without", choices=("commit", "sync", "momentum", "epoch", "acknowledge"), help="see left_out.py"
    )
    parser.add_argument(
        "--faults", type=json.loads, help="JSON: these instead of what the seeds say, as a failure prints them"
    )
    parser.add_argument(
        "--each", type=json.loads, help="JSON: [[seed, faults], ...] to play in place of one seed after the other"
    )
    parser.add_argument("--hand-over", action="store_true", help="the cluster is handed over: handed_over.py")
    parser.add_argument("--played", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.each is not None:
        given.first, given.seeds = 0, len(given.each)
    if given.played is not None:
        return play(given)
    first = given.first if given.first is not None else random.SystemRandom().randrange(10**9)
    kept = read(given.keep, first)
    began, first, totals = time.monotonic(), kept["next"], Counter(played=0, failed=0)
    with tempfile.TemporaryDirectory() as folder:
        given.played = Path(folder, "played.json")
        while goes_on(given, totals, began):
            after, played = in_a_process(given, kept["next"], totals["played"], began)
            kept = {"next": after["next"], "failed": sorted({*kept["failed"], *after["failed"]})}
            totals.update(played)
    played, seconds = totals.pop("played"), time.monotonic() - began
    del totals["failed"]
    print(json.dumps({
        "first": first, "last": kept["next"] - 1, "seeds": played, "failed": kept["failed"],
        "seeds_per_s": round(played / seconds, 3), **totals,
    }))  # fmt: skip
    return 1 if kept["failed"] else 0


def read(keep, first):
    return json.loads(keep.read_text()) if keep and keep.exists() else {"next": first, "failed": []}


def goes_on(given, totals, began):
    return (
        (given.seeds is None or totals["played"] < given.seeds)
        and (given.seconds is None or time.monotonic() - began < given.seconds)
        and not (given.stop and totals["failed"])
    )


BATCH = 200
"""Seeds that one process plays: threads of a world that stand still for ever keep their files and their memory."""


def in_a_process(given, first, played, began):
    """Play up to BATCH seeds from ``first`` on. Returns (what is kept, what was played)."""
    more = BATCH if given.seeds is None else min(BATCH, given.seeds - played)
    command = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
    command += ["--from", str(first), "--seeds", str(more), "--played", str(given.played)]
    if given.seconds is not None:
        command += ["--seconds", str(given.seconds - (time.monotonic() - began))]
    # the order of sets is part of a seed
    environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    if subprocess.run(command, env=environment, check=False).returncode:
        sys.exit(f"the process that played from seed {first} on has ended")
    answer = json.loads(given.played.read_text())
    return answer["kept"], answer["totals"]


def play(given):
    began, kept = time.monotonic(), read(given.keep, given.first)
    totals = {"played": 0, "failed": 0, "faults": 0, "rounds": 0, "recomputed": 0, "steps": 0, "handed_over": 0}
    while goes_on(given, totals, began):
        seed, faults = given.each[kept["next"]] if given.each else (kept["next"], given.faults)
        made = world_of(given)
        trouble = play_one(made, seed, given.verbose, totals, faults=faults, without=given.without)
        totals["played"] += 1
        kept["next"] += 1
        if trouble is not None:
            kept["failed"].append(seed)
            totals["failed"] += 1
            print(trouble, flush=True)
            print(shrunk(made, seed, given.without), flush=True)
        if given.keep:
            given.keep.write_text(json.dumps(kept))
    given.played.write_text(json.dumps({"kept": kept, "totals": totals}))
    return 0


def world_of(given):
    """The class of the worlds."""
    if given.hand_over:
        from tests.simulation.handed_over import HandedOverWorld

        return HandedOverWorld
    from tests.simulation.world import World

    return World


def shrunk(made, seed, without):
    """The faults that are needed: each is left out in turn, for as long as the seed still fails."""

    def fails(faults):
        try:
            made(seed, faults=faults, without=without).run()
        except Exception:
            return True
        return False

    world = made(seed, without=without)
    with contextlib.suppress(Exception):
        world.run()
    needed = list(world.faults.planned)
    for fault in list(needed):
        rest = [other for other in needed if other is not fault]
        if fails(rest):
            needed = rest
    return f"seed {seed} fails with faults={json.dumps(needed)} at commit {commit()}"


def commit():
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def play_one(made, seed, verbose=False, totals=None, faults=None, without=None):
    """None, or what to print about the failure."""
    world = made(seed, verbose=verbose, faults=faults, without=without)
    try:
        world.run()
    except Exception as error:
        cause = error.__cause__ or error
        lines = "".join(traceback.format_exception(cause))
        return f"seed {seed} failed: {error}\n" + "\n".join(world.log[-60:]) + f"\n{lines}"
    finally:
        if totals is not None:
            totals["faults"] += len(world.faults.done)
            totals["rounds"] += len(world.checks.commit_times)
            totals["recomputed"] += world.checks.recomputed
            totals["steps"] += world.schedule.steps
            totals["handed_over"] += getattr(world, "handed_over", 0)
    return None


if __name__ == "__main__":
    sys.exit(main())
