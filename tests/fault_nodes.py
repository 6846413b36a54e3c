"""What the nodes of a real cluster note of the rounds of a job, and the points at which one of them dies.

Imported by kernels: a cell calls :func:`watch` in each of them, and only the one that is to die is told a point.
"""

import functools
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from notebook_cluster.protocol import rounds as p
from tests.fault_points import Condition, around, die, is_message, stop_watching

BLOCK_BYTES = 1024
"""Of the float32 codec."""
CHUNK_BYTES = 16 * 1024


class Watch(msgspec.Struct):
    """What one node notes of one job, and where it is to die.

    ``point`` "": nowhere. ``folder`` is the job's own and shared by all nodes.
    """

    folder: Path
    job: str
    node: str
    incarnation: int
    run_log: Path
    point: str = ""
    number: int = 2
    """The round of the point."""
    seal: Any = None
    sent: int = 0
    """Bytes of the chunks that the point counts."""
    longest: float = 0.0
    """Seconds that a call of sync has taken at most."""

    def note(self, kind: str, payload: Any = b"", **fields: Any) -> None:
        """Append to this node's journal; survives the end of this process."""
        data = msgspec.msgpack.encode((kind, fields, bytes(payload)))
        with open(self.folder / f"{self.node}.journal", "ab", buffering=0) as file:
            file.write(struct.pack("<I", len(data)) + data)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A call that may wait for others."""
        began = time.monotonic()
        yield
        self.longest = max(self.longest, time.monotonic() - began)

    # ---- what is noted

    def boundary(self, job: Any, event: Any) -> None:
        """The encoded contribution, before anything is done with it."""
        from notebook_cluster.rounds.member.events_effects import Boundary

        if job.name == self.job and isinstance(event, Boundary):
            self.note("contribution", event.encoded, number=job.member.serial + 1, samples=event.samples)

    def sends(self, _runtime: Any, node: str, header: Any, payload: Any = b"") -> None:
        if header.job == self.job and header.kind in ("contribution", "mean"):
            self.note("sent", payload, to=node, **_place(header))

    def hears(self, job: Any, message: Any) -> None:
        if job.name == self.job:
            (self.folder / f"heard.{self.node}.{type(message).__name__}.{getattr(message, 'round', 0)}").touch()
            if isinstance(message, p.Seal):
                self.seal = message

    def gets(self, job: Any, sender: str, header: Any, _payload: Any) -> None:
        if job.name == self.job and header.round == self.number:
            _mark(self.folder, sender, self.node, header).touch()

    # ---- where it dies

    def dies(self, until: Callable[[], bool] | None = None) -> None:
        die(self.folder, until)

    def chunk(self, kind: str, share: float, node: str, header: Any, payload: Any) -> None:
        """Dies when this ``share`` of the bytes of ``kind`` has got there; 0: the first chunk."""
        if header.job != self.job or (header.kind, header.round) != (kind, self.number):
            return
        own = sum(piece.stop - piece.start for piece in self.seal.slices if piece.owner == self.node)
        foreign = sum(piece.stop - piece.start for piece in self.seal.slices) - own
        blocks = foreign if kind == "contribution" else own * (len(self.seal.members) - 1)
        self.sent += len(payload)
        if self.sent >= share * blocks * BLOCK_BYTES - (BLOCK_BYTES if share else 0):  # the last block may be shorter
            self.dies(_mark(self.folder, self.node, node, header).exists)

    def logged(self, kind: str) -> bool:
        """The coordinator has logged ``kind`` for this job and round."""
        from notebook_cluster.journal.reading import read_rounds

        records = [msgspec.to_builtins(noted.record) for noted in read_rounds(self.run_log)]
        mine = [record for record in records if (record["kind"], record["job"]) == (kind, self.job)]
        return any(record[kind]["round"] == self.number for record in mine)


def _place(header: Any) -> dict[str, Any]:
    names = ("kind", "round", "attempt", "slice", "offset", "total")
    return {"part" if name == "kind" else name: getattr(header, name) for name in names}


def _mark(folder: Path, sender: str, receiver: str, header: Any) -> Path:
    """The file that says that ``receiver`` has this chunk."""
    place = (header.kind, header.round, header.attempt, header.slice, header.offset)
    return folder / ".".join(("got", sender, receiver, *map(str, place)))


def watch(point: str = "", **about: Any) -> Watch:
    """Note what the node of this kernel does in the job that is made next, and die at ``point``."""
    from notebook_cluster.training import current_runtime
    from notebook_cluster.training.background.job import Job

    stop_watching()
    runtime = current_runtime()
    about |= {"folder": Path(about["folder"]), "run_log": Path(about["run_log"])}
    here = Watch(point=point, node=runtime.name, incarnation=runtime.incarnation, **about)
    here.folder.mkdir(exist_ok=True)
    around(Job, "apply_event", before=here.boundary)
    around(Job, "on_control", before=here.hears)
    around(Job, "on_mesh", before=here.gets)
    around(type(runtime), "send_mesh", before=here.sends)
    if point:
        node_points(here)[point]()
    return here


def smaller_chunks() -> None:
    """Several chunks for a small model, from now on in this kernel."""
    from notebook_cluster.rounds.member import machine as member
    from notebook_cluster.rounds.member.state import MemberSettings

    if not isinstance(member.new_member, functools.partial):
        settings = MemberSettings(chunk_bytes=CHUNK_BYTES)
        member.new_member = functools.partial(member.new_member, settings=settings)


def node_points(here: Watch) -> dict[str, Callable[[], None]]:
    """Name -> what makes the process of a node die there; in the order of a round."""
    from notebook_cluster.rounds.member import exchange as member_exchange
    from notebook_cluster.training import current_runtime
    from notebook_cluster.training.background.job import Job
    from notebook_cluster.training.checkpointing import saving
    from notebook_cluster.training.loop.replica import Replica

    number, runtime = here.number, type(current_runtime())

    def at(
        when: str, owner: Any, name: str, condition: Condition, until: Callable[[], bool] | None = None
    ) -> Callable[[], None]:
        def dies(*arguments: Any) -> None:
            if condition(*arguments):
                here.dies(until)

        return lambda: around(owner, name, **{when: dies})

    def message(kind: type) -> Condition:
        return lambda _owner, message: is_message(kind, here.job, number, message)

    def chunk(kind: str, share: float) -> Callable[[], None]:
        return lambda: around(
            runtime,
            "send_mesh",
            after=lambda _runtime, node, header, payload=b"": here.chunk(kind, share, node, header, payload),
        )

    def in_round(state: Any, *_more: Any) -> bool:
        return bool(state.exchange.seal.round == number)

    def due(replica: Any, _finishing: bool) -> bool:
        return bool(replica.round + 1 == number)

    def dies_before_the_manifest(step: str) -> None:
        if step == "manifest":
            here.dies()

    save = saving.save
    return {
        "work not encoded": at("before", Replica, "contribution", due),
        "work encoded": at("after", Replica, "contribution", due),
        "ARRIVED sent": at("after", runtime, "send_control", message(p.Arrived), lambda: here.logged("seal")),
        "SEAL received": at("before", Job, "on_control", message(p.Seal)),
        "first chunk sent": chunk("contribution", 0.0),
        "half of the chunks sent": chunk("contribution", 0.5),
        "all chunks sent": chunk("contribution", 1.0),
        "slice added up": at("after", member_exchange, "slice_mean", in_round),
        "first chunk of the mean sent": chunk("mean", 0.0),
        "half of the mean sent": chunk("mean", 0.5),
        "whole mean sent": chunk("mean", 1.0),
        "all means here": at("before", member_exchange, "_prepare", in_round),
        "PREPARED not sent": at("before", runtime, "send_control", message(p.Prepared)),
        "PREPARED sent": at("after", runtime, "send_control", message(p.Prepared), lambda: here.logged("commit")),
        "COMMIT received": at("before", Job, "on_control", message(p.Commit)),
        "APPLIED not sent": at("before", runtime, "send_control", message(p.Applied)),
        "applying": at("before", Replica, "_hold", lambda replica, round, *_: round == number == replica.round + 1),
        "applied": at("after", Replica, "apply", lambda _replica, commit: commit.round == number),
        "part of a checkpoint not sent": at("before", Job, "send_part", lambda job, *_: job.name == here.job),
        "checkpoint half written": lambda: around(
            saving, "save", before=lambda *arguments: save(*arguments, on_step=dies_before_the_manifest)
        ),
    }
