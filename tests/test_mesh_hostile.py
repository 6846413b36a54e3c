"""What a node of the cluster that sends nonsense can do to another: make it count, and nothing else."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from notebook_cluster.collectives import CellWorld, CollectiveSettings, receiver
from notebook_cluster.node.runtime import jobs as node_jobs
from notebook_cluster.node.runtime.jobs import Jobs
from notebook_cluster.node.runtime.node_runtime import NodeRuntime
from notebook_cluster.node.runtime.world import CellInfo
from notebook_cluster.protocol import encode
from notebook_cluster.protocol.mesh import CellFrame, JobFrame, MeshHeader, ProbeFrame
from notebook_cluster.protocol.node import NodeAddress, NodeHello, NodeLog, RelayFrame, Roster
from notebook_cluster.protocol.rounds import Member, OuterSettings, Seal, Slice
from notebook_cluster.protocol.runs import Register, Registered
from notebook_cluster.rounds.member import events_effects as member_types
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.outer import float_bits, state_hash
from notebook_cluster.rounds.numerics.vectors import TensorLayout
from notebook_cluster.security import dial
from notebook_cluster.training.background.job import Job
from notebook_cluster.training.checkpointing.saving import Description
from tests.conftest import wait_until
from tests.frames_mutator import Mutator, values_of
from tests.mesh_nodes import mesh_nodes

ELEMENTS = 4096
WHOLE = Fragments("float32", ELEMENTS)


class Target:
    """A node's whole runtime in this process, in a cell and in a round with node ``desk``, whose frames are made here.

    Attributes:
        raised: what a handler of a frame raised: nothing may.
    """

    def __init__(self, folder: Path) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.agent = self._context.socket(zmq.ROUTER)
        self.agent.bind(f"ipc://{folder}/agent")
        self.runtime = NodeRuntime(
            "mini", 1, device="cpu", control=f"ipc://{folder}/agent", sockets=None, directory=folder
        )
        self.raised: list[Exception] = []
        rows = [
            NodeAddress(
                name=name, incarnation=1, rank=rank, local_rank=0, peer=name, machine="here", device="cpu",
                hosts=["127.0.0.1"], mesh_key=f"{rank}" * 40, mesh_port=9, mesh_ipc="", master_port=0,
            )
            for rank, name in enumerate(("mini", "desk"))
        ]  # fmt: skip
        self.on_loop(lambda: self.runtime._on_control(Roster(cluster="c", generation=1, nodes=rows)))
        self.runtime.begin_cell(CellInfo(cell=1, generation=1))
        theta, momentum = np.zeros(ELEMENTS, np.float32), np.zeros(ELEMENTS, np.float32)
        digest = state_hash(theta, momentum)
        self.job = Job(self.runtime, "model")
        self.runtime.attach_job("model", self.job)
        layout = TensorLayout.of([("weight", [ELEMENTS], "float32")], [])
        register = Register(
            job="model", cell=1, strategy="DiLoCo", codec="float32", schema_hash="s", schema=layout.schema,
            parameters=ELEMENTS, every="100 steps", state_hash=digest,
        )  # fmt: skip
        self.job.register(register, WHOLE, theta, momentum, Description(layout, {}))
        self.job.post_event(member_types.Boundary(bytes(ELEMENTS * 4), 1.0, 10))
        half = float_bits(0.5)
        seal = Seal(
            job="model", round=1, attempt=1, base_hash=digest, outer=OuterSettings(lr_bits=half, momentum_bits=half),
            members=[Member(name=n, incarnation=1, weight_bits=half, contribution=1) for n in ("mini", "desk")],
            slices=[
                Slice(owner="mini", start=0, stop=WHOLE.wires[0].blocks // 2),
                Slice(owner="desk", start=WHOLE.wires[0].blocks // 2, stop=WHOLE.wires[0].blocks),
            ],
        )  # fmt: skip
        for message in (Registered(job="model", round=0, state_hash=digest, source=None), seal):
            self.on_loop(lambda message=message: self.job.on_control(message))
        assert self.job._member.phase == "exchanging"
        mesh, on_frame = self.runtime._mesh, self.runtime._mesh.on_frame

        def watched(sender: str, header: MeshHeader, payload: memoryview) -> None:
            try:
                on_frame(sender, header, payload)
            except Exception as error:
                self.raised.append(error)
                raise

        mesh.on_frame = watched

    def on_loop(self, call: Callable[[], Any]) -> Any:
        return self.runtime._loop.call(call)

    def deliver(self, *frames: tuple[bytes, bytes], sender: str = "desk/1") -> None:
        """Frames as they come off the socket."""
        for header, payload in frames:
            view = memoryview(payload)
            self.on_loop(lambda header=header, view=view: self.runtime._mesh._deliver(sender, header, view, hold=False))

    def dropped(self) -> int:
        runtime = self.runtime
        return (
            runtime._mesh.dropped
            + runtime.collectives.receiver.dropped
            + runtime._jobs.dropped
            + self.job.dropped
            + self.job._member.dropped
        )

    def errors(self) -> list[str]:
        """What the runtime told its coordinator about failures in the background."""
        kinds, found = NodeHello | NodeLog, []
        while self.agent.poll(0):
            try:
                message = msgspec.msgpack.decode(self.agent.recv_multipart()[1], type=kinds)
            except msgspec.ValidationError:
                continue
            if isinstance(message, NodeLog) and message.level == "error":
                found.append(message.text)
        return found

    def check(self) -> None:
        """It lives, nothing failed, and what it holds is bounded."""
        runtime, inside = self.runtime, self.runtime.collectives.receiver
        assert self.raised == []
        assert self.errors() == []
        assert inside._early_bytes <= 64 << 20
        assert inside._message_bytes <= 8 << 30
        assert runtime._jobs._frame_bytes <= (64 << 20) + (256 << 10)
        assert len(self.job._member.held_frames) <= 4096
        assert self.job._member.round in (0, 1)

    def close(self) -> None:
        self.runtime.close()
        self._context.destroy(linger=0)


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    folder = Path(tempfile.mkdtemp(prefix="nbh-", dir="/tmp"))
    target = Target(folder)
    yield target
    target.close()
    shutil.rmtree(folder, ignore_errors=True)


GOOD_CELL = CellFrame(cell=1, generation=1, operation=1, name="all_reduce(sum)", kind="numpy", dtype="float32")
GOOD_JOB = JobFrame(job="model", incarnation=1, kind="contribution", round=1, attempt=1, slice=0, total=8192)


def nearly(good: msgspec.Struct) -> st.SearchStrategy[msgspec.Struct]:
    """``good`` with up to three fields that have any value of their type."""
    any_value = values_of(type(good))
    names = st.sets(st.sampled_from(good.__struct_fields__), min_size=1, max_size=3)
    return st.builds(
        lambda other, fields: msgspec.structs.replace(good, **{name: getattr(other, name) for name in fields}),
        any_value,
        names,
    )


HEADERS = st.one_of(
    nearly(GOOD_CELL),
    nearly(GOOD_JOB),
    *(nearly(msgspec.structs.replace(GOOD_JOB, kind=kind)) for kind in ("mean", "want", "state", "part")),
    nearly(msgspec.structs.replace(GOOD_JOB, kind="state_request")),
    values_of(CellFrame),
    values_of(JobFrame),
    values_of(ProbeFrame),
)
PAYLOADS = st.binary(max_size=300) | st.sampled_from((b"", bytes(8192), bytes(4096), bytes(1 << 20)))
FEW = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@FEW
@given(header=HEADERS, payload=PAYLOADS, relayed=st.booleans())
def test_no_header_that_can_be_read_harms_a_node(
    target: Target, header: msgspec.Struct, payload: bytes, relayed: bool
) -> None:
    data = encode(header)
    if relayed:
        message = RelayFrame(node="desk", incarnation=1, header=data, payload=payload[: 256 << 10], position=1)
        target.on_loop(lambda: target.runtime._on_control(message))
    else:
        target.deliver((data, payload))
    target.check()


def test_no_bytes_harm_a_node(target: Target) -> None:
    mutator = Mutator(7, 1 << 20)
    for _ in range(1500):
        for header in (GOOD_CELL, GOOD_JOB):
            frames = mutator.mutate([encode(header), bytes(512)])
            if len(frames) == 2 and len(frames[0]) <= 64 << 10:
                target.deliver((frames[0], frames[1]))
    target.check()


# ---- headers that lie ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"total": 1 << 60},
        {"total": -1},
        {"total": 8, "shape": [1]},
        {"total": 8, "shape": [-1, -2]},
        {"total": 8, "shape": [1 << 40] * 30},
        {"total": 8, "shape": [1 << 63, 0]},
        {"total": 8, "shape": [1] * 65},
        {"total": 8, "dtype": "object", "shape": [1]},
        {"total": 8, "dtype": "<M8[us]", "shape": [1]},
        {"total": 8, "kind": "pickle", "shape": [1]},
        {"total": 8, "name": "x" * 65, "shape": [2]},
        {"operation": -1},
        {"phase": -1},
        {"generation": 2},
        {"cell": 0},
        {"cell": -(1 << 40)},
        {"cell": 1 << 60, "dtype": "x" * 1000},
    ],
    ids=str,
)
def test_a_collective_header_that_cannot_be_right_takes_no_memory(target: Target, changes: dict[str, Any]) -> None:
    inside = target.runtime.collectives.receiver
    before, held, taken = target.dropped(), inside._early_bytes, inside._message_bytes
    target.deliver((encode(msgspec.structs.replace(GOOD_CELL, **changes)), b"12345678"))
    assert target.dropped() == before + 1
    assert (inside._early_bytes, inside._message_bytes) == (held, taken)
    target.check()


@pytest.mark.parametrize(
    "changes",
    [
        {"total": 1 << 60},
        {"total": -1},
        {"offset": -1},
        {"offset": 1 << 60},
        {"slice": -1},
        {"slice": 99},
        {"round": 0},
        {"attempt": 0},
        {"incarnation": 2},
        {"kind": "want", "name": "mean", "slice": 1 << 40},
        {"kind": "want", "name": "contribution", "offset": -1},
        {"kind": "want", "name": "nothing"},
        {"kind": "part", "total": 1 << 60},
        {"kind": "part", "total": 1 << 20, "offset": 7},
        {"round": 1 << 60, "state_hash": "x" * 1000},
        {"job": "x" * 1000},
    ],
    ids=str,
)
def test_a_round_header_that_cannot_be_right_is_dropped(target: Target, changes: dict[str, Any]) -> None:
    before = target.dropped()
    target.deliver((encode(msgspec.structs.replace(GOOD_JOB, **changes)), b"12345678"))
    assert target.dropped() == before + 1
    target.check()


def test_a_sender_of_another_incarnation_or_none_is_not_heard(target: Target) -> None:
    before = target.runtime._mesh.dropped
    for sender in ("desk/2", "stranger/1", "", "/", "desk", "desk/1/1", "\ufffd"):
        target.deliver((encode(GOOD_CELL), b""), sender=sender)
    assert target.runtime._mesh.dropped == before + 7


# ---- queues --------------------------------------------------------------------------------------------------


def test_empty_frames_of_a_later_cell_are_bounded() -> None:
    with mesh_nodes("mini", settings=CollectiveSettings(held_bytes=100_000)) as (mini,):
        inside = mini.collectives.receiver
        mini.collectives.begin_cell(CellWorld(cell=1, generation=1, nodes={"mini": 0, "desk": 1}))

        def flood() -> None:
            for operation in range(1000):
                header = msgspec.structs.replace(GOOD_CELL, cell=2, operation=operation)
                inside.on_frame("desk", header, memoryview(b""))

        mini.loop.call(flood)
        assert 0 < len(inside._early) < 100
        assert inside.dropped > 900


def test_questions_for_what_will_never_come_are_bounded() -> None:
    with mesh_nodes("mini") as (mini,):
        mini.collectives.begin_cell(CellWorld(cell=1, generation=1, nodes={"mini": 0, "desk": 1}))
        inside = mini.collectives.receiver

        def flood() -> None:
            for operation in range(1, 5001):
                header = CellFrame(cell=1, generation=1, operation=operation, name="want", kind="collective")
                inside.on_frame("desk", header, memoryview(b""))

        mini.loop.call(flood)
        assert 0 < len(inside.sent._asked) <= 1000
        assert mini.mesh.bytes_sent == 0


def test_empty_values_that_nobody_asked_for_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "_MOST_MESSAGES", 50)
    with mesh_nodes("mini") as (mini,):
        inside = mini.collectives.receiver
        mini.collectives.begin_cell(CellWorld(cell=1, generation=1, nodes={"mini": 0, "desk": 1}))

        def flood() -> None:
            for operation in range(1, 1001):
                header = CellFrame(cell=1, generation=1, operation=operation, name="barrier", kind="json")
                inside.on_frame("desk", header, memoryview(b""))

        mini.loop.call(flood)
        assert len(inside._messages) == 50
        assert inside.dropped == 950


def test_a_value_in_single_bytes_is_not_kept_to_the_end(target: Target) -> None:
    header = msgspec.structs.replace(GOOD_CELL, operation=5, dtype="uint8", shape=[10_000], total=10_000)
    before = target.dropped()
    target.deliver(*((encode(msgspec.structs.replace(header, offset=2 * n)), b"x") for n in range(100)))
    assert target.dropped() > before + 50
    target.check()


def test_frames_of_a_job_that_nobody_made_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_jobs, "_MAX_FRAME_BYTES", 100_000)
    jobs = Jobs(lambda text: None)
    for number in range(1000):
        jobs.on_mesh("desk", msgspec.structs.replace(GOOD_JOB, job=f"job-{number}"), memoryview(b""))
    assert len(jobs._frames) < 110
    assert jobs.dropped > 890


def test_chunks_of_a_round_to_come_are_bounded(target: Target) -> None:
    before = target.dropped()
    target.deliver(*((encode(msgspec.structs.replace(GOOD_JOB, attempt=2 + n)), b"") for n in range(4200)))
    assert len(target.job._member.held_frames) == 4096
    assert target.dropped() >= before + 104
    target.check()


def test_frames_on_ipc_before_the_roster_are_bounded() -> None:
    with mesh_nodes("mini") as (mini,):

        def flood() -> None:
            for _ in range(40_000):
                mini.mesh._deliver("early/1", b"", memoryview(b""), hold=True)

        mini.loop.call(flood, timeout=30)
        assert len(mini.mesh._early) < 33_000
        assert mini.mesh.dropped > 7_000


# ---- at the socket -------------------------------------------------------------------------------------------


def test_an_oversized_frame_ends_its_connection_and_the_next_one_works() -> None:
    with mesh_nodes("mini", "desk", peers=["one", "two"]) as (mini, desk):
        mini.mesh.send("desk", GOOD_JOB, b"before")
        wait_until(lambda: len(desk.frames) == 1)
        way = mini.mesh._outgoing["desk"]
        mini.loop.call(lambda: way._connection.give(b"header", bytes(3 << 20)))

        def again() -> bool:
            mini.mesh.send("desk", GOOD_JOB, b"after")
            return desk.frames[-1][2] == b"after"

        wait_until(again)
        assert b"header" not in [payload for _, _, payload in desk.frames]


def test_without_its_zap_handler_the_mesh_lets_nobody_in() -> None:
    with mesh_nodes("mini", "desk", peers=["one", "two"]) as (mini, desk):
        wait_until(lambda: mini.mesh._nodes and desk.mesh._nodes)
        desk.mesh._listening.gate.close()
        # A key of the roster, which would get in.
        client = zmq.Context()
        socket = client.socket(zmq.DEALER)
        events = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.DISCONNECTED
        monitor = socket.get_monitor_socket(events)
        try:
            socket.linger = 0
            dial(socket, mini.mesh._identity, desk.mesh.key)
            socket.connect(f"tcp://127.0.0.1:{desk.mesh.port}")
            socket.send_multipart([encode(GOOD_JOB), b"let me in"])
            assert monitor.poll(60_000)
            event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
            assert event != zmq.Event.HANDSHAKE_SUCCEEDED
            assert not monitor.poll(300) or not desk.frames
            assert desk.frames == []
        finally:
            socket.disable_monitor()
            client.destroy(linger=0)
