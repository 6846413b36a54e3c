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
import time
import traceback
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
    given = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a seed
        environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], env=environment, check=False
        ).returncode
    first = given.first if given.first is not None else random.SystemRandom().randrange(10**9)
    kept = json.loads(given.keep.read_text()) if given.keep and given.keep.exists() else {"next": first, "failed": []}
    return play(kept, given)


def play(kept, given):
    began, first, played = time.monotonic(), kept["next"], 0
    totals = {"faults": 0, "rounds": 0, "recomputed": 0, "steps": 0}
    while (given.seeds is None or played < given.seeds) and (
        given.seconds is None or time.monotonic() - began < given.seconds
    ):
        seed = kept["next"]
        trouble = play_one(seed, given.verbose, totals, faults=given.faults, without=given.without)
        played += 1
        kept["next"] = seed + 1
        if trouble is not None:
            kept["failed"].append(seed)
            print(trouble, flush=True)
            print(shrunk(seed, given.without), flush=True)
        if given.keep:
            given.keep.write_text(json.dumps(kept))
        if trouble is not None and given.stop:
            break
    seconds = time.monotonic() - began
    print(json.dumps({
        "first": first, "last": kept["next"] - 1, "seeds": played, "failed": kept["failed"],
        "seeds_per_s": round(played / seconds, 3), **totals,
    }))  # fmt: skip
    return 1 if kept["failed"] else 0


def shrunk(seed, without):
    """The faults that are needed: each is left out in turn, for as long as the seed still fails."""
    from tests.simulation.world import World

    def fails(faults):
        try:
            World(seed, faults=faults, without=without).run()
        except Exception:
            return True
        return False

    world = World(seed, without=without)
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


def play_one(seed, verbose=False, totals=None, faults=None, without=None):
    """None, or what to print about the failure."""
    from tests.simulation.world import World

    world = World(seed, verbose=verbose, faults=faults, without=without)
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
    return None


if __name__ == "__main__":
    sys.exit(main())
