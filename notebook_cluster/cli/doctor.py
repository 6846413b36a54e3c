"""``notebook-cluster doctor``: what is wrong with network, clocks and versions, each with its way out.

A running cluster examines all its peers; without one, this machine and what is heard on its network are looked at.
"""

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from notebook_cluster.cli.clusters import check_running
from notebook_cluster.client import Cluster, running_clusters
from notebook_cluster.protocol.views import Finding
from notebook_cluster.protocol.wire import mismatch
from notebook_cluster.security import data_directory, fingerprint, same_user_keys, trusted_peers
from notebook_cluster.widgets import render_findings

if TYPE_CHECKING:
    from notebook_cluster.discovery import FoundPeer

LISTEN_S = 2.0
_HERE = "this machine"


def doctor(options: argparse.Namespace) -> int:
    """Print the findings; 1 when there is an error among them."""
    running = running_clusters()
    name = check_running(options.cluster) if options.cluster else running[0] if len(running) == 1 else ""
    if name:
        print(f"examining cluster {name}: this takes up to half a minute", file=sys.stderr)
        with Cluster.attach(name, kind="cli", live=False) as cluster:
            findings = cluster.examine(options.packages)
    else:
        findings = _clusters(running) + asyncio.run(_machine(options.packages))
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(findings)).decode())
    else:
        print(render_findings(findings))
    return 1 if any(finding.level == "error" for finding in findings) else 0


def _clusters(running: Sequence[str]) -> list[Finding]:
    from notebook_cluster.doctor.findings import listed, say

    if not running:
        text = "no cluster runs on this machine: looked at is the machine itself, and what it hears"
        return [say("cluster", "info", text, "in a notebook: %cluster start, then %cluster doctor")]
    fix = f"notebook-cluster doctor {running[0]}"
    return [say("cluster", "info", f"clusters {listed(running)} run here: name the one to examine", fix)]


async def _machine(packages: Sequence[str]) -> list[Finding]:
    """This machine, and the peers that it hears."""
    from notebook_cluster.agent.diagnosis import diagnose
    from notebook_cluster.discovery.addresses import networks
    from notebook_cluster.doctor import findings as f
    from notebook_cluster.doctor.versions import ALWAYS
    from notebook_cluster.protocol.peer import Diagnose

    wanted = list(dict.fromkeys((*ALWAYS, *packages)))
    diagnosis, found = await asyncio.gather(
        diagnose(Diagnose(ticket=0, packages=wanted)), asyncio.to_thread(_listen, LISTEN_S)
    )
    here = f.Examined(_HERE, diagnosis, here=True)
    rows = [*diagnosis.facts.items(), *((name, diagnosis.packages[name]) for name in sorted(diagnosis.packages))]
    versions = {"": "version"} | dict(rows)
    missing = [name for name in packages if name not in diagnosis.packages]
    return [
        *f.interfaces([here]),
        *f.twin_interfaces(networks()),
        *f.multicast([here]),
        *await _peers(found),
        *_files(),
        f.say("versions", "ok", f"Python {diagnosis.facts['python']} on {_HERE}", table=list(versions.items())),
        *(f.say("versions", "warning", f"{name} is not installed here", f"pip install {name}") for name in missing),
    ]


def _listen(seconds: float) -> "list[FoundPeer]":
    """The peers that are heard over mDNS in so many seconds."""
    import time

    from notebook_cluster.discovery import Browser

    browser = Browser()
    browser.start()
    try:
        time.sleep(seconds)
        return sorted(browser.peers().values(), key=lambda peer: peer.instance)
    finally:
        browser.close()


async def _peers(found: "Sequence[FoundPeer]") -> list[Finding]:
    from notebook_cluster.discovery import IN_GROUP
    from notebook_cluster.discovery.addresses import MAX_TARGETS, reach
    from notebook_cluster.doctor import findings as f
    from notebook_cluster.doctor import network

    mine = same_user_keys("agent")
    trusted = {entry.key for entry in trusted_peers().entries()} | set(mine)
    findings = []
    if mine:
        text = f"this user shares {_HERE} as {f.listed(sorted(set(mine.values())))}"
        findings.append(f.say("sharing", "info", text, "notebook-cluster trust list   # who may use it"))
    if not found:
        text = f"no peer was heard over mDNS within {LISTEN_S:g} s{IN_GROUP}"
        fix = "on another machine of this network: notebook-cluster share   # or add it by HOST:PORT"
        return [*findings, f.say("peers", "info", text, fix)]
    rows = [["name", "address", "device", "trusted by you", "a code is open"]]
    rows += [
        [p.name, p.address, p.device, "yes" if p.public_key in trusted else "no", "yes" if p.pairing_port else "no"]
        for p in found
    ]
    findings.append(f.say("peers", "ok", f"{len(found)} heard over mDNS{IN_GROUP}", table=rows))
    others = [line for peer in found if (line := mismatch(peer.name, peer.protocol))]
    findings += [f.say("versions", "warning", line, "pip install --upgrade notebook-cluster") for line in others]
    findings += f.same_names((peer.name, peer.address, fingerprint(peer.public_key)) for peer in found)
    tried = found[: MAX_TARGETS // 4]
    answers = await reach({peer.instance: [(host, peer.port) for host in peer.hosts[:4]] for peer in tried})
    states = [network.LinkState(peer.name, peer.address, "found", "", answers[peer.instance]) for peer in tried]
    return findings + network.links(states)


def _files() -> list[Finding]:
    """Private files that others can read: keys, and the lists of who is trusted."""
    from notebook_cluster.doctor.findings import say

    folders = [data_directory(), *(path for path in (data_directory() / "agents").glob("*") if path.is_dir())]
    private = [path for folder in folders for path in sorted(folder.glob("*.json"))]
    exposed = [path for path in private if _mode(path) & 0o077]
    if not exposed:
        return [say("files", "ok", f"files with keys and trust are private ({len(private)})")] if private else []
    return [
        say(
            "files", "error", f"{path} has mode {_mode(path):04o}: other users of this machine may have read it",
            f"chmod 600 {shlex.quote(str(path))}   # or delete it: a new key is made, and peers are paired again",
        )
        for path in exposed
    ]  # fmt: skip


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        return 0
