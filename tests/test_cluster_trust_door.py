"""Peers that come by themselves: the invitation, dialling in, coming back, and closing the door."""

import psutil
import pytest

from notebook_cluster.client import Cluster, ClusterError
from notebook_cluster.discovery import ClusterBrowser
from notebook_cluster.protocol.state import PeerView
from notebook_cluster.security import data_directory, load_identity, trusted_peers
from tests.cluster import kernel_pid, kill, node, run, running_cluster
from tests.conftest import wait_until
from tests.strangers import Stranger, Strangers

pytestmark = pytest.mark.usefixtures("work")


def door_of(cluster: Cluster) -> str:
    """Where its code is accepted, as a machine on this one reaches it."""
    return f"127.0.0.1:{cluster.invite().addresses[0].rpartition(':')[2]}"


def dialling(cluster: Cluster, strangers: Strangers, name: str) -> Stranger:
    """A stranger that was told the code of ``cluster`` and has got a node."""
    code = cluster.invite().code
    stranger = strangers(name, "--dial", door_of(cluster), "--code", code)
    wait_node(cluster, stranger.name)
    return stranger


def wait_node(cluster: Cluster, name: str) -> None:
    wait_until(
        lambda: any(row.name == name and row.condition == "ok" for row in cluster.state().nodes),
        60,
        lambda: f"node {name}: {cluster.state().nodes} {cluster.state().events}",
    )


def peer(cluster: Cluster, name: str) -> PeerView:
    return next(row for row in cluster.state().peers if row.name == name)


def listens_beyond_loopback(pid: int) -> list[int]:
    """Ports at which a process can be reached from outside."""
    rows = psutil.Process(pid).net_connections("tcp")
    return sorted(row.laddr.port for row in rows if row.status == "LISTEN" and not row.laddr.ip.startswith("127."))


def test_nobody_can_reach_a_coordinator_that_has_invited_nobody() -> None:
    with running_cluster(local=0) as cluster:
        pid = cluster.connection.file.pid
        assert listens_beyond_loopback(pid) == []
        assert cluster.state().invitation == ""
        invitation = cluster.invite()
        assert len(listens_beyond_loopback(pid)) == 2
        assert cluster.state().invitation == f"{invitation.addresses[0]} {invitation.code}"
        again = cluster.invite()
        assert (again.code, again.addresses) == (invitation.code, invitation.addresses)
        cluster.close_invitation()
        assert cluster.state().invitation == ""
        # libzmq closes a socket in a thread of its own, a little later than it says.
        wait_until(lambda: len(listens_beyond_loopback(pid)) == 1, 60, lambda: str(listens_beyond_loopback(pid)))


def test_an_invitation_is_advertised_while_it_is_open() -> None:
    browser = ClusterBrowser()
    browser.start()
    try:
        with running_cluster(local=0, invite=True, code="open-house-31") as cluster:
            key = load_identity(data_directory()).public_key
            row = wait_until(
                lambda: next((row for row in browser.clusters().values() if row.public_key == key), None),
                60,
                "the cluster",
            )
            assert row.name == cluster.name
            assert f":{row.pairing_port} open-house-31" in cluster.state().invitation
            cluster.close_invitation()
            wait_until(
                lambda: all(row.public_key != key for row in browser.clusters().values()), 60, "the record to go"
            )
    finally:
        browser.close()


def test_a_peer_that_dials_gets_nodes_and_keeps_them_when_the_invitation_ends(strangers: Strangers) -> None:
    with running_cluster(local=1) as cluster:
        mini = dialling(cluster, strangers, "mini")
        row = peer(cluster, mini.name)
        assert (row.condition, row.found_by, row.trusted) == ("connected", "dialled", True)
        assert [entry.name for entry in trusted_peers().entries()] == [mini.name]
        cluster.close_invitation()
        assert run(cluster, "x = 4\nprint(world_size)") == {"local": "2\n", mini.name: "2\n"}
        cluster.restart(mini.name)
        assert run(cluster, "print(x)")[mini.name] == "4\n"


def test_a_wrong_code_does_not_get_in(strangers: Strangers) -> None:
    with running_cluster(local=0) as cluster:
        door = door_of(cluster)
        other = strangers("other", "--dial", door, "--code", "wrong-code-77")
        wait_until(lambda: any("127.0.0.1" in event.text for event in cluster.state().events), 60, "the attempt")
        assert trusted_peers().entries() == []
        assert cluster.state().nodes == []
        assert all(row.name != other.name or not row.trusted for row in cluster.state().peers)


def test_who_dialled_comes_back_to_a_restarted_coordinator(strangers: Strangers) -> None:
    killed = Cluster.start("test", local=1)
    mini = dialling(killed, strangers, "mini")
    ports = listens_beyond_loopback(killed.connection.file.pid)
    pid = kernel_pid(killed, mini.name)
    run(killed, "x = 6")
    kill(killed.connection.file.pid)
    with running_cluster(local=1) as cluster:
        wait_node(cluster, mini.name)
        assert run(cluster, "print(x)") == {"local": "6\n", mini.name: "6\n"}
        assert kernel_pid(cluster, mini.name) == pid
        # The code ended with the one that had it; the doors are where they were.
        assert cluster.state().invitation == ""
        assert set(listens_beyond_loopback(cluster.connection.file.pid)) < set(ports)
        cluster.invite()
        assert listens_beyond_loopback(cluster.connection.file.pid) == ports
    killed.close()


def test_removed_trust_cuts_the_connection_that_the_peer_has_made(strangers: Strangers) -> None:
    with running_cluster(local=1) as cluster:
        mini = dialling(cluster, strangers, "mini")
        trusted_peers().remove(mini.name)
        wait_until(lambda: node(cluster.state(), mini.name).condition == "dead", 60, "the node to be gone")
        assert node(cluster.state(), mini.name).reason == f"trust in {mini.name} was removed"
        assert run(cluster, "print(world_size)") == {"local": "1\n"}
        # It may be heard over mDNS, like any machine of the network that is not paired.
        wait_until(
            lambda: (
                {(row.found_by, row.trusted) for row in cluster.state().peers if row.name == mini.name}
                <= {("mdns", False)}
            ),
            60,
            lambda: f"the peer to be gone: {cluster.state().peers}",
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"code": "abc"}, "code 'abc' has 3 letters"),
        ({"minutes": -1.0}, "--minutes -1"),
        ({"minutes": float("nan")}, "--minutes nan"),
        ({"minutes": 1e9}, r"--minutes 1e\+09"),
    ],
)
def test_a_bad_invitation_is_one_line(options: dict[str, object], words: str) -> None:
    with running_cluster(local=0) as cluster, pytest.raises(ClusterError, match=words) as caught:
        cluster.invite(**options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
