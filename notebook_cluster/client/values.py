"""Values to and from nodes, for :meth:`.cluster.Cluster.push` and ``pull`` and for the magics.

A cell on the nodes lays values out or takes them (:mod:`notebook_cluster.values.transfer_store`); their bytes
travel beside it in small pieces. Small pushed values travel inside their cell instead, so that nodes that join later
get them too.
"""

import base64
import concurrent.futures
import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from notebook_cluster.client.connection import ClusterError
from notebook_cluster.client.requests import RunningCluster
from notebook_cluster.client.stream import Progress, paced, wait
from notebook_cluster.processors import free_memory
from notebook_cluster.protocol import transfers as t
from notebook_cluster.values.arrays import Buffer
from notebook_cluster.values.encoding import decode_value, encode_value
from notebook_cluster.values.transfer_store import split

MOST_REPLAYED = 512 * 1024
"""Bytes of a pushed value that is kept in the cluster's cell log, for nodes that restart or join later."""
_SHELF = '__import__("notebook_cluster.values.transfer_store", fromlist=["shelf"])'
_MOST_META = 8 * 1024 * 1024
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Pulled:
    """What one node answered for one name: ``value``, or in ``problem`` why there is none."""

    value: Any = None
    problem: str = ""
    missing: bool = False
    """There is no variable of this name."""
    near: str = ""
    """A variable there with a similar name."""


def new_ticket() -> str:
    return uuid.uuid4().hex


# ---- from nodes ------------------------------------------------------------------------------------------------------


def give_source(ticket: str, names: Sequence[str]) -> str:
    """The cell that lays out the variables ``names`` on a node."""
    return f"{_SHELF}.give({json.dumps(ticket)}, {json.dumps(list(names))})"


def read_values(
    cluster: RunningCluster, ticket: str, names: Sequence[str], nodes: Sequence[str], on_progress: Progress
) -> dict[str, dict[str, Pulled]]:
    """Name -> node -> what was laid out there under ``ticket``, which is used up.

    Raises:
        ClusterError: a node is gone, what it sent is damaged, or the values do not fit into memory here.
    """
    pairs = [(name, node) for name in names for node in nodes]
    try:
        asked = [_ask(cluster, node, ticket, name) for name, node in pairs]
        headers = {pair: wait(future) for pair, future in zip(pairs, asked, strict=True)}
        total = sum(_checked_size(node, header) for (_, node), header in headers.items())
        _check_memory(total)
        results: dict[str, dict[str, Pulled]] = {name: {} for name in names}
        done = 0
        for (name, node), header in headers.items():
            if header.missing or header.error:
                problem = _plain(header.error)
                results[name][node] = Pulled(problem=problem, missing=header.missing, near=_plain(header.near)[:80])
                continue
            data = bytearray(sum(header.sizes))
            for offset, piece in _pieces(cluster, node, ticket, name, len(data)):
                data[offset : offset + len(piece)] = piece
                done += len(piece)
                on_progress(done, total)
            results[name][node] = _decoded(name, node, header, data)
        return results
    finally:
        cluster.connection.request(t.ForgetValue(nodes=list(nodes), ticket=ticket))


def _ask(
    cluster: RunningCluster, node: str, ticket: str, name: str, offset: int = 0, size: int = 0
) -> "concurrent.futures.Future[t.ValuePart]":
    request = t.ReadValue(node=node, ticket=ticket, name=name, offset=offset, size=size)
    answer: concurrent.futures.Future[t.ValuePart] = cluster.connection.request(request, t.ValuePart)
    return answer


def _pieces(cluster: RunningCluster, node: str, ticket: str, name: str, total: int) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) in order. ClusterError when the node sends something else."""
    offsets = range(0, total, t.CHUNK_BYTES)
    requests = (_ask(cluster, node, ticket, name, offset, t.CHUNK_BYTES) for offset in offsets)
    for offset, part in zip(offsets, paced(requests), strict=True):
        if part.error or len(part.data) != min(t.CHUNK_BYTES, total - offset):
            reason = _plain(part.error) or "it sent fewer bytes than it announced"
            raise ClusterError(f"{name!r} did not arrive whole from {node}: {reason}")
        yield offset, part.data


def _checked_size(node: str, header: t.ValuePart) -> int:
    """Bytes that ``header`` announces; ClusterError when they cannot be."""
    size = sum(header.sizes)
    usable = all(part >= 0 for part in header.sizes) and len(header.meta) <= _MOST_META
    if not usable or size > t.MOST_VALUE_BYTES:
        raise ClusterError(f"{node} announces a value of {size:,} bytes: at most 1 GiB is taken")
    return size


def _check_memory(total: int) -> None:
    free = free_memory()
    if total > t.CHUNK_BYTES and total > 0.8 * free:
        raise ClusterError(
            f"the values have {total / 1e6:,.0f} MB, {free / 1e6:,.0f} MB of memory are free here: pull from fewer "
            "nodes (--from), or make them smaller there"
        )


def _decoded(name: str, node: str, header: t.ValuePart, data: bytearray) -> Pulled:
    if hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest() != header.digest:
        raise ClusterError(f"{name!r} from {node} is damaged: pull it again")
    try:
        return Pulled(value=decode_value(json.loads(header.meta), split(data, header.sizes)))
    except (ValueError, RecursionError) as error:
        return Pulled(problem=_plain(str(error)))


def _plain(text: str) -> str:
    """Text of a node for people."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:500])


# ---- to nodes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """A value that is ready to travel under a variable's name."""

    name: str
    meta: str
    buffers: list[Buffer]

    @property
    def size(self) -> int:
        return sum(map(len, self.buffers))

    @property
    def is_small(self) -> bool:
        """It travels inside its cell."""
        return self.size + len(self.meta) <= MOST_REPLAYED


def pack(name: str, value: object) -> Packed:
    """``value`` for the variable ``name``.

    Raises:
        ClusterError: it does not travel, or is too large; says what to do instead.
    """
    try:
        meta, buffers = encode_value(value)
    except (TypeError, ValueError) as error:
        raise ClusterError(f"cannot push {name!r}: {error}; or make it on the nodes, in a %%on_all cell") from None
    return Packed(name, json.dumps(meta, separators=(",", ":")), buffers)


def small_source(packed: Packed) -> str:
    """The cell with everything in it."""
    text = base64.b64encode(b"".join(packed.buffers)).decode("ascii")
    sizes = list(map(len, packed.buffers))
    return f'{packed.name} = {_SHELF}.unpack({json.dumps(packed.meta)}, {sizes}, "{text}")'


def take_source(packed: Packed, ticket: str) -> str:
    """The cell that takes what :func:`write_value` has sent."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for buffer in packed.buffers:
        digest.update(buffer)
    sizes = list(map(len, packed.buffers))
    return f'{packed.name} = {_SHELF}.take("{ticket}", {json.dumps(packed.meta)}, {sizes}, "{digest.hexdigest()}")'


def write_value(
    cluster: RunningCluster, ticket: str, packed: Packed, nodes: Sequence[str], on_progress: Progress
) -> None:
    """Send the bytes of ``packed`` to ``nodes``, where they lie until a cell takes them.

    Raises:
        ClusterError: a node does not take them; names it.
    """
    sizes: list[int] = []

    def requests() -> "Iterator[concurrent.futures.Future[Mapping[str, str]]]":
        offset = 0
        for data in _chunks(packed.buffers):
            sizes.append(len(data))
            request = t.WriteValue(nodes=list(nodes), ticket=ticket, total=packed.size, offset=offset, data=data)
            yield cluster.connection.request(request, dict[str, str])
            offset += len(data)

    done = 0
    try:
        for number, answer in enumerate(paced(requests())):
            refused = [f"{node}: {reason}" for node, reason in answer.items() if reason]
            if refused:
                more = f" (and {len(refused) - 1} more nodes)" if len(refused) > 1 else ""
                raise ClusterError(f"cannot push {packed.name!r} to {refused[0]}{more}")
            done += sizes[number]
            on_progress(done, packed.size)
    except BaseException:
        cluster.connection.request(t.ForgetValue(nodes=list(nodes), ticket=ticket))
        raise


def _chunks(buffers: Sequence[Buffer]) -> Iterator[bytes]:
    """All bytes in pieces of CHUNK_BYTES; one empty piece when there are none."""
    piece, sent = bytearray(), False
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            room = t.CHUNK_BYTES - len(piece)
            piece += view[:room]
            view = view[room:]
            if len(piece) == t.CHUNK_BYTES:
                yield bytes(piece)
                piece, sent = bytearray(), True
    if piece or not sent:
        yield bytes(piece)
