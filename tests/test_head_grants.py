"""Who may lead a cluster on an agent: the head that its owner grants, for that cluster, for a time, and nobody else."""

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from notebook_cluster.agent.sharing.grants import MOST_GRANTS, GrantRefused, Grants, read_grants, withdraw_grants
from notebook_cluster.protocol import heads as h
from notebook_cluster.protocol import peer as p
from notebook_cluster.security import Identity, announce, data_directory, load_identity, new_identity, withdraw
from tests.agent_client import AgentClient, SharedAgent

OWNER, HEAD, OTHER = new_identity(), new_identity(), new_identity()


def grant(serial: int, seconds: float = 60.0, *, head: Identity = HEAD, cluster: str = "digits") -> h.Grant:
    return h.Grant(ticket=serial, cluster=cluster, head="box", key=head.public_key, serial=serial, seconds=seconds)


# ---- the store


@pytest.fixture
def grants(tmp_path: Path) -> Grants:
    return Grants(tmp_path, lambda key: True)


def test_a_grant_holds_for_its_time_and_outlives_the_agent(grants: Grants, tmp_path: Path) -> None:
    grants.take(OWNER.public_key, grant(1))
    grants.take(OWNER.public_key, grant(1, 1e-9, head=OTHER, cluster="letters"))
    for store in (grants, Grants(tmp_path, lambda key: True)):
        held = store.find(HEAD.public_key)
        assert held is not None
        assert (held.cluster, held.owner_key, held.head) == ("digits", OWNER.public_key, "box")
        assert store.find(OTHER.public_key) is None
        assert store.find(OWNER.public_key) is None
    assert (tmp_path / "grants.json").stat().st_mode & 0o777 == 0o600


def test_it_ends_with_the_trust_in_its_owner(tmp_path: Path) -> None:
    trusted = {OWNER.public_key}
    store = Grants(tmp_path, trusted.__contains__)
    store.take(OWNER.public_key, grant(1))
    assert store.find(HEAD.public_key) is not None
    trusted.clear()
    assert store.find(HEAD.public_key) is None


@pytest.mark.parametrize("again", [1, 2, 3])
def test_a_grant_that_was_withdrawn_is_not_taken_again(grants: Grants, tmp_path: Path, again: int) -> None:
    grants.take(OWNER.public_key, grant(2))
    grants.take(OWNER.public_key, grant(3, 0.0))
    assert grants.find(HEAD.public_key) is None
    for store in (grants, Grants(tmp_path, lambda key: True)):
        with pytest.raises(
            GrantRefused, match=f"grant {again} for cluster digits is not taken: grant 3 came before it"
        ):
            store.take(OWNER.public_key, grant(again))
        assert store.find(HEAD.public_key) is None
    grants.take(OWNER.public_key, grant(4))
    assert grants.find(HEAD.public_key) is not None


def test_another_owner_neither_takes_nor_ends_it(grants: Grants) -> None:
    grants.take(OWNER.public_key, grant(5))
    with pytest.raises(GrantRefused, match="is the head of another cluster here"):
        grants.take(OTHER.public_key, grant(9))
    grants.take(OTHER.public_key, grant(9, 0.0, head=new_identity()))
    held = grants.find(HEAD.public_key)
    assert held is not None
    assert held.owner_key == OWNER.public_key


def test_unusable_grants_are_refused_and_named(grants: Grants) -> None:
    bad: list[tuple[h.Grant, str]] = [
        (grant(1, h.MOST_SECONDS + 1), "at most 31 d"),
        (grant(1, -1.0), "-1 s is not taken"),
        (grant(1, float("nan")), "nan s is not taken"),
        (grant(-1), "serial -1"),
        (grant(1, cluster="../x"), "'../x' is not usable"),
        (h.Grant(ticket=1, cluster="digits", head="box", key="k", serial=1, seconds=1.0), "not a CURVE public key"),
    ]
    for row, words in bad:
        with pytest.raises(GrantRefused, match=words):
            grants.take(OWNER.public_key, row)
    assert grants.in_force() == []


def test_old_clusters_make_room_and_running_ones_do_not(grants: Grants) -> None:
    heads = [new_identity() for _ in range(MOST_GRANTS)]
    for number, head in enumerate(heads):
        grants.take(OWNER.public_key, grant(number, head=head, cluster=f"c{number}"))
    with pytest.raises(GrantRefused, match=f"{MOST_GRANTS} clusters of this owner have a head here: stop one"):
        grants.take(OWNER.public_key, grant(100))
    grants.take(OWNER.public_key, grant(101, 0.0, head=heads[7], cluster="c7"))
    grants.take(OWNER.public_key, grant(102))
    assert grants.find(HEAD.public_key) is not None
    assert len(grants.in_force()) == MOST_GRANTS


def damaged(path: Path) -> None:
    path.write_text("[{")


def of_another_shape(path: Path) -> None:
    path.write_text('[{"cluster": "digits"}]')


def too_long(path: Path) -> None:
    path.write_text("[" + " " * 1_000_001 + "]")


@pytest.mark.parametrize("damage", [damaged, of_another_shape, too_long])
def test_a_damaged_file_lets_nobody_in_until_the_owner_grants_again(
    grants: Grants, tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    grants.take(OWNER.public_key, grant(1))
    damage(tmp_path / "grants.json")
    assert grants.find(HEAD.public_key) is None
    assert "no head is obeyed until its owner grants it again" in caplog.text
    grants.take(OWNER.public_key, grant(2))
    assert grants.find(HEAD.public_key) is not None


@pytest.mark.parametrize("who", ["digits", "box"])
def test_a_person_takes_it_back_and_it_stays_withdrawn(grants: Grants, tmp_path: Path, who: str) -> None:
    grants.take(OWNER.public_key, grant(5))
    assert withdraw_grants(tmp_path, "nobody") == []
    assert [row.key for row in withdraw_grants(tmp_path, who)] == [HEAD.public_key]
    assert grants.find(HEAD.public_key) is None
    with pytest.raises(GrantRefused, match="grant 5 came before it"):
        grants.take(OWNER.public_key, grant(5))
    (row,) = read_grants(tmp_path / "grants.json")
    assert row.until == 0


# ---- on a running agent


def client(agent: SharedAgent, identity: Identity, cluster: str = "digits") -> AgentClient:
    """A coordinator with that key, which calls its cluster so; each has an id of its own."""
    return AgentClient(
        agent.where, cluster=f"{cluster}-{next(_ids)}", cluster_name=cluster, identity=identity, trusted=False
    )


_ids = itertools.count()


async def granted(owner: AgentClient, message: h.Grant) -> str:
    """What the agent says to it."""
    owner.send(message)
    return (await owner.receive(h.Granted, lambda answer: answer.ticket == message.ticket)).error


async def refused(one: AgentClient) -> str:
    await one.until(lambda: one.dialer.condition == "refused", "to be refused")
    return one.dialer.reason


async def stays_out(agent: SharedAgent, identity: Identity) -> None:
    """Its key is not let in, time after time."""
    async with client(agent, identity) as one:
        await one.until(lambda: one.dialer.condition == "refused", "to be refused at the door")
        assert "does not trust this machine" in one.dialer.reason
        assert "connected" not in [condition for condition, _ in one.conditions]


@pytest.mark.usefixtures("jupyter_dirs")
def test_the_head_that_was_granted_is_let_in_for_its_cluster_alone(tmp_path: Path) -> None:
    async def play() -> None:
        async with SharedAgent(tmp_path) as agent:
            await agent.pair(OWNER)
            async with client(agent, OWNER) as owner:
                await stays_out(agent, HEAD)
                assert await granted(owner, grant(time.time_ns())) == ""
                async with client(agent, HEAD) as head:
                    await head.until(lambda: head.dialer.condition == "connected", "the head to be let in")
                    await agent.told("cluster-started", "ada@desk", count=2)
                    async with client(agent, HEAD, "letters") as wrong:
                        assert (await refused(wrong)).endswith("granted as the head of cluster digits, not of letters")
                    # What it may not do with that: grant, or have another head started.
                    assert "only the owner of a cluster does" in await granted(head, grant(time.time_ns(), head=OTHER))
                    head.send(h.StartHead(ticket=1, cluster="digits"))
                    assert "a head starts no other one" in (await head.receive(h.HeadState)).error
                    withdrawn = grant(time.time_ns(), 0.0)
                    assert await granted(owner, withdrawn) == ""
                    assert "does not trust this machine" in await refused(head)
                    await agent.told("trust-removed", "the head of cluster digits is granted no more by ada@desk")
                await stays_out(agent, HEAD)
                assert f"grant {withdrawn.serial} came before it" in await granted(owner, grant(withdrawn.serial - 1))
                await stays_out(agent, HEAD)

    asyncio.run(play())


@pytest.mark.usefixtures("jupyter_dirs")
def test_a_trusted_peer_that_is_no_head_and_a_stranger_stay_out(tmp_path: Path) -> None:
    async def play() -> None:
        async with SharedAgent(tmp_path) as agent:
            await agent.pair(OWNER)
            async with client(agent, OWNER) as owner:
                assert await granted(owner, grant(time.time_ns())) == ""
                for identity in (OTHER, new_identity()):
                    await stays_out(agent, identity)
                # A stranger's session cannot be: what it would say is never read. The owner's is as before.
                assert await granted(owner, grant(time.time_ns(), head=OTHER)) == ""
                await stays_out(agent, HEAD)

    asyncio.run(play())


@pytest.mark.usefixtures("jupyter_dirs")
def test_a_grant_ends_by_itself_and_so_does_what_the_head_had_there(tmp_path: Path) -> None:
    async def play() -> None:
        async with SharedAgent(tmp_path) as agent:
            await agent.pair(OWNER)
            async with client(agent, OWNER) as owner:
                assert await granted(owner, grant(time.time_ns(), 8.0)) == ""
                async with client(agent, HEAD) as head:
                    await head.start_node("desk")
                    await agent.told("node-started", "ada@desk")
                    await agent.told("node-ended", "granted no more")
                    assert "does not trust this machine" in await refused(head)

    asyncio.run(play())


@pytest.mark.usefixtures("jupyter_dirs")
def test_the_key_of_an_owner_is_not_taken_for_a_head(tmp_path: Path) -> None:
    """Else whoever is paired could keep this machine's user, or another owner, from it."""

    async def play() -> None:
        async with SharedAgent(tmp_path) as agent:
            await agent.pair(OWNER)
            mine = load_identity(data_directory())
            await agent.pair(OTHER, agent.agent.new_code(), owner="bob@book")
            async with client(agent, OWNER) as owner:
                for key in (mine, OTHER):
                    assert "is that of an owner" in await granted(owner, grant(time.time_ns(), head=key))
            async with client(agent, mine, "letters") as user:
                announcement = announce("coordinator", mine.public_key, "letters")
                await user.until(lambda: user.dialer.condition == "connected", "this machine's user to be let in")
                withdraw(announcement)

    asyncio.run(play())


def test_a_grant_does_not_hold_again_when_its_owner_is_paired_anew(tmp_path: Path) -> None:
    trusted = {OWNER.public_key}
    store = Grants(tmp_path, trusted.__contains__)
    store.take(OWNER.public_key, grant(1))
    trusted.clear()
    assert [row.key for row in withdraw_grants(tmp_path, "ada@desk", [OWNER.public_key])] == [HEAD.public_key]
    trusted.add(OWNER.public_key)
    assert store.find(HEAD.public_key) is None


@pytest.mark.usefixtures("jupyter_dirs")
def test_a_cluster_goes_from_its_owner_to_the_head_and_back_and_to_nobody_else(tmp_path: Path) -> None:
    """Its node runs on; each of them is refused once the other one has come, whatever it says."""

    async def play() -> None:
        async with SharedAgent(tmp_path) as agent:
            await agent.pair(OWNER)
            await agent.pair(OTHER, agent.agent.new_code(), owner="eve@desk")

            def leads(identity: Identity, epoch: int, received: int = 0) -> AgentClient:
                return AgentClient(
                    agent.where, cluster="digits-1", cluster_name="digits", identity=identity, trusted=False,
                    epoch=epoch, received=received,
                )  # fmt: skip

            async with client(agent, OWNER) as window, leads(OWNER, 100) as owner:
                await owner.start_node("desk")
                async with leads(OTHER, 200) as thief:  # paired, and of another owner
                    assert "belongs to another key" in await refused(thief)
                other = new_identity()  # the head of another cluster of the owner, which knows the id of this one
                assert await granted(window, grant(time.time_ns(), head=other, cluster="letters")) == ""
                for name, words in (("letters", "belongs to another key"), ("digits", "not of digits")):
                    async with AgentClient(
                        agent.where, cluster="digits-1", cluster_name=name, identity=other, trusted=False, epoch=9000
                    ) as thief:
                        assert words in await refused(thief)
                assert await granted(window, grant(time.time_ns())) == ""
                async with leads(HEAD, 100) as twin:
                    assert "start 100 of the coordinator of digits is running" in await refused(twin)
                async with leads(HEAD, 300, owner.dialer.received) as head:
                    inventory = await head.receive(p.Inventory)
                    assert [row.node for row in inventory.nodes] == ["desk"]
                    assert "start 300 of the coordinator of digits is running" in await refused(owner)
                    async with leads(OWNER, 400, head.dialer.received) as again:
                        assert [row.node for row in (await again.receive(p.Inventory)).nodes] == ["desk"]
                        # The grant has gone with that: whatever epoch the head begins in.
                        assert "does not trust this machine" in await refused(head)
                        await stays_out(agent, HEAD)
                        async with leads(HEAD, 900) as back:
                            await back.until(lambda: back.dialer.condition == "refused", "to be refused")
                        again.send(p.StopNode(node="desk", incarnation=1, force=True))
                        assert (await again.receive(p.NodeEnded)).asked

    asyncio.run(play())
