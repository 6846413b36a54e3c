"""What was on the wire as numbers, their mean, and the outer step: written from the description of the formats, in
plain numpy, and sharing no code with the package that it checks.
"""

from typing import Any

import numpy as np
import xxhash

Numbers = Any
"""A flat float32 array."""

INT8_BLOCK = 256
CHUNK, KEPT, LOW_BITS = 4096, 64, 5
"""Of SparseLoCo's form: elements of a chunk, how many of them are sent, bits of a gap that are written as they are."""
SPARSE_RECORD = 84
"""Bytes for each chunk: two levels, 64 signs, 64 choices of a level, 5 planes of 64 bits, 190 bits of unary code."""
BETA = np.float32(0.8)
"""How much of its error feedback SparseLoCo sends again."""


def decoded(codec: str, data: bytes, count: int) -> Numbers:
    """The ``count`` numbers that ``data`` stands for; ValueError: it has another number of bytes."""
    if codec == "float32":
        values = np.frombuffer(data, "<f4")
    elif codec == "int8":
        values = _int8(data, count)
    else:
        values = _sparse(data, count)
    if values.size != count:
        raise ValueError(f"{len(data)} bytes of {codec} are {values.size} numbers, not {count}")
    return values


def _int8(data: bytes, count: int) -> Numbers:
    """Records of a float32 scale and a signed byte for each number."""
    pieces, position = [], 0
    for start in range(0, count, INT8_BLOCK):
        length = min(INT8_BLOCK, count - start)
        (scale,) = np.frombuffer(data[position : position + 4], "<f4")
        codes = np.frombuffer(data[position + 4 : position + 4 + length], np.int8)
        pieces.append(codes.astype(np.float32) * scale)
        position += 4 + length
    if position != len(data):
        raise ValueError(f"{len(data)} bytes of int8 for {count} numbers")
    return np.concatenate(pieces)


def encoded_int8(values: Numbers) -> bytes:
    """The mean that the owner of a slice sends: the largest magnitude of each 256 numbers becomes 127."""
    data = b""
    for start in range(0, values.size, INT8_BLOCK):
        block = values[start : start + INT8_BLOCK]
        largest = np.abs(block).max()
        scale = np.float32(largest / np.float32(127))
        if scale < np.float32(2.0**-126):
            data += np.zeros(1, "<f4").tobytes() + bytes(block.size)
            continue
        codes = np.rint(block * np.float32(np.float32(127) / largest)).astype(np.int8)
        data += np.array([scale], "<f4").tobytes() + codes.tobytes()
    return data


def _sparse(data: bytes, count: int) -> Numbers:
    values = np.zeros(count, np.float32)
    if len(data) != SPARSE_RECORD * -(-count // CHUNK):
        raise ValueError(f"{len(data)} bytes of sparse for {count} numbers")
    for number, start in enumerate(range(0, count, CHUNK)):
        places, kept = _chunk(data[number * SPARSE_RECORD : (number + 1) * SPARSE_RECORD])
        values[[start + place for place in places]] = kept
    return values


def _chunk(record: bytes) -> tuple[list[int], Numbers]:
    """(places, values) of one chunk."""
    levels = (np.frombuffer(record[:4], "<u2").astype(np.uint32) << 16).view(np.float32)
    bits = [int(bit) for byte in record[4:] for bit in f"{byte:08b}"]
    signs, upper = bits[:KEPT], bits[KEPT : 2 * KEPT]
    planes = bits[2 * KEPT : (2 + LOW_BITS) * KEPT]
    unary = iter(bits[(2 + LOW_BITS) * KEPT :])
    places, place = [], -1
    for index in range(KEPT):
        high = 0
        while next(unary) == 0:
            high += 1
        low = sum(planes[bit * KEPT + index] << bit for bit in range(LOW_BITS))
        place += 1 + (high << LOW_BITS) + low
        places.append(place)
    values = [levels[above] * (-1 if sign else 1) for sign, above in zip(signs, upper, strict=True)]
    return places, np.array(values, np.float32)


def mean(codec: str, contributions: list[bytes], weights: list[Any], count: int) -> tuple[Numbers, bytes]:
    """The mean of contributions in rank order, one product and one addition at a time, and the bytes that the owner of
    the slice sends: the mean encoded, or (sparse) all weights and all contributions."""
    if codec == "sparse":
        return _mean_of_senders(contributions, weights, count)
    total = None
    for data, weight in zip(contributions, weights, strict=True):
        product = decoded(codec, data, count) * np.float32(weight)
        total = product if total is None else total + product
    sent = encoded_int8(total) if codec == "int8" else np.ascontiguousarray(total, "<f4").tobytes()
    return decoded(codec, sent, count), sent


def _mean_of_senders(contributions: list[bytes], weights: list[Any], count: int) -> tuple[Numbers, bytes]:
    """Each number over those who sent it."""
    sums, shares = np.zeros(count, np.float32), np.zeros(count, np.float32)
    for data, weight in zip(contributions, weights, strict=True):
        values = decoded("sparse", data, count)
        sums += values * np.float32(weight)
        shares += np.where(values != 0, np.float32(weight), np.float32(0))
    sent = np.array(weights, "<f4").tobytes() + b"".join(contributions)
    return sums / np.where(shares == 0, np.float32(1), shares), sent


def mean_of_sent(codec: str, sent: bytes, senders: int, count: int) -> Numbers:
    """The mean from what an owner has sent."""
    if codec != "sparse":
        return decoded(codec, sent, count)
    weights, size = list(np.frombuffer(sent[: 4 * senders], "<f4")), (len(sent) - 4 * senders) // senders
    pieces = [sent[4 * senders + size * index :][:size] for index in range(senders)]
    return _mean_of_senders(pieces, weights, count)[0]


def first_momentum(codec: str, theta: Numbers) -> Numbers:
    """What a job begins with beside ``theta``: SparseLoCo keeps none."""
    return theta[:0] if codec == "sparse" else np.zeros_like(theta)


def outer_step(
    codec: str, theta: Numbers, momentum: Numbers, towards: Numbers, members: int
) -> tuple[Numbers, Numbers]:
    """DiLoCo's Nesterov step (arXiv 2311.08105) with the rates that the documentation says, or SparseLoCo's plain one;
    (theta, momentum)."""
    rate, decay = outer_rates(codec, members)
    if not decay:
        return theta - rate * towards, momentum
    momentum = decay * momentum + towards
    return theta - rate * (towards + decay * momentum), momentum


def outer_rates(codec: str, members: int) -> tuple[Any, Any]:
    """(learning rate, momentum)."""
    if codec == "sparse":
        return np.float32(1), np.float32(0)
    return np.float32(0.4 if members == 1 else 0.6), np.float32(0.9)


def fits(codec: str, data: bytes, work: Numbers) -> bool:
    """``data`` is ``work``, as the codec says it: the same bits, or (sparse) its largest elements, each as one of two
    levels, the nearer one."""
    if codec == "float32":
        return data == np.ascontiguousarray(work, "<f4").tobytes()
    if codec == "int8":
        return data == encoded_int8(work)
    return all(_chunk_fits(data, work, number) for number in range(-(-work.size // CHUNK)))


def _chunk_fits(data: bytes, work: Numbers, number: int) -> bool:
    places, values = _chunk(data[number * SPARSE_RECORD : (number + 1) * SPARSE_RECORD])
    chunk = work[number * CHUNK : (number + 1) * CHUNK]
    left = np.ones(chunk.size, bool)
    left[places] = False
    kept, levels = chunk[places], np.unique(np.abs(values))
    if not (np.abs(chunk[left]) <= np.abs(kept).min()).all() or not (np.sign(values) == np.sign(kept)).all():
        return False
    # levels are rounded to eight bits, and what lies in the middle may go either way
    distance = np.abs(np.abs(kept) - np.abs(values))
    nearest = np.abs(np.abs(kept)[:, None] - levels[None, :]).min(axis=1)
    return bool((distance <= nearest + 0.02 * levels.max()).all())


def digest(theta: Numbers, momentum: Numbers) -> str:
    """What nodes and journal compare."""
    both = [xxhash.xxh3_128_digest(numbers.astype("<f4").tobytes()) for numbers in (theta, momentum)]
    return hash_bytes(b"".join(both))


def hash_bytes(data: bytes) -> str:
    """Of the mean of a slice, as it was sent."""
    return str(xxhash.xxh3_128_hexdigest(data))
