"""``notebook-cluster pair`` and ``trust``: trust a peer that shows a code, see who is trusted, take that back."""

import argparse
import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import zmq

from notebook_cluster.agent.sharing.grants import GRANTS_FILE, HeldGrant, read_grants, withdraw_grants
from notebook_cluster.cli.console import print_table
from notebook_cluster.cli.values import ASK, default_name, read_code
from notebook_cluster.pairing import PairingError, Partner, first_that_answers
from notebook_cluster.pairing import pair as pair_as_guest
from notebook_cluster.peering.candidates import Candidate, Trust
from notebook_cluster.peering.peer_finder import PeerFinder
from notebook_cluster.protocol.clock import dated
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security import (
    Trusted,
    TrustStore,
    data_directory,
    fingerprint,
    load_identity,
    owner,
    trusted_coordinators,
    trusted_peers,
)


def pair(options: argparse.Namespace) -> int:
    """Pair with a peer by name or address, and trust it from now on."""
    if options.code is None and options.code_file is None:
        options.code = ASK
    code = read_code(options, runs_long=False)
    trust = Trust()
    try:
        partner = asyncio.run(_pair(options.peer, code, trust))
    except (PairingError, RequestError) as error:
        raise RuntimeError(str(error)) from None
    address = f"{partner.host}:{partner.port}"
    trust.store.add(Trusted(partner.name, partner.key, partner.owner, address, time.time()))
    print(
        f"paired with {partner.name} of {partner.owner} at {address} (key {fingerprint(partner.key)}): your notebooks "
        f"can use it with %cluster add {partner.name}, also later and without a code"
    )
    return 0


async def _pair(peer: str, code: str, trust: Trust) -> Partner:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        found = await _find(context, peer, trust)
        # Known with another key: said before the code is used.
        if changed := trust.changed(found.name, found.key):
            raise RequestError(f"peer {changed}")
        if not found.pairing_port:
            raise RequestError(
                f"peer {found.name!r} has no code open: run 'notebook-cluster share' on that machine again, and use "
                "the code that it shows"
            )
        host = await first_that_answers(context, found.hosts, found.pairing_port, found.key)
        return await pair_as_guest(
            context, f"{host}:{found.pairing_port}", code,
            identity_key=load_identity(data_directory()).public_key, role="cluster", name=default_name(),
            owner=owner(), expect_key=found.key,
        )  # fmt: skip
    finally:
        context.destroy(linger=0)


async def _find(context: "zmq.Context[zmq.Socket[bytes]]", peer: str, trust: Trust) -> Candidate:
    finding = PeerFinder(context, trust, (), lambda new: None)
    await finding.start()
    try:
        # Where a paired peer was last is known at once, but not whether it has a code open.
        await finding.present()
        return (await finding.resolve(peer))[0]
    finally:
        await finding.close()


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
    grants = [(direction, held) for direction in directions for held in _grants(direction)]
    if not rows and not grants:
        print("nobody is trusted except clusters and agents of your own user on this machine")
        return 0
    print_table(
        ("what", "name", "owner", "fingerprint", "last address", "since"),
        [
            (meaning, entry.name, entry.owner, fingerprint(entry.key), entry.address, _day(entry))
            for meaning, entry in rows
        ],
    )
    for direction, held in grants:
        owner_of = next((entry.owner for _, entry in rows if entry.key == held.owner_key), "this user")
        print(
            f"until {dated(held.until)} {held.head} (key {fingerprint(held.key)}) leads cluster {held.cluster} of "
            f"{owner_of} on {direction.store.path.parent.name}"
        )
    print("take it back with 'notebook-cluster trust remove NAME' (or an owner, or a fingerprint): in force at once")
    return 0


def _grants(direction: _Direction) -> list[HeldGrant]:
    """Those that hold, as far as the clock tells."""
    return [row for row in read_grants(direction.store.path.parent / GRANTS_FILE) if row.until > time.time()]


def _remove(who: str, directions: list[_Direction]) -> int:
    removed, ended = [], []
    for direction in directions:
        entries = direction.store.remove(who)
        removed += [(direction.meaning, entry) for entry in entries]
        # Else they would hold again when their owner is paired anew.
        ended += withdraw_grants(direction.store.path.parent, who, {entry.key for entry in entries})
    for meaning, entry in removed:
        print(f"removed: {entry.name} of {entry.owner}, key {fingerprint(entry.key)} ({meaning})")
    for held in ended:
        print(f"removed: the grant of {held.head} to lead cluster {held.cluster}, key {fingerprint(held.key)}")
    if removed or ended:
        print("in force at once: within a second open connections are closed and kernels that it started end")
        return 0
    known = sorted({entry.name for direction in directions for entry in direction.store.read()})
    others = f"trusted are {', '.join(known)}" if known else "nobody is trusted"
    raise ValueError(f"nobody with name, owner or fingerprint {who!r:.200} is trusted: {others}")


def _day(entry: Trusted) -> str:
    return dated(entry.since) if entry.since else ""
