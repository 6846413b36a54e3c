"""``notebook-cluster pair`` and ``peers`` against machines that are shared."""

import os
import re
import subprocess
import uuid
from pathlib import Path

import pytest

from notebook_cluster.discovery import GROUP_VARIABLE
from notebook_cluster.security import (
    Trusted,
    TrustStore,
    data_directory,
    fingerprint,
    load_identity,
    new_identity,
    private_directory,
    trusted_coordinators,
    trusted_peers,
)
from tests.command import COMMAND, run_command
from tests.conftest import Agents, wait_until


@pytest.fixture
def name() -> str:
    """Of a peer that nobody else on this network has."""
    return f"mini-{uuid.uuid4().hex[:6]}"


def code_of(agents: Agents, name: str) -> tuple[str, str]:
    """(code, HOST:PORT) that an agent shows."""
    wait_until(lambda: "Logs:" in agents.output(name), 60, "introduction")
    code = re.search(r"code +(\S+)\n", agents.output(name))
    place = re.search(r"address +(\S+)\n", agents.output(name))
    assert code is not None
    assert place is not None
    return code[1], place[1]


def assert_paired(agents: Agents, name: str, done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"paired with {name} of ")
    assert len(done.stdout.splitlines()) == 1
    agent = load_identity(agents.root / "agents" / name)
    (peer,) = trusted_peers().entries()
    assert (peer.name, peer.key) == (name, agent.public_key)
    assert fingerprint(peer.key) in done.stdout
    (coordinator,) = trusted_coordinators(agents.root / "agents" / name).entries()
    assert coordinator.key == load_identity(data_directory()).public_key


def test_pairing_by_name_pins_both_keys(agents: Agents, name: str) -> None:
    agents(name)
    code, _ = code_of(agents, name)
    assert_paired(agents, name, run_command("pair", name, "--code", code.upper().replace("-", " ")))


def test_pairing_by_address_pins_both_keys(agents: Agents, name: str) -> None:
    agents(name)
    code, place = code_of(agents, name)
    assert_paired(agents, name, run_command("pair", place, "--code", code))


def test_a_wrong_code_says_how_many_tries_are_left(agents: Agents, name: str) -> None:
    agents(name)
    _, place = code_of(agents, name)
    done = run_command("pair", place, "--code", "wrong-code-99")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    # 19, or less where another cluster on this network has tried its class code meanwhile.
    assert re.search(r": 1[0-9] tries left before it is dead", done.stderr)
    assert trusted_peers().entries() == []


def test_a_known_name_with_another_key_is_refused_before_the_code_is_used(
    agents: Agents, jupyter_dirs: Path, name: str
) -> None:
    agents(name)
    code, place = code_of(agents, name)
    stranger = {"JUPYTER_RUNTIME_DIR": str(jupyter_dirs / "r"), "JUPYTER_DATA_DIR": str(jupyter_dirs / "d")}
    store = TrustStore(private_directory(jupyter_dirs / "d" / "notebook_cluster") / "trusted_peers.json", "name")
    known = Trusted(name, new_identity().public_key, "anna@mini")
    store.add(known)
    for target in (name, place):
        done = run_command("pair", target, "--code", code, **stranger)
        assert done.returncode == 1
        assert fingerprint(known.key) in done.stderr
        assert f"notebook-cluster trust remove {name}" in done.stderr
    assert store.entries() == [known]
    assert run_command("trust", "remove", name, **stranger).returncode == 0
    assert run_command("pair", place, "--code", code, **stranger).returncode == 0
    assert [entry.key for entry in store.entries()] != [known.key]


def test_nobody_of_that_name_says_what_to_do(jupyter_dirs: Path) -> None:
    name = f"xylophone-{uuid.uuid4().hex[:6]}"  # like no peer that another test shares meanwhile
    done = run_command("pair", name, "--code", "tiger-lamp-42")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert f"notebook-cluster share --name {name}" in done.stderr


def test_a_peer_without_a_code_says_so(agents: Agents, name: str) -> None:
    agents(name, options=("--no-code",))
    done = run_command("pair", name, "--code", "tiger-lamp-42")
    assert done.returncode == 1
    assert "no code open" in done.stderr


def test_peers_says_who_has_a_code_open_and_who_has_none(agents: Agents, jupyter_dirs: Path, name: str) -> None:
    shut = f"{name}-shut"
    agents(name)
    agents(shut, options=("--no-code",))
    stranger = {"JUPYTER_RUNTIME_DIR": str(jupyter_dirs / "r"), "JUPYTER_DATA_DIR": str(jupyter_dirs / "d")}
    listed = run_command("peers", "--seconds", "5", **stranger)
    assert (listed.returncode, listed.stderr) == (0, "")
    words = " ".join(listed.stdout.split())
    assert f"%cluster add {name} --code CODE" in words
    assert "no code is open there" in words


def test_peers_lists_typed_addresses_with_what_is_there(agents: Agents, jupyter_dirs: Path, name: str) -> None:
    agents(name)
    _, place = code_of(agents, name)
    port = place.rpartition(":")[2]
    known = f"127.0.0.1:{port},127.0.0.1:1"
    listed = run_command("peers", "--seconds", "0.1", NOTEBOOK_CLUSTER_PEERS=known)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert any(name in line for line in listed.stdout.splitlines())
    assert any("127.0.0.1:1 " in line for line in listed.stdout.splitlines())


def test_a_group_hears_its_own_machines_only_and_is_named(agents: Agents, name: str) -> None:
    third = {GROUP_VARIABLE: f"room of {name}"}
    agents(name, environment=third)
    agents(f"{name}-outside")

    def listed(**group: str) -> str:
        """Once the machine that is to be heard is."""
        heard = name if group else f"{name}-outside"

        def said() -> str:
            text = run_command("peers", "--seconds", "2", **group).stdout
            return text if heard in text else ""

        return wait_until(said, 60, heard)

    inside, outside = listed(**third), listed()
    assert f"{name}-outside" not in inside
    assert {word for word in outside.split() if word.startswith(name)} == {f"{name}-outside"}
    assert f"announced on the local network (mDNS) (group 'room of {name}' of {GROUP_VARIABLE})" in agents.output(name)
    lonely = run_command("peers", "--seconds", "0.1", **{GROUP_VARIABLE: "nobody's"})
    assert f'no peer was heard (group "nobody\'s" of {GROUP_VARIABLE}): run' in lonely.stdout


def test_two_peers_of_one_name_are_both_listed_with_the_way_out(agents: Agents, jupyter_dirs: Path, name: str) -> None:
    other = {"JUPYTER_RUNTIME_DIR": str(jupyter_dirs / "r"), "JUPYTER_DATA_DIR": str(jupyter_dirs / "d")}
    agents(name)
    twin = Agents(jupyter_dirs / "twin")
    folder = twin.root / "agents" / name
    folder.mkdir(parents=True)
    command = [COMMAND, "share", "--name", name, "--data-dir", str(folder)]
    twin.processes[name] = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | other
    )
    try:
        for _ in range(5):
            listed = run_command("peers", "--seconds", "3")
            if f"2 peers are called {name}" in listed.stdout:
                break
        else:
            pytest.fail(listed.stdout)
    finally:
        twin.end(name)
    line = next(line for line in listed.stdout.splitlines() if line.startswith("2 peers"))
    assert "Add one by its address" in line
    assert "--name" in line


def test_peers_lists_clusters_that_invite_machines(jupyter_dirs: Path, name: str) -> None:
    from notebook_cluster.discovery import ClusterAdvertiser

    cluster = ClusterAdvertiser(name, "anna@laptop", new_identity().public_key, 4711, 4712, hosts=("127.0.0.1",))
    cluster.start()
    try:
        for _ in range(5):
            listed = run_command("peers", "--seconds", "3")
            if name in listed.stdout:
                break
        else:
            pytest.fail(listed.stdout)
    finally:
        cluster.close()
    row = next(line for line in listed.stdout.splitlines() if name in line)
    assert "anna@laptop" in row
    assert "notebook-cluster share --dial 127.0.0.1:4712 --code CODE" in row
