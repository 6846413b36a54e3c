"""``notebook-cluster trust``: who is trusted on this machine, in both directions, and taking that back."""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from notebook_cluster.cli.tables import print_table
from notebook_cluster.security import (
    Trusted,
    TrustStore,
    data_directory,
    fingerprint,
    trusted_coordinators,
    trusted_peers,
)


@dataclass(frozen=True)
class _Direction:
    """One store, and what being in it means."""

    meaning: str
    store: TrustStore


def trust(options: argparse.Namespace) -> int:
    """Run ``trust list`` or ``trust remove``."""
    directions = _directions(options.data_dir)
    if options.action == "remove":
        return _remove(options.who, directions)
    return _list(directions)


def _directions(typed: Path | None) -> list[_Direction]:
    """What this user's notebooks trust, and what each agent that was shared from this account trusts."""
    found = [_Direction("your notebooks may use it", trusted_peers())]
    agents = [path for path in sorted((data_directory() / "agents").glob("*")) if _is_agent(path)]
    if typed is not None:
        directory = typed.expanduser().resolve()
        if not _is_agent(directory):
            raise ValueError(
                f"{directory} holds no agent: use the --data-dir with which 'notebook-cluster share' was started"
            )
        if directory not in agents:
            agents.append(directory)
    found += [_Direction(f"may run code on {path.name}", trusted_coordinators(path)) for path in agents]
    return found


def _is_agent(directory: Path) -> bool:
    # Any other folder would get the mode of an agent's, readable for its owner alone.
    return (directory / "identity.json").is_file()


def _list(directions: list[_Direction]) -> int:
    rows = [(direction.meaning, entry) for direction in directions for entry in direction.store.read()]
    if not rows:
        print("nobody is trusted except clusters and agents of your own user on this machine")
        return 0
    print_table(
        ("what", "name", "owner", "fingerprint", "last address", "since"),
        [
            (meaning, entry.name, entry.owner, fingerprint(entry.key), entry.address, _day(entry))
            for meaning, entry in rows
        ],
    )
    print("take it back with 'notebook-cluster trust remove NAME' (or an owner, or a fingerprint): in force at once")
    return 0


def _remove(who: str, directions: list[_Direction]) -> int:
    removed = [(direction.meaning, entry) for direction in directions for entry in direction.store.remove(who)]
    for meaning, entry in removed:
        print(f"removed: {entry.name} of {entry.owner}, key {fingerprint(entry.key)} ({meaning})")
    if removed:
        print("in force at once: within a second open connections are closed and kernels that it started end")
        return 0
    known = sorted({entry.name for direction in directions for entry in direction.store.read()})
    others = f"trusted are {', '.join(known)}" if known else "nobody is trusted"
    raise ValueError(f"nobody with name, owner or fingerprint {who!r:.200} is trusted: {others}")


def _day(entry: Trusted) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.since)) if entry.since else ""
