"""Several hosts on one network: found, paired, trained with, cut off, firewalled, relayed, and what is on the wire."""

import getpass
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import namespaces
from tests.command import COMMAND
from tests.conftest import wait_until
from tests.hosts import CLUSTER, HostNotebook, Share, notebook_on, numbers
from tests.namespaces import Host, Network

pytestmark = namespaces.needed(240)

CODE = "tiger-lamp-42"
SOURCE_MARK = "marker-in-the-source-7c1d9a"
OUTPUT_MARK = "marker-in-the-output-35e0b2"
STATE_MARK = struct.pack("<16f", *(4097 + 331 * index for index in range(16)))
"""64 bytes of parameters that a joiner is sent."""
WORK_MARK = struct.pack("<16f", *(65537 + 919 * index for index in range(16)))
"""64 bytes of what every member contributes to the first round."""
CONTROL_MARK = struct.pack("<16f", *(9001 + 77 * index for index in range(16)))
"""64 bytes that go over the network in the clear, so that the search is known to find something."""


@pytest.fixture
def network() -> Iterator[Network]:
    with Network("desk", "mini", "book") as made:
        yield made


def train(rounds: int, more: str = "") -> str:
    """A cell that trains ``rounds`` rounds and prints a hash of the parameters."""
    return f"""
%%on_all
# {SOURCE_MARK} {SOURCE_MARK}
import hashlib, struct, time
import numpy as np, torch
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64, bias=False)
start = np.tile(np.array([4097 + 331 * i for i in range(16)], np.float32), 256) * (nc.rank() == 0)
move = np.tile(np.array([65537 + 919 * i for i in range(16)], np.float32), 256)
with torch.no_grad():
    model.weight[:] = torch.from_numpy(start.astype(np.float32).reshape(64, 64))
sync = nc.LocalSGD(model, every=2, codec="float32", name="marked")
print("-".join(["marker", "in", "the", "output", "35e0b2"]), flush=True)
for step in range(2 * {rounds}):
    if step % 2 == 0:
        with torch.no_grad():
            model.weight -= torch.from_numpy(move.reshape(64, 64))
    sync.step(loss=step)
    {more or "pass"}
sync.finish()
print("trained", sync.round, hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()[:16])
"""


def trained(notebook: HostNotebook, nodes: set[str], rounds: int) -> None:
    """Every node has trained ``rounds`` rounds and holds the same parameters."""
    lines = {name: notebook.printed(name).splitlines()[-1] for name in nodes}
    assert len(set(lines.values())) == 1, lines
    word, number, digest = next(iter(lines.values())).split()
    assert (word, int(number), len(digest)) == ("trained", rounds, 16)


def send_in_the_clear(sender: Host, receiver: Host) -> None:
    """CONTROL_MARK over plain TCP."""
    port = 4711
    listen = f"""
import socket
server = socket.create_server(("0.0.0.0", {port}))
print("listening", flush=True)
connection = server.accept()[0]
while connection.recv(65536):
    pass
"""
    send = f"""
import socket
connection = socket.create_connection(("{receiver.address}", {port}), 10)
connection.sendall(bytes.fromhex("{CONTROL_MARK.hex()}") * 100)
"""
    process = receiver.popen([sys.executable, "-c", listen], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listening\n"
    done = sender.run([sys.executable, "-c", send])
    assert done.returncode == 0, done.stderr
    process.wait(30)
    process.stdout.close()


# ---- found, paired, trained; and nothing of it can be read on the way -----------------------------------------


def test_three_hosts_find_each_other_pair_and_train_and_the_wire_shows_nothing(network: Network) -> None:
    desk, mini, book = (network[name] for name in ("desk", "mini", "book"))
    with network.capture(network.root / "capture.bin") as capture:
        shares = [Share(host, "--code", CODE) for host in (mini, book)]
        with notebook_on(desk) as notebook:
            shown = notebook.works(f"%cluster start {CLUSTER} --peers all --code {CODE} --no-panel")
            print(shown)
            names = {"local", "mini", "book"}
            notebook.wait_for_nodes(names)
            cell = notebook.run(train(3))
            assert cell.error is None, cell.shown
            assert cell.shown.count(OUTPUT_MARK) >= 1
            trained(notebook, names, 3)
            assert notebook.commits() == [sorted(names)] * 3
            send_in_the_clear(mini, book)
        for share in shares:
            share.end()
    print(f"captured {capture.frames} frames, {capture.size} bytes, {capture.lost} lost")
    assert capture.lost == 0
    assert capture.contains(CONTROL_MARK)
    # Three nodes of 16 KiB each, three rounds: it saw the training.
    assert capture.size > 200_000
    for mark in (SOURCE_MARK.encode(), OUTPUT_MARK.encode(), STATE_MARK, WORK_MARK, CODE.encode()):
        assert not capture.contains(mark), mark


# ---- a cable is pulled ------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_a_host_that_is_cut_off_for_20_s_loses_nothing_and_its_work_joins_a_later_round(network: Network) -> None:
    desk, mini, book = (network[name] for name in ("desk", "mini", "book"))
    for host in (mini, book):
        Share(host, "--code", CODE)
    stop = network.root / "stop"
    source = f"""
%%on_all
import hashlib, os, threading, time
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
sync = nc.DiLoCo(model, every=10)

def talk():
    number = 0
    while not os.path.exists({str(stop)!r}):
        number += 1
        print(nc.node() + "-line", number, flush=True)
        time.sleep(0.1)

talker = threading.Thread(target=talk)
talker.start()
while not os.path.exists({str(stop)!r}):
    with torch.no_grad():
        model.weight += 0.01 * torch.randn(64, 64)
    sync.step()
    time.sleep(0.05)
sync.finish()
talker.join()
print("trained", sync.round, hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()[:16])
"""
    with notebook_on(desk) as notebook:
        notebook.works(f"%cluster start {CLUSTER} --peers all --code {CODE} --no-panel")
        names = {"local", "mini", "book"}
        notebook.wait_for_nodes(names)
        cell = notebook.start(source)
        everybody, others = sorted(names), ["book", "local"]
        wait_until(lambda: everybody in notebook.commits(), 60, lambda: f"a first round: {notebook.commits()}")
        mini.link_down()
        down = time.monotonic()
        wait_until(lambda: others in notebook.commits()[-2:], 60, lambda: f"a round without mini: {notebook.commits()}")
        wait_until(lambda: time.monotonic() - down > 20, 60, "20 s")
        before = len(notebook.commits())
        mini.link_up()
        wait_until(
            lambda: everybody in notebook.commits()[before:], 60,
            lambda: f"a round with mini's work: {notebook.commits()[before:]} {notebook.log[-2000:]}",
        )  # fmt: skip
        stop.touch()
        notebook.until(cell, timeout=60)
        assert cell.error is None, cell.error
        for name in names:
            lines = numbers(notebook.printed(name), f"{name}-line")
            assert lines == list(range(1, len(lines) + 1))  # none is missing, doubled or out of order
            assert len(lines) > 150
        assert len({notebook.printed(name).splitlines()[-1] for name in names}) == 1
        # While it was on no network it did not say that it is reached at its loopback address.
        assert not [text for text in notebook.events() if "127.0.0.1:" in text and "cannot reach" in text]
        last = numbers(notebook.printed("mini"), "mini-line")[-1]
        assert f"mini-line {last}\n" in cell.shown  # also in the notebook


# ---- firewalls ----------------------------------------------------------------------------------------------------


def invitation(notebook: HostNotebook) -> tuple[str, str]:
    """Address and code of ``%cluster invite``."""
    address, code = notebook.value("cluster.state().invitation").split()
    return address, code


def test_a_host_behind_a_firewall_dials_in_and_trains(network: Network) -> None:
    desk, mini = network["desk"], network["mini"]
    mini.firewall_inbound(multicast=True)
    with notebook_on(desk) as notebook:
        notebook.works(f"%cluster start {CLUSTER} --peers all --no-panel")
        print(notebook.works("%cluster invite"))
        address, code = invitation(notebook)
        assert address.startswith(f"{desk.address}:")
        Share(mini, "--dial", address, "--code", code)
        notebook.wait_for_nodes({"local", "mini"})
        peers = notebook.value("[(row.name, row.found_by) for row in cluster.state().peers]")
        assert ["mini", "dialled"] in peers
        cell = notebook.run(train(3))
        assert cell.error is None, cell.shown
        trained(notebook, {"local", "mini"}, 3)
        assert notebook.commits() == [["local", "mini"]] * 3


def test_hosts_that_cannot_reach_each_other_train_through_the_relay(network: Network) -> None:
    desk, mini, book = (network[name] for name in ("desk", "mini", "book"))
    network.block("mini", "book")
    for host in (mini, book):
        Share(host, "--code", CODE)
    with notebook_on(desk) as notebook:
        notebook.works(f"%cluster start {CLUSTER} --peers all --code {CODE} --no-panel")
        names = {"local", "mini", "book"}
        notebook.wait_for_nodes(names)
        cell = notebook.run(train(3))
        assert cell.error is None, cell.shown
        trained(notebook, names, 3)
        assert notebook.commits()[-1] == sorted(names)
        # It is said when both have been seen to live, which may be after a short training.
        wait_until(
            lambda: any("relay" in line and "mini" in line and "book" in line for line in notebook.events()),
            what="the line that says who is relayed",
        )


# ---- the doctor ---------------------------------------------------------------------------------------------------


def findings(notebook: HostNotebook, *packages: str) -> list[tuple[str, str, str, str]]:
    """(subject, level, text and table, fix) of every finding that is not good news."""
    fields = "(row.subject, row.level, row.text + ' ' + str(row.table), row.fix)"
    found = notebook.value(f"[{fields} for row in cluster.examine({list(packages)})]")
    for row in found:
        print(row)
    return [tuple(row) for row in found if row[1] in ("warning", "error")]


def trouble(found: list[tuple[str, str, str, str]], *words: str) -> tuple[str, str, str, str]:
    """The one finding that has all of ``words``, and a way out."""
    rows = [row for row in found if all(word in " ".join(row) for word in words)]
    assert rows, (words, found)
    assert rows[0][3], f"no way out: {rows[0]}"
    return rows[0]


@pytest.mark.proof
def test_the_doctor_sees_that_multicast_is_blocked(network: Network) -> None:
    desk, mini = network["desk"], network["mini"]
    mini.block_multicast()
    share = Share(mini, "--code", CODE, "--port", "4800")
    assert share.port() == 4800
    with notebook_on(desk) as notebook:
        notebook.works(f"%cluster start {CLUSTER} --no-panel")
        notebook.works(f"%cluster add {mini.address}:4801 --code {CODE}")
        notebook.wait_for_nodes({"local", "mini"})
        trouble(findings(notebook), "multicast", "mini")


@pytest.mark.proof
def test_the_doctor_sees_a_blocked_port(network: Network) -> None:
    """The link goes through; nodes that dial mini's mesh port are dropped by its firewall."""
    desk, mini = network["desk"], network["mini"]
    Share(mini, "--code", CODE, "--port", "4800")
    with notebook_on(desk) as notebook:
        notebook.works(f"%cluster start {CLUSTER} --peers all --code {CODE} --no-panel")
        notebook.wait_for_nodes({"local", "mini"})
        mini.firewall_inbound()
        trouble(findings(notebook), "port", "mini")


def test_the_doctor_sees_other_versions_of_a_package(network: Network) -> None:
    desk, mini = network["desk"], network["mini"]
    environment = {}
    for host, version in ((desk, "1.4.0"), (mini, "1.5.2")):
        folder = host.folder / "site"
        information = folder / f"lessonlib-{version}.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lessonlib\nVersion: {version}\n")
        (folder / "lessonlib.py").write_text(f"__version__ = {version!r}\n")
        environment[host.name] = {"PYTHONPATH": str(folder)}
    desk.environment |= environment["desk"]
    Share(mini, "--code", CODE, environment=environment["mini"])
    with notebook_on(desk) as notebook:
        notebook.works(f"%cluster start {CLUSTER} --peers all --code {CODE} --no-panel")
        notebook.wait_for_nodes({"local", "mini"})
        row = trouble(findings(notebook, "lessonlib"), "lessonlib", "1.4.0", "1.5.2")
        assert "pip install" in row[3]


def test_the_doctor_sees_two_peers_with_one_name(network: Network) -> None:
    desk, mini, book = (network[name] for name in ("desk", "mini", "book"))
    for host in (mini, book):
        Share(host, "--code", CODE, name="laptop")
    with notebook_on(desk) as notebook:
        notebook.works(f"%cluster start {CLUSTER} --no-panel")
        seen = "[row.name for row in cluster.state().peers].count('laptop')"
        wait_until(lambda: notebook.value(seen) == 2, 60, "two peers called laptop")
        row = trouble(findings(notebook), "laptop")
        assert mini.address in " ".join(row)
        assert book.address in " ".join(row)


# ---- trust taken back ---------------------------------------------------------------------------------------------


SLEEPING = """
%%on mini
import os, time
print("pid", os.getpid(), flush=True)
time.sleep(60)
print("slept")
"""


@pytest.mark.proof
def test_trust_that_is_removed_ends_a_running_cell_at_once(network: Network) -> None:
    desk, mini = network["desk"], network["mini"]
    share = Share(mini, "--code", CODE)
    with notebook_on(desk) as notebook:
        notebook.works(f"%cluster start {CLUSTER} --peers all --code {CODE} --no-panel")
        notebook.wait_for_nodes({"local", "mini"})
        cell = notebook.start(SLEEPING)
        wait_until(lambda: "pid" in notebook.printed("mini"), 60, "the cell to run on mini")
        pid = int(notebook.printed("mini").split()[1])
        removed = mini.run([COMMAND, "trust", "remove", f"{getpass.getuser()}@desk"])
        began = time.monotonic()
        assert removed.returncode == 0, removed.stderr
        wait_until(lambda: not Path("/proc", str(pid)).exists(), 20, "the end of the kernel")
        notebook.until(cell, timeout=20)
        print(f"{time.monotonic() - began:.1f} s after the removal: {cell.error} {notebook.nodes()}")
        assert cell.error is not None
        assert notebook.nodes()["mini"] != "ok"
        assert any("mini" in line and "trust" in line for line in notebook.events()), notebook.events()
        assert "slept" not in notebook.printed("mini")
        # Nothing of the desk is connected to the peer any more, and nothing can be.
        wait_until(lambda: not connections(mini, share.port(), desk.address), 20, "the end of the open connection")
        again = notebook.run("%cluster add mini")
        print(again.error)
        assert again.error is not None
        assert "trust" in again.error.value


def connections(host: Host, port: int, other: str) -> list[str]:
    """Established TCP connections from ``other`` to ``port`` of ``host``."""
    lines = host.run(["ss", "-tnH", "state", "established", f"( sport = :{port} )"]).stdout.splitlines()
    return [line for line in lines if other in line]
