"""What the doctor says about what was measured: pure functions, with answers that no real network gives at will."""

from typing import Any

import pytest

from notebook_cluster.doctor import findings as f
from notebook_cluster.doctor import network, versions
from notebook_cluster.doctor.findings import Examined
from notebook_cluster.protocol.measuring import PairMeasured
from notebook_cluster.protocol.peer import Diagnosis
from notebook_cluster.protocol.state import JobView, PeerView
from notebook_cluster.protocol.views import Finding

DAY = 86_400.0


def examined(name: str, **changes: Any) -> Examined:
    """A peer without anything wrong; ``said`` replaces fields of its Diagnosis."""
    said = {
        "interfaces": [("eth0", f"10.0.0.{len(name)}")], "packages": {"numpy": "2.4.1", "notebook-cluster": "0.1.0"},
        "facts": {"python": "3.12.1", "platform": "Linux-6.1"},
    } | changes.pop("said", {})  # fmt: skip
    fields = {"hosts": (f"10.0.0.{len(name)}",), "nodes": (f"{name}-node",), "here": name == "local"} | changes
    return Examined(name, Diagnosis(ticket=1, time=0.0, **said), **fields)


def only(findings: list[Finding], level: str) -> Finding:
    (found,) = [finding for finding in findings if finding.level == level]
    return found


@pytest.mark.parametrize(
    ("theirs", "sent", "received", "ahead"),
    [(1000.5, 1000.0, 1001.0, 0.0), (1000.0 + DAY, 1000.0, 1000.0, DAY), (996.0, 1000.0, 1002.0, -5.0)],
)
def test_the_answer_is_taken_to_be_made_half_the_way(theirs: float, sent: float, received: float, ahead: float) -> None:
    assert f.offset(theirs, sent, received) == ahead


def test_a_clock_a_day_ahead_is_named_with_its_value_and_the_command() -> None:
    found = only(
        f.clocks([examined("local", offset=0.0), examined("mini", offset=DAY - 60), examined("desk", offset=0.1)]),
        "warning",
    )
    assert "mini's clock is 23 h 59 min ahead" in found.text
    assert found.fix == "# on mini\nsudo timedatectl set-ntp true"


def test_a_mac_is_told_its_own_command_for_the_clock() -> None:
    mac = examined("mini", offset=-9.0, said={"facts": {"platform": "macOS-15.1-arm64"}})
    assert "sntp" in only(f.clocks([mac]), "warning").fix
    assert "9.0 s behind" in only(f.clocks([mac]), "warning").text


def test_it_is_said_where_programs_may_outlive_their_node() -> None:
    mac = examined("mini", said={"facts": {"platform": "macOS-15.1-arm64"}})
    assert f.programs([examined("local")]) == []
    assert "on mini a program that a node starts" in only(f.programs([examined("local"), mac]), "info").text


def test_when_all_clocks_differ_alike_it_is_this_machine_that_is_wrong() -> None:
    peers = [examined("local", offset=0.0), examined("mini", offset=3600.2), examined("desk", offset=3600.0)]
    assert "this machine's clock is 1 h 00 min behind those of mini and desk" in only(f.clocks(peers), "warning").text


def test_two_peers_of_one_name_are_named_with_address_and_key() -> None:
    rows = [("mini", "10.0.0.2:1", "aaaa"), ("mini", "10.0.0.3:1", "bbbb"), ("desk", "10.0.0.4:1", "cccc")]
    found = only(f.same_names(rows), "warning")
    assert all(word in found.text for word in ("'mini'", "10.0.0.2:1 (key aaaa)", "10.0.0.3:1 (key bbbb)"))
    assert "--name mini-2" in found.fix
    assert only(f.same_names(rows[1:]), "ok")


def test_one_peer_that_is_heard_and_connected_is_one_peer() -> None:
    assert only(f.same_names([("mini", "10.0.0.2:1", "aaaa"), ("mini", "10.0.0.9:1", "aaaa")]), "ok")


def test_multicast_that_is_blocked_on_a_peer_is_named_and_the_others_are_well() -> None:
    blocked = examined("mini", said={"multicast": "wlan0 (10.0.0.2): UDP port 5353 is blocked, other multicast passes"})
    findings = f.multicast([examined("local"), blocked])
    assert "mini cannot use mDNS: wlan0 (10.0.0.2)" in only(findings, "warning").text
    assert "5353/udp" in only(findings, "warning").fix
    assert "local" in only(findings, "ok").text


def test_a_neighbour_that_is_not_heard_means_that_multicast_does_not_pass() -> None:
    found = only(f.unheard([("mini", "10.0.0.2:5000", True)]), "warning")
    assert "does not pass" in found.text
    assert "%cluster add 10.0.0.2:5000" in found.fix
    assert only(f.unheard([("far", "10.9.0.2:5000", False)]), "info")


def test_two_interfaces_in_one_network_are_named() -> None:
    own = [("eth0", "10.0.0.2", "255.255.255.0"), ("wlan0", "10.0.0.3", "255.255.255.0"), ("tun0", "10.8.0.2", "")]
    assert "eth0 and wlan0" in only(f.twin_interfaces(own), "info").text
    assert f.twin_interfaces([("eth0", "10.0.0.2", "255.255.255.0"), ("eth0", "10.0.0.3", "255.255.255.0")]) == []


@pytest.mark.parametrize(("pairing", "word"), [(True, "%cluster add mini --code"), (False, "notebook-cluster share")])
def test_a_peer_that_is_not_trusted_says_how_it_becomes_trusted(pairing: bool, word: str) -> None:
    peer = PeerView(
        name="mini", key="k", address="10.0.0.2:1", condition="untrusted", found_by="mdns", trusted=False,
        pairing=pairing,
    )  # fmt: skip
    assert word in only(f.strangers([peer]), "info").fix


def test_dropped_frames_are_counted_by_cause_when_there_are_any() -> None:
    assert f.frames([examined("mini", dropped={"garbage": 0})]) == []
    assert (
        "3 frames from mini were dropped: 2 garbage, 1 stale"
        in f.frames([examined("mini", dropped={"garbage": 2, "stale": 1})])[0].text
    )


# ---- connections


def state(name: str, condition: str, answer: str, **changes: Any) -> network.LinkState:
    return network.LinkState(name, f"10.0.0.{len(name)}:5000", condition, changes.pop("reason", ""), answer, **changes)


def test_a_port_that_does_not_answer_is_an_error_for_a_peer_of_the_cluster_and_a_warning_else() -> None:
    silent = "no: 10.0.0.4:5000 did not answer in 2 s"
    (found,) = network.links([state("mini", "lost", silent, joined=True)])
    assert (found.level, "firewall" in found.text) == ("error", True)
    assert found.fix.startswith("# on mini\nsudo ufw allow 5000/tcp")
    assert "%cluster invite" in found.fix
    assert network.links([state("mini", "found", silent)])[0].level == "warning"


def test_a_refused_port_means_that_nothing_listens() -> None:
    (found,) = network.links([state("mini", "lost", "no: 10.0.0.4:5000 refused the connection", joined=True)])
    assert "nothing listens" in found.text
    assert "share --name mini" in found.fix


def test_a_peer_that_answers_over_tcp_but_is_refused_says_why() -> None:
    (found,) = network.links([state("mini", "refused", "10.0.0.4:5000", reason="mini speaks protocol 2", joined=True)])
    assert (found.level, "mini speaks protocol 2" in found.text) == ("error", True)


def test_peers_asleep_and_peers_only_remembered_are_no_trouble() -> None:
    silent = "no: 10.0.0.4:5000 did not answer in 2 s"
    findings = network.links([state("mini", "asleep", ""), state("desk", "found", silent, remembered=True)])
    assert {finding.level for finding in findings} == {"info"}


def test_a_pair_that_cannot_meet_though_both_reach_here_is_client_isolation() -> None:
    peers = [examined("local"), examined("mini"), examined("desk")]
    ways = {(a.name, b.name): "" for a in peers for b in peers if a is not b}
    ways["mini", "desk"] = ways["desk", "mini"] = "10.0.0.4:1 did not answer in 2 s"
    (found,) = network.paths(peers, ways, [])
    assert found.subject == "isolation"
    assert "desk and mini cannot reach each other" in found.text
    assert found.table[1:] == [["desk", "mini", ways["desk", "mini"]], ["mini", "desk", ways["mini", "desk"]]]


def test_one_way_shut_is_a_firewall_that_gets_the_addresses_to_let_in() -> None:
    peers = [examined("local"), examined("mini"), examined("desk", hosts=("10.0.0.7", "$(reboot)"))]
    ways = {("desk", "mini"): "10.0.0.4:1 did not answer in 2 s", ("mini", "desk"): "", ("local", "mini"): ""}
    (found,) = network.paths(peers, ways, [])
    assert "mini takes no connections of desk" in found.text
    assert found.fix == "# on mini\nsudo ufw allow proto tcp from 10.0.0.7"


def test_relayed_pairs_are_named() -> None:
    findings = network.paths([examined("local"), examined("mini")], {("local", "mini"): ""}, [("mini", "desk")])
    assert "mini and desk" in only(findings, "warning").text


def test_speeds_are_a_table_and_a_slow_link_is_named() -> None:
    fast = examined("mini", round_trip=0.0021, jitter=0.0004, bytes_per_s=31e6)
    slow = examined("desk", round_trip=0.04, jitter=0.03, bytes_per_s=0.4e6)
    assert only(network.speeds([examined("local"), fast]), "ok").table[1] == ["mini", "2.1 ms", "0.4 ms", "31 MB/s"]
    assert "desk" in only(network.speeds([fast, slow]), "warning").text


def test_pairs_of_nodes_are_a_table_and_one_that_does_not_answer_is_named() -> None:
    direct = PairMeasured(ticket=1, node="desk", round_trip=0.002, bytes_per_s=20e6)
    relayed = PairMeasured(ticket=2, node="attic", round_trip=0.009, bytes_per_s=4e6, way="relay")
    failed = PairMeasured(ticket=3, node="attic", error="no answer within 8 s")
    assert [row[-1] for row in network.between_nodes([("mini", direct), ("mini", relayed)], 2)[0].table] == [
        "way",
        "direct",
        "relayed",
    ]
    found = only(network.between_nodes([("mini", direct), ("desk", failed)], 3), "warning")
    assert "(2 of 3 pairs)" in found.text
    assert "desk and attic" in found.text


def test_a_training_job_is_told_what_a_round_costs_on_the_slowest_way() -> None:
    job = JobView(
        name="model", strategy="DiLoCo", round=10, attempt=0, phase="", members=["a", "b"], parameters=10**6,
        bytes_sent=40_000_000,
    )  # fmt: skip
    measured = [("mini", PairMeasured(ticket=1, node="desk", round_trip=0.01, bytes_per_s=2e6))]
    way = network.slowest_way([examined("mini", bytes_per_s=1e6)], measured)
    assert way == ("mini to desk", 2e6)
    (found,) = network.rounds([job], way)
    assert "a round of 'model' moves 4 MB per node and takes about 2.0 s" in found.text
    assert network.rounds([job], None) == []


# ---- versions


def test_a_package_that_differs_is_a_table_with_a_cell_to_copy() -> None:
    old = examined("mini", said={"packages": {"numpy": "2.3.0", "notebook-cluster": "0.1.0"}})
    found = only(versions.versions([examined("local"), old, examined("desk")], []), "warning")
    assert found.table == [["package", "local", "mini", "desk"], ["numpy", "2.4.1", "2.3.0", "2.4.1"]]
    assert found.fix == "%%on mini-node\n%pip install numpy==2.4.1"


def test_a_package_that_the_cells_import_must_be_on_every_peer() -> None:
    has = examined("local", said={"packages": {"numpy": "2.4.1", "pandas": "2.2.0"}})
    lacks = examined("mini", nodes=())
    found = only(versions.versions([has, lacks], ["pandas"]), "warning")
    assert found.table[1] == ["pandas", "2.2.0", "none"]
    assert found.fix == "# on mini\npip install pandas==2.2.0"


def test_builds_of_one_release_for_other_devices_are_equal_and_mlx_may_be_missing() -> None:
    cuda = examined("local", said={"packages": {"torch": "2.8.0+cu128", "mlx": "0.26.0"}})
    cpu = examined("mini", said={"packages": {"torch": "2.8.0+cpu"}})
    assert [finding.level for finding in versions.versions([cuda, cpu], [])] == ["ok"]


def test_another_version_of_this_package_is_installed_on_that_machine_not_in_a_cell() -> None:
    old = examined("mini", said={"packages": {"numpy": "2.4.1", "notebook-cluster": "0.0.9"}})
    found = only(versions.versions([examined("local"), old], []), "warning")
    assert "%%on" not in found.fix
    assert "pip install notebook-cluster==0.1.0" in found.fix


def test_another_python_says_what_to_install() -> None:
    other = examined("mini", said={"facts": {"python": "3.11.9"}})
    found = only(versions.versions([examined("local"), other], []), "warning")
    assert "mini has Python 3.11, local has 3.12" in found.text
    assert "--python 3.12" in found.fix


def test_a_version_with_shell_in_it_is_shown_but_never_in_a_fix() -> None:
    evil = examined("local", said={"packages": {"numpy": "2.4.1; reboot"}})
    found = only(versions.versions([evil, examined("mini")], []), "warning")
    assert "reboot" not in found.fix


def test_imports_are_read_from_cells_with_magics_and_from_broken_ones() -> None:
    sources = [
        "%matplotlib inline\nimport numpy as np, os\nfrom sklearn.svm import SVC\n!ls",
        "def f():\n    import pandas.io\n    from . import x",
        "import torch\nthis is not python",
    ]
    assert versions.imported_modules(sources) == {"numpy", "sklearn", "pandas", "torch"}
    assert versions.distributions({"zmq", "yaml_that_is_not_there"}) == ["pyzmq"]
