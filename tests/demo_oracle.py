"""DeMo (arXiv 2411.19870) in numpy and nothing of ours: from gradients and the bytes on the wire to parameters."""

import numpy as np

SIDE, CHUNK = 64, 4096

_place = np.arange(SIDE)
COSINES = np.cos(np.pi * (2 * _place[None, :] + 1) * _place[:, None] / (2 * SIDE)) * np.sqrt(2 / SIDE)
COSINES[0] = np.sqrt(1 / SIDE)
WHOLE = np.rint(COSINES * 2.0**22).astype(np.int64)


def places(shapes):
    """For each element of the vector its place on the wire, and the wire's length."""
    starts = np.cumsum([0] + [int(np.prod(shape)) for shape in shapes])
    where, end = np.empty(starts[-1], np.int64), 0
    large = [int(np.prod(shape)) >= 1024 for shape in shapes]
    for shape, start, is_large in zip(shapes, starts, large, strict=False):
        count = int(np.prod(shape))
        if not is_large:
            continue
        rows, columns = (shape[0], count // shape[0]) if len(shape) > 1 else (0, 0)
        if min(rows, columns) < 16:
            where[start : start + count] = end + np.arange(count)
            end += -(-count // CHUNK) * CHUNK
            continue
        for row in range(rows):
            for column in range(columns):
                square = (row // SIDE) * -(-columns // SIDE) + column // SIDE
                inside = (row % SIDE) * SIDE + column % SIDE
                where[start + row * columns + column] = end + square * CHUNK + inside
        end += -(-rows // SIDE) * -(-columns // SIDE) * CHUNK
    for shape, start, is_large in zip(shapes, starts, large, strict=False):
        count = int(np.prod(shape))
        if not is_large:
            where[start : start + count] = end + np.arange(count)
            end += count
    return where, end


def coefficients(record, k):
    """One record as exponent and 64 x 64 whole numbers: codes, then Rice(b) coded gaps, low bits in planes first."""
    exponent = int(np.int8(record[0]))
    codes, rest = record[1 : 1 + k].view(np.int8), record[1 + k :]
    low = max((CHUNK // k).bit_length() - 2, 0)
    planes = [np.unpackbits(rest[bit * k // 8 : (bit + 1) * k // 8]).astype(int) for bit in range(low)]
    ones = np.flatnonzero(np.unpackbits(rest[low * k // 8 :]))
    table, position = np.zeros(CHUNK, np.int64), -1
    for index in range(k):
        high = ones[index] - (ones[index - 1] if index else -1) - 1
        position += 1 + (int(high) << low) + sum(int(plane[index]) << bit for bit, plane in enumerate(planes))
        table[position] = codes[index]
    return exponent, table.reshape(SIDE, SIDE)


def decoded(data, k, length):
    """The float32 values of ``length`` elements on the wire, and the coefficients sent of each chunk."""
    record = 1 + k + max((CHUNK // k).bit_length() - 2, 0) * k // 8
    record += -(-(k + ((CHUNK - k) >> max((CHUNK // k).bit_length() - 2, 0))) // 8)
    rows = np.frombuffer(data, np.uint8).reshape(-1, record)
    assert len(rows) == -(-length // CHUNK)
    values, sent = [], []
    for row in rows:
        exponent, table = coefficients(row, k)
        sums = WHOLE.T @ table @ WHOLE
        values.append((sums.astype(np.float64) * 2.0 ** (exponent - 44)).astype(np.float32).ravel())
        sent.append((2.0**exponent, table))
    return np.concatenate(values)[:length], sent


def check_largest(vector, sent):
    """What was ``sent`` are the largest coefficients of ``vector`` (on the wire), each to within half a unit of its
    chunk, or the largest unit; float32 matrix products on the way may differ in their last bits."""
    padded = np.zeros(len(sent) * CHUNK)
    padded[: vector.size] = vector
    for chunk, (unit, table) in zip(padded.reshape(-1, SIDE, SIDE), sent, strict=True):
        true = COSINES @ chunk @ COSINES.T
        slack = 1e-5 * np.abs(true).max()
        taken = table != 0
        off = np.abs(true - table * unit)[taken]
        assert (off <= 0.5 * unit + slack).all() or np.abs(table).max() == 127
        # a code of 0 is of a coefficient that was sent, too small for a unit
        assert np.abs(true)[~taken].max() <= max(np.abs(true)[taken].min() if taken.any() else 0.0, unit / 2) + slack


class Node:
    """One node's momentum."""

    def __init__(self, shapes, k=32, decay=0.999):
        self.where, self.length = places(shapes)
        self.k, self.decay = k, np.float32(decay)
        self.momentum = np.zeros(self.where.size, np.float32)

    def counted(self, gradient, data):
        """The round took ``data`` of it: returns what all decode."""
        momentum = self.momentum * self.decay + gradient
        on_wire = np.zeros(self.length, np.float32)
        on_wire[self.where] = momentum
        values, sent = decoded(data, self.k, self.length)
        check_largest(on_wire, sent)
        self.momentum = momentum - values[self.where]
        return values[self.where]


def step(theta, sent, samples, lr, sign=True, weight_decay=0.0):
    """theta <- theta - lr * (sign(Q) + weight_decay * theta), Q the mean by samples of what was ``sent``, in order."""
    mean = np.zeros_like(theta)
    for values, count in zip(sent, samples, strict=True):
        mean = mean + values * np.float32(count / sum(samples))
    direction = np.sign(mean) if sign else mean
    if weight_decay:
        direction = direction + theta * np.float32(weight_decay)
    return theta - direction * np.float32(lr)
