"""``notebook-cluster pair``: trust a peer that shows a code, without a cluster."""

import argparse
import asyncio
import time

import zmq

from notebook_cluster.cli.secret_code import ASK, read_code
from notebook_cluster.cli.values import default_name
from notebook_cluster.pairing import PairingError, Partner, first_that_answers
from notebook_cluster.pairing import pair as pair_as_guest
from notebook_cluster.peering.candidates import Candidate, Trust
from notebook_cluster.peering.peer_finder import PeerFinder
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security import Trusted, data_directory, fingerprint, load_identity, owner


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
