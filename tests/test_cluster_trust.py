"""Which machines a cluster uses: those that were paired, from the code that is typed to the trust that is removed."""

import asyncio
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import zmq

from notebook_cluster.client import Cluster, ClusterError, find_peers
from notebook_cluster.client.found_peers import nobody_came
from notebook_cluster.pairing import PairingHost
from notebook_cluster.protocol import PROTOCOL_VERSION
from notebook_cluster.protocol.pairing import Here
from notebook_cluster.protocol.state import PeerView
from notebook_cluster.security import Gate, OpenCode, Trusted, fingerprint, new_identity, trusted_peers
from tests.cluster import Watcher, is_running, kernel_pid, kill, node, run, running_cluster
from tests.conftest import wait_until
from tests.strangers import Stranger, Strangers

pytestmark = pytest.mark.usefixtures("work")

CLASS_CODE = f"class-{secrets.token_hex(3)}"
"""Unique to this run: whoever tests beside us has it not open."""


@pytest.fixture
def shared_cluster() -> Iterator[Cluster]:
    with running_cluster(local=0) as cluster:
        yield cluster


def peer(cluster: Cluster, name: str) -> PeerView | None:
    return next((row for row in cluster.state().peers if row.name == name), None)


def wait_heard(
    cluster: Cluster, stranger: Stranger, condition: Callable[[PeerView], bool] = lambda row: True
) -> PeerView:
    """The row of ``stranger`` once it is there and fulfils ``condition``."""

    def look() -> PeerView | None:
        row = peer(cluster, stranger.name)
        return row if row is not None and condition(row) else None

    return wait_until(look, 60, f"{stranger.name} to be found")


def texts(cluster: Cluster, level: str) -> list[str]:
    return [event.text for event in cluster.state().events if event.level == level]


# ---- pairing


def test_a_code_makes_a_strangers_machine_usable_once_and_for_all(strangers: Strangers) -> None:
    mini = strangers("mini")
    code = mini.code
    with running_cluster(local=1) as cluster:
        row = wait_heard(cluster, mini, lambda row: row.pairing)
        assert (row.condition, row.trusted) == ("untrusted", False)
        with pytest.raises(ClusterError, match=rf"not paired with you yet: %cluster add {mini.name} --code CODE"):
            cluster.add(mini.name)
        assert cluster.add(mini.name, code=code) == [mini.name]
        assert run(cluster, "print(world_size)") == {"local": "2\n", mini.name: "2\n"}
        (entry,) = trusted_peers().entries()
        assert (entry.name, entry.key) == (mini.name, row.key)
        assert entry.address.endswith(f":{mini.port}")
        row = wait_heard(cluster, mini, lambda row: row.jitter_ms is not None)
        assert (row.condition, row.trusted) == ("connected", True)
    with running_cluster("second") as cluster:
        assert cluster.add(mini.name) == [mini.name]


def test_a_start_that_finds_only_peers_that_are_not_trusted_names_each_and_the_way_out(strangers: Strangers) -> None:
    mini = strangers("mini")
    with running_cluster("first", local=0) as cluster:
        wait_heard(cluster, mini, lambda row: row.pairing)

    def start() -> str:
        said: list[str] = []
        known = [f"127.0.0.1:{mini.port}"]
        with running_cluster("second", local=1, peers=["all"], known=known, on_progress=said.append):
            return next(line for line in said if line.startswith("peers that were found"))

    lines: list[str] = []

    def names_it() -> str:
        lines.append(start())
        return lines[-1] if mini.name in lines[-1] else ""

    # A start does not wait until the agent of a busy machine has answered.
    line = wait_until(names_it, 60, lambda: f"{mini.name} in {lines}")
    assert f"{mini.name}: it is not paired with you yet: %cluster add {mini.name} --code CODE" in line


def test_a_start_with_nobody_around_says_what_to_do_next() -> None:
    own = PeerView(name="local", key="k", address="", condition="connected", found_by="local", trusted=True)
    alone = nobody_came([own], False)
    assert alone == (
        "no other machine shares itself on this network yet: run `notebook-cluster share` there, then "
        "%cluster add NAME --code CODE with the name and the code that it shows"
    )
    assert nobody_came([own], True).endswith("there with this code, and it joins as soon as it is found")
    peers = [
        PeerView(name=f"p{number}", key="k", address="a:1", condition="refused", found_by="mdns", trusted=False,
                 reason=f"reason {number}")
        for number in range(5)
    ]  # fmt: skip
    assert nobody_came([own, *peers[:1]], False) == "peers that were found may not be used yet: p0: reason 0"
    assert nobody_came(peers, False).endswith("p2: reason 2; and 2 more (%cluster peers)")


def test_a_wrong_code_says_how_many_tries_are_left(strangers: Strangers) -> None:
    mini = strangers("mini")
    right = mini.code
    with running_cluster(local=0) as cluster:
        for left in (19, 18):
            with pytest.raises(ClusterError, match=rf"{mini.name}.* wrong .*{left} tries left"):
                cluster.add(mini.name, code="wrong-code-77")
        assert trusted_peers().entries() == []
        assert cluster.add(mini.name, code=right.upper().replace("-", " ")) == [mini.name]


def test_a_typed_pairing_address_and_a_typed_link_address(strangers: Strangers) -> None:
    mini = strangers("mini")
    code, address = mini.code, mini.pairing
    with running_cluster(local=0) as cluster:
        with pytest.raises(ClusterError, match="not paired with you yet"):
            cluster.add(address)
        assert cluster.add(address, code=code) == [mini.name]
    with running_cluster(local=0) as cluster:
        assert cluster.add(f"localhost:{mini.port}") == [mini.name]


def test_a_machine_that_is_asked_for_twice_has_one_node_unless_more_are_wanted(strangers: Strangers) -> None:
    mini = strangers("mini")
    with running_cluster(local=0) as cluster:
        assert cluster.add(mini.name, code=mini.code) == [mini.name]
        assert cluster.add(mini.name) == [mini.name]
        assert [node.name for node in cluster.state().nodes] == [mini.name]
        assert cluster.add(mini.name, 1) == [f"{mini.name}-2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mini:0", "port is a number from 1 to 65535"),
        ("mini:http", "port is a number from 1 to 65535"),
        ("mini:99999", "port is a number from 1 to 65535"),
        (":7777", "not an address or a host name"),
        ("a b:7777", "not an address or a host name"),
        ("300.1.1.1:7777", "not an IPv4 address"),
        ("[::1]:7777", "IPv6"),
        ("no-such-host.invalid:7777", "not known as the name of a machine"),
        ("127.0.0.1:1", "no agent was heard at 127.0.0.1:1"),
    ],
)  # fmt: skip
def test_a_bad_address_is_one_line(shared_cluster: Cluster, text: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words) as caught:
        shared_cluster.add(text)
    assert "\n" not in str(caught.value)
    assert text.rpartition(":")[0] in str(caught.value)


@pytest.mark.parametrize("code", ["abc", "x" * 80, "tiger lämp/!42"])
def test_an_unusable_code_is_one_line(shared_cluster: Cluster, code: str) -> None:
    with pytest.raises(ClusterError, match=r"code .* use ") as caught:
        shared_cluster.add("mini", code=code)
    assert "\n" not in str(caught.value)


# ---- a class code


def test_a_class_code_pairs_with_all_who_share_with_it_also_later(strangers: Strangers) -> None:
    first, second = (strangers(name, "--code", CLASS_CODE) for name in ("one", "two"))
    other = strangers("three", "--code", "another-code-31")
    for stranger in strangers.all:
        assert stranger.code
    with running_cluster(local=1, code=CLASS_CODE) as cluster:
        wait_until(lambda: len(cluster.state().nodes) >= 3, 60, "the class")
        late = strangers("late", "--code", CLASS_CODE)
        wait_until(
            lambda: (
                {row.name for row in cluster.state().nodes if row.condition == "ok"}
                >= {"local", first.name, second.name, late.name}
            ),
            60,
            lambda: f"four nodes: {cluster.state().nodes} {cluster.state().events}",
        )
        wait_until(lambda: any(other.name in text for text in texts(cluster, "warning")), 60, "the one that failed")
        assert sum(f"{other.name} was not paired" in text for text in texts(cluster, "warning")) == 1, (
            cluster.state().events
        )
        row = peer(cluster, other.name)
        assert row is not None
        assert not row.trusted
        # Already trusted: the code is not needed and not used.
        assert set(run(cluster, "print(world_size)").values()) == {"4\n"}
    assert {entry.name for entry in trusted_peers().entries()} == {first.name, second.name, late.name}


@contextmanager
def pretenders(count: int, code: str) -> Iterator[tuple[list[PairingHost], list[int]]]:
    """So many pairing sockets that pretend to be peers, each with a key and a name of its own and ``code`` open."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="pretenders")
    thread.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = Gate(context)
    ports: list[int] = []

    def here(number: int) -> Here:
        key = new_identity().public_key
        return Here(protocol=PROTOCOL_VERSION, role="peer", name=f"fake-{number}", owner="them@there", key=key, port=9)

    async def opened() -> list[PairingHost]:
        hosts = [
            PairingHost(
                context,
                "tcp://127.0.0.1:0",
                gate=gate,
                here=partial(here, number),
                on_paired=lambda partner: None,
                on_attempt=lambda line: None,
            )
            for number in range(count)
        ]
        for host in hosts:
            ports.append(host.open(OpenCode(code, single_use=False)))
        return hosts

    async def closed(hosts: list[PairingHost]) -> None:
        for host in hosts:
            host.close()

    hosts = asyncio.run_coroutine_threadsafe(opened(), loop).result(10)
    try:
        yield hosts, ports
    finally:
        asyncio.run_coroutine_threadsafe(closed(hosts), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
        gate.close()
        context.destroy(linger=0)


def test_pretended_peers_get_twenty_guesses_of_a_class_code_and_no_more() -> None:
    with pretenders(24, "another-code-31") as (hosts, ports):
        known = [f"127.0.0.1:{port}" for port in ports]
        with running_cluster(local=0, code=CLASS_CODE, known=known) as cluster:
            wait_until(
                lambda: any("20 pairings with this code have failed" in text for text in texts(cluster, "warning")),
                60,
                lambda: f"the warning in {texts(cluster, 'warning')}",
            )
            with pytest.raises(ClusterError, match="20 pairings with this code have failed"):
                cluster.add(known[0], code=CLASS_CODE)

            def left_for_them() -> int:
                """Of 20 guesses, those that were not made at others of this network, which have other codes."""
                pattern = re.compile(r"(?!fake-)\S+ was not paired")
                return 20 - sum(bool(pattern.match(text)) for text in texts(cluster, "warning"))

            wait_until(
                lambda: sum(host.checked for host in hosts) >= left_for_them(),
                60,
                lambda: f"all guesses: {texts(cluster, 'warning')}",
            )
            assert left_for_them() <= sum(host.checked for host in hosts) <= 20
            named = {name for text in texts(cluster, "warning") for name in re.findall(r"fake-\d+", text)}
            assert len(named) >= left_for_them()
            assert trusted_peers().entries() == []


# ---- removing trust


def remove(stranger: Stranger) -> None:
    assert trusted_peers().remove(stranger.name)


def test_removed_trust_ends_the_use_of_a_peer_at_once(strangers: Strangers) -> None:
    mini = strangers("mini")
    with running_cluster(local=1) as cluster:
        cluster.add(mini.name, code=mini.code)
        pid = kernel_pid(cluster, mini.name)
        watcher = Watcher(cluster.execute("import time\nprint('on', flush=True)\nwhile rank: time.sleep(0.01)"))
        watcher.wait_for("on", mini.name)
        remove(mini)
        ended = watcher.wait_end(20)
        assert f"trust in {mini.name} was removed" in ended.results[mini.name].reason
        row = node(cluster.state(), mini.name)
        assert (row.condition, row.rank, row.reason) == ("dead", None, f"trust in {mini.name} was removed")
        assert run(cluster, "print(world_size)") == {"local": "1\n"}
        wait_until(lambda: not is_running(pid), 20, "its kernel to end")
        with pytest.raises(ClusterError, match=f"trust in {mini.name} was removed"):
            cluster.restart(mini.name)
        with pytest.raises(ClusterError, match="cannot be added"):
            cluster.add(mini.name)


def test_trust_removed_while_the_coordinator_was_dead_is_not_used_when_it_comes_back(strangers: Strangers) -> None:
    mini = strangers("mini")
    killed = Cluster.start("test", local=1)
    killed.add(mini.name, code=mini.code)
    kill(killed.connection.file.pid)
    remove(mini)
    with running_cluster() as cluster:
        row = node(cluster.state(), mini.name)
        assert (row.condition, row.reason) == ("dead", f"trust in {mini.name} was removed")
        wait_until(lambda: node(cluster.state(), "local").condition == "ok", 60, "the local node")
        assert run(cluster, "print(world_size)") == {"local": "1\n"}
        view = peer(cluster, mini.name)
        assert view is None or not view.trusted
    killed.close()


def test_a_peer_that_removed_its_trust_is_paired_again_with_a_code(strangers: Strangers) -> None:
    mini = strangers("mini")
    with running_cluster(local=0) as cluster:
        cluster.add(mini.name, code=mini.code)
    mini.end()
    (mini.home / "agent" / "trusted_coordinators.json").unlink()
    mini.again()
    code = mini.code
    with running_cluster(local=0) as cluster:
        wait_heard(cluster, mini, lambda row: row.pairing)
        with pytest.raises(ClusterError, match="does not trust this machine"):
            cluster.add(mini.name)
        assert cluster.add(mini.name, code=code) == [mini.name]


# ---- names and keys


def test_a_changed_key_of_a_known_name_is_refused_loudly(strangers: Strangers) -> None:
    mini = strangers("mini")
    old = new_identity().public_key
    trusted_peers().add(Trusted(mini.name, old, "somebody@else"))
    with running_cluster(local=0) as cluster:
        row = wait_heard(cluster, mini)
        assert row.condition == "untrusted"
        for text in (fingerprint(old), fingerprint(row.key), f"notebook-cluster trust remove {mini.name}"):
            assert text in row.reason
        wait_until(lambda: any(fingerprint(row.key) in text for text in texts(cluster, "error")), 60, "the loud line")
        for what in (mini.name, mini.pairing):
            with pytest.raises(ClusterError, match=f"notebook-cluster trust remove {mini.name}"):
                cluster.add(what, code=mini.code)
        assert "pairing:" not in mini.output.partition("Stop with")[2].replace("open on", "")
        trusted_peers().remove(mini.name)
        assert cluster.add(mini.name, code=mini.code) == [mini.name]


def test_two_strangers_of_one_name_are_told_apart_by_address(strangers: Strangers) -> None:
    one, two = strangers("twin", folder="one"), strangers("twin", folder="two")
    codes = one.code, two.code
    with running_cluster(local=0) as cluster:
        wait_until(lambda: sum(row.name == one.name for row in cluster.state().peers) == 2, 60, "both")
        with pytest.raises(ClusterError, match=f"2 peers are called '{one.name}'") as caught:
            cluster.add(one.name, code=codes[0])
        for stranger in (one, two):
            assert f":{stranger.port} (key " in str(caught.value)
        assert cluster.add(one.pairing, code=codes[0]) == [one.name]
    with running_cluster(local=0) as cluster:
        wait_until(lambda: sum(row.name == one.name for row in cluster.state().peers) == 2, 60, "both")
        assert cluster.add(one.name) == [one.name]
        assert any(f":{two.port}" in text and "another machine" in text for text in texts(cluster, "warning"))
        (used,) = [row for row in cluster.state().peers if row.condition == "connected" and row.name == one.name]
        assert used.address.endswith(f":{one.port}")


# ---- without mDNS


def test_peers_of_the_environment_are_known_and_added_with_all(
    strangers: Strangers, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini = strangers("mini", "--code", CLASS_CODE)
    monkeypatch.setenv("NOTEBOOK_CLUSTER_PEERS", f"{mini.pairing}, 127.0.0.1:1")
    rows = find_peers(0.1)
    assert any(row.name == mini.name and row.pairing for row in rows)
    (silent,) = [row for row in rows if row.address == "127.0.0.1:1"]
    assert (silent.found_by, silent.trusted) == ("typed", False)
    assert "no agent was heard at 127.0.0.1:1" in silent.reason
    with running_cluster(local=0, code=CLASS_CODE) as cluster:
        wait_until(lambda: [row.name for row in cluster.state().nodes] == [mini.name], 60, "the node")
        assert any(row.address == "127.0.0.1:1" and row.found_by == "typed" for row in cluster.state().peers)


def test_a_remembered_peer_is_tried_at_its_last_address() -> None:
    trusted_peers().add(Trusted("attic", new_identity().public_key, "me@attic", "127.0.0.1:1"))
    assert [(row.name, row.found_by) for row in find_peers(0.1) if row.name == "attic"] == [("attic", "remembered")]
    with running_cluster(local=0) as cluster:
        with pytest.raises(ClusterError, match=r"not found on this network, and it was last at 127\.0\.0\.1:1"):
            cluster.add("attic")
        row = peer(cluster, "attic")
        assert row is not None
        assert (row.found_by, row.condition) == ("remembered", "found")
