"""Trust stores: what is kept, what is refused, and that nobody is trusted by mistake."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from notebook_cluster import security
from notebook_cluster.security import KeyChanged, Trusted, TrustStore, trusted_coordinators, trusted_peers
from notebook_cluster.security.trust import MAX_ENTRIES


def key() -> str:
    return security.new_identity().public_key


def entry(name: str = "mini", owner: str = "ann@mini", **fields: Any) -> Trusted:
    return Trusted(**({"name": name, "key": key(), "owner": owner} | fields))


@pytest.fixture
def store(jupyter_dirs: Path) -> TrustStore:
    return trusted_peers()


# ---- what is kept ------------------------------------------------------------------------------------------------


def test_an_entry_is_kept_in_a_private_file(store: TrustStore) -> None:
    mini = entry(address="192.168.1.5:4711", since=1.7e9)
    store.add(mini)
    assert trusted_peers().entries() == [mini]
    assert store.find(mini.key) == mini
    assert store.named("mini") == [mini]
    assert (store.find(key()), store.named("desk")) == (None, [])
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700


def test_nobody_is_trusted_at_first(store: TrustStore) -> None:
    assert (store.entries(), store.read()) == ([], [])
    assert store.remove("mini") == []
    assert not store.path.exists()


def test_a_key_that_is_paired_again_replaces_its_entry(store: TrustStore) -> None:
    old = entry()
    store.add(old)
    new = entry("laptop", "ann@laptop", key=old.key, address="10.0.0.1:5")
    store.add(new)
    assert store.entries() == [new]


def test_peers_may_share_an_owner_but_not_a_name(store: TrustStore) -> None:
    first, second = entry("mini"), entry("desk")
    store.add(first)
    store.add(second)
    with pytest.raises(KeyChanged, match="'mini' is known with key") as caught:
        store.add(entry("mini", "eve@eve"))
    assert store.entries() == [first, second]
    assert security.fingerprint(first.key) in str(caught.value)
    assert "notebook-cluster trust remove mini" in str(caught.value)


def test_coordinators_may_share_a_name_but_not_an_owner(tmp_path: Path) -> None:
    store = trusted_coordinators(tmp_path / "agent")
    store.add(entry("class", "ann@desk"))
    store.add(entry("class", "bob@desk"))
    changed = entry("other", "ann@desk")
    with pytest.raises(KeyChanged, match="trust remove ann@desk") as caught:
        store.add(changed)
    assert security.fingerprint(changed.key) in str(caught.value)
    assert len(store.entries()) == 2


@pytest.mark.parametrize("what", ["name", "owner", "fingerprint"])
def test_removal_by_name_owner_or_fingerprint(store: TrustStore, what: str) -> None:
    mini, desk = entry(), entry("desk", "bob@desk")
    store.add(mini)
    store.add(desk)
    text = security.fingerprint(mini.key) if what == "fingerprint" else getattr(mini, what)
    assert store.remove(text) == [mini]
    assert store.entries() == [desk]
    store.add(entry("mini", "ann@mini"))  # another key may take the name now


def test_an_address_is_remembered_and_an_unknown_key_ignored(store: TrustStore) -> None:
    mini = entry()
    store.add(mini)
    store.set_address(mini.key, "[fe80::1%eth0]:4711")
    store.set_address(key(), "10.0.0.1:5")
    assert [known.address for known in store.entries()] == ["[fe80::1%eth0]:4711"]
    with pytest.raises(ValueError, match="write it as HOST:PORT"):
        store.set_address(mini.key, "nowhere")


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "../x"},
        {"name": "<b>x</b>"},
        {"owner": ""},
        {"owner": "a" * 101},
        {"owner": "a\x1b[31mb"},
        {"owner": "a\u202eb"},
        {"key": "short"},
        {"address": "host"},
        {"address": "host:70000"},
        {"address": "ho st:1"},
        {"address": "host:1\n"},
        {"since": float("nan")},
        {"since": -1.0},
    ],
)
def test_an_absurd_entry_cannot_be_made(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not usable|not a CURVE public key|not a time"):
        entry(**fields)


def test_the_number_of_entries_is_bounded(store: TrustStore) -> None:
    records = [{"name": f"p{number}", "key": key(), "owner": "a@b"} for number in range(MAX_ENTRIES)]
    security.write_private(store.path, json.dumps(records).encode())
    with pytest.raises(ValueError, match="holds 1000 keys: remove some"):
        store.add(entry())
    assert len(store.entries()) == MAX_ENTRIES


def test_who_we_are_is_user_at_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ann")
    monkeypatch.setattr("platform.node", lambda: "desk\n" + "x" * 200)
    text = security.owner()
    assert text.startswith("ann@deskxxx")
    assert len(text) == 100


def test_a_user_without_a_name_has_an_owner_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr("getpass.getuser", nobody)
    assert security.owner().startswith(f"user{os.getuid()}@")


# ---- at the same time ----------------------------------------------------------------------------------------------


def test_a_change_by_another_store_is_seen_at_once(store: TrustStore) -> None:
    other = trusted_peers()
    mini = entry()
    other.add(mini)
    assert store.entries() == [mini]
    other.remove("mini")
    assert store.entries() == []
    assert store.find(mini.key) is None


def test_an_unchanged_file_is_not_read_again(store: TrustStore, monkeypatch: pytest.MonkeyPatch) -> None:
    mini = entry()
    store.add(mini)
    assert store.find(mini.key) == mini
    monkeypatch.setattr(store, "_load", lambda: pytest.fail("the file was read again"))
    for _ in range(100):
        assert store.find(mini.key) == mini


def test_processes_that_add_at_once_lose_nothing(store: TrustStore) -> None:
    script = (
        "import sys\n"
        "from notebook_cluster import security\n"
        "store = security.trusted_peers()\n"
        "for number in range(20):\n"
        "    key = security.new_identity().public_key\n"
        "    store.add(security.Trusted(f'{sys.argv[1]}-{number}', key, 'a@b'))\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script, name]) for name in ("first", "second")]
    try:
        assert [process.wait(60) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    names = {known.name for known in store.entries()}
    assert names == {f"{name}-{number}" for name in ("first", "second") for number in range(20)}
    assert sorted(path.name for path in store.path.parent.iterdir()) == [
        ".trusted_peers.json.lock",
        "trusted_peers.json",
    ]


# ---- a file that cannot be trusted -----------------------------------------------------------------------------------


def record(**fields: Any) -> dict[str, Any]:
    return {"name": "mini", "key": "k" * 40, "owner": "a@b"} | fields


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"17",
        b'{"mini": 1}',
        b"[1]",
        b"[" * 100_000,
        json.dumps([record(name="../x")]).encode(),
        json.dumps([record(key="short")]).encode(),
        json.dumps([record(owner=5)]).encode(),
        json.dumps([record(admin=True)]).encode(),
        json.dumps([record(), record()]).encode(),
        json.dumps([record()]).encode() + b" " * 1_000_000,
    ],
)
def test_a_damaged_file_trusts_nobody_and_is_named(
    store: TrustStore, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store.add(entry())
    assert len(store.entries()) == 1
    security.write_private(store.path, content)
    for _ in range(3):
        assert store.entries() == []
    assert [message for message in caplog.messages if "nobody is trusted" in message] == caplog.messages[:1]
    for change in (store.read, lambda: store.add(entry()), lambda: store.remove("mini")):
        with pytest.raises(ValueError, match=r"trusted_peers\.json is damaged .* delete it, then pair again"):
            change()
    assert store.path.read_bytes() == content


def test_a_file_that_others_may_write_trusts_nobody_from_then_on(
    store: TrustStore, caplog: pytest.LogCaptureFixture
) -> None:
    mini = entry()
    store.add(mini)
    assert store.entries() == [mini]
    store.path.chmod(0o666)
    assert store.entries() == []
    assert "mode 0666, so other users may have added keys" in caplog.text
    with pytest.raises(PermissionError, match="chmod 600"):
        store.add(entry("desk"))
    store.path.chmod(0o600)
    assert store.entries() == [mini]


def test_a_link_to_another_file_trusts_nobody(store: TrustStore, tmp_path: Path) -> None:
    store.add(entry())
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_bytes(store.path.read_bytes())
    elsewhere.chmod(0o600)
    store.path.unlink()
    store.path.symlink_to(elsewhere)
    assert store.entries() == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a file to another user")
def test_a_file_of_another_user_trusts_nobody(store: TrustStore) -> None:
    store.add(entry())
    os.chown(store.path, 12345, 12345)
    assert store.entries() == []
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        store.read()
