"""Peers that are known from the last time, and what has changed at their address since."""

import json
import re
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster, ClusterError
from notebook_cluster.client.cluster import add_request
from notebook_cluster.coordinator.peers.links import CONNECT_TIMEOUT
from notebook_cluster.security import Trusted, fingerprint, new_identity, trusted_peers
from tests.cluster import running_cluster
from tests.conftest import wait_until
from tests.ports import free_port
from tests.strangers import Stranger, Strangers

pytestmark = pytest.mark.usefixtures("work")

SILENT = """
import zeroconf, pathlib
if pathlib.Path({flag!r}).exists():
    zeroconf.Zeroconf.register_service = lambda self, *args, **options: None
"""
"""A machine that others do not hear over mDNS, while ``flag`` is there."""


def silent(strangers: Strangers, name: str, flag: Path, *options: str, folder: str = "") -> Stranger:
    flag.touch()
    return strangers(name, *options, folder=folder, start_up=SILENT.format(flag=str(flag)))


def forgets_this_user(stranger: Stranger) -> None:
    """Start it anew without the trust that it had."""
    stranger.end()
    (stranger.home / "agent" / "trusted_coordinators.json").unlink()
    stranger.again()


def key_of(stranger: Stranger) -> str:
    return str(json.loads((stranger.home / "agent" / "identity.json").read_bytes())["public_key"])


def why_not(cluster: Cluster, address: str) -> str:
    """Why ``address`` cannot be added, said before the wait for a machine that does not answer would be over."""
    error = cluster.connection.request(add_request(address, 1, ""), list[str]).exception(CONNECT_TIMEOUT)
    assert isinstance(error, ClusterError)
    return str(error)


def test_a_remembered_peer_that_removed_its_trust_is_paired_again_by_its_name(strangers: Strangers, work: Path) -> None:
    flag = work / "silent"
    mini = strangers("mini", "--port", str(free_port(1)), start_up=SILENT.format(flag=str(flag)))
    with running_cluster("first", local=0) as cluster:
        assert cluster.add(mini.name, code=mini.code) == [mini.name]
    mini.end()
    flag.touch()
    mini.again()
    assert mini.code
    with running_cluster(local=0) as cluster:
        assert cluster.add(mini.name) == [mini.name]
        (row,) = [row for row in cluster.state().peers if row.name == mini.name]
        assert row.found_by == "remembered"
        flag.unlink()
        forgets_this_user(mini)
        wait_until(
            lambda: any(row.name == mini.name and row.pairing for row in cluster.state().peers), 60, "it to be heard"
        )
        wait_until(
            lambda: any(row.name == mini.name and row.condition == "refused" for row in cluster.state().peers),
            60, "its refusal",
        )  # fmt: skip
        code = mini.code
        assert cluster.add(mini.name, 1, code=code) == [f"{mini.name}-2"]


def test_a_remembered_peer_that_removed_its_trust_is_paired_again_at_its_typed_address(
    strangers: Strangers, work: Path
) -> None:
    mini = silent(strangers, "mini", work / "silent", "--port", str(free_port(1)))
    with running_cluster("first", local=0) as cluster:
        assert cluster.add(mini.pairing, code=mini.code) == [mini.name]
    forgets_this_user(mini)
    code = mini.code
    with running_cluster(local=0) as cluster:
        with pytest.raises(ClusterError, match="does not trust this machine"):
            cluster.add(mini.pairing)
        assert cluster.add(mini.pairing, code=code) == [mini.name]


@pytest.mark.parametrize("typed", ["pairing", "link"])
def test_another_machine_at_the_address_of_a_remembered_peer_is_named_at_once(
    strangers: Strangers, work: Path, typed: str
) -> None:
    port = free_port(1)
    old = new_identity().public_key
    trusted_peers().add(Trusted("attic", old, "me@attic", f"127.0.0.1:{port}"))
    desk = silent(strangers, "desk", work / "silent", "--port", str(port))
    address = desk.pairing if typed == "pairing" else f"127.0.0.1:{desk.port}"
    code = desk.code
    with running_cluster(local=0) as cluster:
        said = why_not(cluster, address)
        for part in (desk.name, fingerprint(key_of(desk)), "'attic'", fingerprint(old), "--code CODE"):
            assert part in said, said
        assert cluster.add(address, code=code) == [desk.name]
    # Now two that were paired have this address: the one that is there is meant.
    with running_cluster(local=0) as cluster:
        assert cluster.add(address) == [desk.name]


def test_a_machine_with_the_name_of_a_remembered_one_at_its_address_is_refused_loudly(
    strangers: Strangers, work: Path
) -> None:
    port = free_port(1)
    desk = silent(strangers, "desk", work / "silent", "--port", str(port))
    old = new_identity().public_key
    trusted_peers().add(Trusted(desk.name, old, "me@desk", f"127.0.0.1:{port}"))
    with running_cluster(local=0) as cluster:
        for code in ("", desk.code):
            with pytest.raises(ClusterError, match=f"notebook-cluster trust remove {desk.name}"):
                cluster.add(desk.pairing, code=code)


def test_a_program_that_is_no_agent_at_the_address_of_a_remembered_peer_is_named_soon(
    strangers: Strangers, work: Path
) -> None:
    port = free_port(1)
    trusted_peers().add(Trusted("attic", new_identity().public_key, "me@attic", f"127.0.0.1:{port}"))
    desk = silent(strangers, "desk", work / "silent", "--port", str(port), "--no-code")
    assert desk.port == port
    with running_cluster(local=0) as cluster:
        assert re.search(r"'attic' .*another key or another program", why_not(cluster, f"127.0.0.1:{port}"))
