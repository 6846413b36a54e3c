"""What comes over the mesh is not what was sent, or does not come: every round is the mean of what was encoded."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster import run
from tests.fault_cluster import ALL_OWN, ONE_OWNER, FaultCluster, fault_cluster
from tests.fault_reference import STALL, STEPS, Outcome, check, committed_states, counted_steps
from tests.mesh_relay import Wire, wire_to

SPOIL = """
from notebook_cluster.node.runtime.node_runtime import NodeRuntime
send = NodeRuntime.send_mesh
def spoiled(runtime, node, header, payload=b""):
    if (header.job, header.round, header.kind) == (options["job"], 2, {kind!r}) and node in {to!r}:
        payload = {payload}
    send(runtime, node, header, payload)
if nc.node() == {node!r}:
    NodeRuntime.send_mesh = spoiled
    fault_points.at_the_end(lambda: setattr(NodeRuntime, "send_mesh", send))
"""

DETOUR = """
from msgspec import structs
mesh = current_runtime()._mesh
def go(nodes):
    for outgoing in mesh._outgoing.values():
        outgoing.close()
    mesh._outgoing.clear()
    mesh._nodes = nodes
direct, ports = dict(mesh._nodes), {ports!r}
detour = {{name: structs.replace(row, mesh_ipc="", mesh_port=ports[name]) for name, row in direct.items()}}
mesh._loop.call(lambda: go(detour))
fault_points.at_the_end(lambda: mesh._loop.call(lambda: go(direct)))

sent = {{}}
def ask(what, number):
    "Stand still until the test has done that to all connections; once in a round."
    mark = watching.folder / f"{{what}}.{{number}}"
    if not mark.exists():
        mark.touch()
        while not (watching.folder / f"{{what}}.{{number}}.done").exists():
            time.sleep(0.005)

def cut_here(runtime, node, header, payload=b""):
    "Nothing gets through from the first chunk on; after the last one what was under way is lost."
    if (header.job, header.kind) == (options["job"], "contribution"):
        ask("hold", header.round)
        row = sent.setdefault((header.round, header.slice), [header.total, set()])
        row[1].add((header.offset, len(payload)))
        mine = [row for key, row in sent.items() if key[0] == header.round]
        if len(mine) == 2 and all(sum(size for _, size in chunks) >= total for total, chunks in mine):
            ask("cut", header.round)
if rank == 2:
    fault_points.around(type(current_runtime()), "send_mesh", after=cut_here)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[FaultCluster]:
    with fault_cluster() as running:
        yield running


def counted(outcome: Outcome) -> list[list[str]]:
    return [record["commit"]["members"] for record in outcome.records]


def test_garbage_instead_of_a_contribution_is_left_out_and_its_node_named(cluster: FaultCluster) -> None:
    first, second, liar = cluster.names()
    more = SPOIL.format(
        node=liar, kind="contribution", to=[first], payload="np.random.default_rng(0).bytes(len(payload))"
    )
    outcome = cluster.wrong(more, ONE_OWNER)
    assert counted(outcome)[1] == [first, second]
    committed_states(outcome)
    assert outcome.mismatches == 0
    counts = counted_steps(outcome)
    assert counts[first] == counts[second] == [1] * STEPS
    assert counts[liar] == [1, 1, 0, 0, 1, 1, 1, 1]
    assert any(repr(liar) in text and "damaged" in text for text in cluster.told())


def test_a_node_that_gets_another_mean_takes_the_state_of_the_others(cluster: FaultCluster) -> None:
    owner, *others = cluster.names()
    more = SPOIL.format(node=owner, kind="mean", to=others[1:], payload="bytes([payload[0] ^ 1]) + bytes(payload[1:])")
    outcome = cluster.wrong(more, ONE_OWNER)
    assert outcome.mismatches == 1
    assert counted_steps(outcome) == dict.fromkeys([owner, *others], [1] * STEPS)
    told = [text for text in cluster.told() if "computed another state" in text]
    assert repr(others[1]) in told[-1]
    assert f"the mean it got from {owner!r} differs" in told[-1]


def test_every_round_survives_that_all_connections_of_the_mesh_are_cut_in_it(
    cluster: FaultCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run(cluster.cluster, "print(current_runtime()._mesh.port)", replay=False)
    held: list[int] = []
    cuts: list[int] = []
    with ExitStack() as stack:
        wires: dict[str, Wire] = {name: stack.enter_context(wire_to(int(port))) for name, port in said.items()}

        def everywhere(what: str) -> None:
            for wire in wires.values():
                wire.do(what)

        def cut(folder: Path) -> None:
            for number in range(1, 4 * STEPS):
                if number not in held and (folder / f"hold.{number}").exists():
                    everywhere("hold")
                    held.append(number)
                    (folder / f"hold.{number}.done").touch()
                if number not in cuts and (folder / f"cut.{number}").exists():
                    everywhere("cut")
                    everywhere("resume")
                    cuts.append(number)
                    (folder / f"cut.{number}.done").touch()

        more = DETOUR.format(ports={name: wire.port for name, wire in wires.items()})
        outcome = cluster.wrong(more, ALL_OWN, cut)
        assert all(wire.accepted > 2 for wire in wires.values())
    assert cuts[:4] == [1, 2, 3, 4]
    check(outcome)
    with capsys.disabled():
        print(f"\n[4 rounds, all connections cut in each: {outcome.longest:.2f} s at most in one]", end=" ")


def test_the_reference_sees_a_byte_that_is_another_one_and_work_that_counts_twice(cluster: FaultCluster) -> None:
    outcome = cluster.wrong("", ONE_OWNER)
    check(outcome)
    other = copy.deepcopy(outcome)
    rows = other.journals[cluster.names()[0]].rows
    index = next(index for index, (kind, _, _) in enumerate(rows) if kind == "contribution")
    kind, fields, payload = rows[index]
    rows[index] = (kind, fields, bytes([payload[0] ^ 1]) + payload[1:])
    with pytest.raises(AssertionError):
        committed_states(other)
    twice = copy.deepcopy(outcome)
    twice.records[2]["members"] = twice.records[1]["members"]
    with pytest.raises(AssertionError, match="again"):
        committed_states(twice)
    assert max(map(max, counted_steps(twice).values())) == 2
    assert outcome.longest < STALL
