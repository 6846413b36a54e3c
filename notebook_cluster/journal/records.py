"""What the training rounds write down: one struct for each kind of decision, as a row of the journal, and back.

The leader of the rounds makes a record with every decision that a restarted coordinator has to know; from the records
of a job, oldest first, it gets the job back.

A million rounds are alike but for their numbers and hashes. So members, slices and outer settings of a seal, its
*shape*, are a row of their own that others name by its number; a SEAL or COMMIT of the same shape takes about 60 and
100 bytes. What does not fit this form is a row of JSON: nothing is ever left out.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from notebook_cluster.protocol.rounds import Commit, Member, OuterSettings, Seal, Slice
from notebook_cluster.protocol.runs import Register


class RegisterRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="register"):
    """A node has registered for the job."""

    job: str
    node: str
    incarnation: int
    register: Register


class LaterRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="later"):
    """A node has registered for a later run of the job, and waits for it."""

    job: str
    node: str
    incarnation: int
    register: Register


class BaseRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="base"):
    """The job goes on from this state, whatever was committed before."""

    job: str
    cell: int
    round: int
    state_hash: str
    attempt_floor: int
    settings: Register


class CellRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="cell"):
    """The job goes on in a new cell from the state that it has."""

    job: str
    settings: Register


class SealRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="seal"):
    """An attempt of a round was sealed."""

    job: str
    seal: Seal


class CommitRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="commit", omit_defaults=True):
    """A round was committed: with ``members`` (whether their work counts or not) and ``slices`` of its seal."""

    job: str
    commit: Commit
    members: list[Member]
    slices: list[Slice]
    slice_hashes: list[str]
    base_hash: str
    outer: OuterSettings
    bytes_sent: int
    bytes_data_parallel: int
    hash_mismatches: int
    time: float = 0.0
    """Unix time; 0: it was not noted."""
    waits: dict[str, float] = {}
    """Member -> seconds from its arrival to that of the last one."""


class VoidRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="void"):
    """The job is back at the state before ``round``."""

    job: str
    round: int
    state_hash: str
    attempt_floor: int


class StopRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="stop"):
    """The job goes on no more in this cell."""

    job: str
    cell: int
    reason: str


class EndedRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="ended"):
    """Those who took part in the run have finished it."""

    job: str


Record = (
    RegisterRecord
    | LaterRecord
    | BaseRecord
    | CellRecord
    | SealRecord
    | CommitRecord
    | VoidRecord
    | StopRecord
    | EndedRecord
)


_KINDS = ("register", "later", "base", "cell", "seal", "commit", "void", "stop", "ended")
SEAL, COMMIT = _KINDS.index("seal"), _KINDS.index("commit")
_HASH_BYTES = 16


class Shape(msgspec.Struct, frozen=True, array_like=True):
    """What the seals of many rounds have in common."""

    members: tuple[tuple[str, int, int], ...]
    """(name, incarnation, bits of the weight) in rank order."""
    slices: tuple[tuple[str, int, int], ...]
    """(owner, start, stop)."""
    outer: tuple[int, int, bool]
    fragment: int
    last: bool
    gradients: bytes


class RoundRow(NamedTuple):
    """The columns of a row of the table ``rounds`` behind its number; ``shape`` None: ``body`` is the whole record."""

    time: float
    kind: int
    job: str
    round: int
    attempt: int
    hash: bytes
    shape: int | None
    body: bytes


class _SealBody(msgspec.Struct, frozen=True, array_like=True):
    contributions: list[int]


class _CommitBody(msgspec.Struct, frozen=True, array_like=True):
    contributions: list[int]
    base_hash: bytes
    slice_hashes: list[bytes]
    bytes_sent: int
    bytes_data_parallel: int
    hash_mismatches: int
    waits: list[int]
    """Milliseconds of each member, -1 where it is not known; empty: of none."""


_encoder = msgspec.msgpack.Encoder()
_json = msgspec.json.Encoder()
_seal_decoder = msgspec.msgpack.Decoder(_SealBody)
_commit_decoder = msgspec.msgpack.Decoder(_CommitBody)
_record_decoder = msgspec.json.Decoder(Record)


def packed(text: str) -> bytes:
    """A hash in half the bytes; what is none has a mark before it, and never 16 bytes."""
    if len(text) == 2 * _HASH_BYTES:
        with contextlib.suppress(ValueError):
            data = bytes.fromhex(text)
            if data.hex() == text:
                return data
    data = text.encode()
    return (b"1" if len(data) + 1 != _HASH_BYTES else b"2 ") + data


def unpacked(value: bytes) -> str:
    """The inverse of :func:`packed`."""
    if len(value) == _HASH_BYTES:
        return value.hex()
    return value[2 if value.startswith(b"2") else 1 :].decode()


def to_row(record: Record, time: float, shape_number: Callable[[Shape], int]) -> RoundRow:
    """``record``, written at ``time``; ``shape_number`` knows or gives the number of a shape."""
    match record:
        case SealRecord():
            return _seal_row(record, time, shape_number)
        case CommitRecord():
            compact = _commit_row(record, shape_number)
            if compact is not None:
                return compact
            kind, number, attempt = COMMIT, record.commit.round, record.commit.attempt
        case _:
            kind, number, attempt = _KINDS.index(str(type(record).__struct_config__.tag)), 0, 0
    return RoundRow(time, kind, record.job, number, attempt, b"", None, _json.encode(record))


def from_row(row: RoundRow, shape: Callable[[int], Shape]) -> Record:
    """The record that became ``row``.

    Raises:
        ValueError: it is none.
    """
    if row.shape is None:
        return _record_decoder.decode(row.body)  # type: ignore[no-any-return]
    form = shape(row.shape)
    slices = [Slice(owner=owner, start=start, stop=stop) for owner, start, stop in form.slices]
    outer = OuterSettings(lr_bits=form.outer[0], momentum_bits=form.outer[1], nesterov=form.outer[2])
    if row.kind == SEAL:
        members = _members(form, _seal_decoder.decode(row.body).contributions)
        seal = Seal(
            job=row.job, round=row.round, attempt=row.attempt, members=members, slices=slices, outer=outer,
            base_hash=unpacked(row.hash), fragment=form.fragment, last=form.last, gradients=form.gradients,
        )  # fmt: skip
        return SealRecord(row.job, seal)
    body = _commit_decoder.decode(row.body)
    members = _members(form, body.contributions)
    commit = Commit(
        job=row.job, round=row.round, attempt=row.attempt, state_hash=unpacked(row.hash), members=_counted(form),
        fragment=form.fragment, last=form.last,
    )  # fmt: skip
    waits = {
        member.name: wait / 1000 for member, wait in zip(members, body.waits, strict=bool(body.waits)) if wait >= 0
    }
    return CommitRecord(
        row.job, commit, members, slices, [unpacked(one) for one in body.slice_hashes], unpacked(body.base_hash),
        outer, body.bytes_sent, body.bytes_data_parallel, body.hash_mismatches, row.time, waits,
    )  # fmt: skip


def _members(form: Shape, contributions: list[int]) -> list[Member]:
    return [
        Member(name=name, incarnation=incarnation, weight_bits=bits, contribution=contribution)
        for (name, incarnation, bits), contribution in zip(form.members, contributions, strict=True)
    ]


def _counted(form: Shape) -> list[str]:
    return [name for name, _, bits in form.members if bits]


def _shape(
    members: list[Member], slices: list[Slice], outer: OuterSettings, fragment: int, last: bool, gradients: bytes
) -> Shape:
    return Shape(
        tuple((member.name, member.incarnation, member.weight_bits) for member in members),
        tuple((piece.owner, piece.start, piece.stop) for piece in slices),
        (outer.lr_bits, outer.momentum_bits, outer.nesterov), fragment, last, gradients,
    )  # fmt: skip


def _seal_row(record: SealRecord, time: float, shape_number: Callable[[Shape], int]) -> RoundRow:
    seal = record.seal
    form = _shape(seal.members, seal.slices, seal.outer, seal.fragment, seal.last, seal.gradients)
    body = _encoder.encode(_SealBody([member.contribution for member in seal.members]))
    return RoundRow(time, SEAL, record.job, seal.round, seal.attempt, packed(seal.base_hash), shape_number(form), body)


def _commit_row(record: CommitRecord, shape_number: Callable[[Shape], int]) -> RoundRow | None:
    """None when the record does not follow from a shape, or was written without its time."""
    commit, members = record.commit, record.members
    form = _shape(members, record.slices, record.outer, commit.fragment, commit.last, b"")
    waits = [record.waits.get(member.name) for member in members]
    milliseconds = [-1 if wait is None else round(wait * 1000) for wait in waits]
    known = {member.name: wait / 1000 for member, wait in zip(members, milliseconds, strict=True) if wait >= 0}
    if commit.members != _counted(form) or known != record.waits or not record.time or commit.job != record.job:
        return None
    body = _CommitBody(
        [member.contribution for member in members], packed(record.base_hash), [*map(packed, record.slice_hashes)],
        record.bytes_sent, record.bytes_data_parallel, record.hash_mismatches, milliseconds if record.waits else [],
    )  # fmt: skip
    return RoundRow(
        record.time, COMMIT, record.job, commit.round, commit.attempt, packed(commit.state_hash), shape_number(form),
        _encoder.encode(body),
    )  # fmt: skip
