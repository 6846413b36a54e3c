"""Codecs in torch: the bytes of the host.

The code is the same for every torch device, so where there is no GPU the processor stands for it.
"""

import numpy as np
import pytest
import torch

from notebook_cluster.codecs import NotFiniteError, Vector, WireFormat, encode_tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CODECS = ["int8", "int4", "fp16", "topk", "topk-256", "randomk", "randomk-40", "sparse"]
SIZES = [
    (1, 0),
    (63, 0),
    (256, 0),
    (257, 0),
    (511, 3),
    (4096, 0),
    (4097, 0),
    (4096 + 70, 5),
    (3 * 4096 + 255, 1),
    (0, 7),
]


def check_like_the_host(wire: WireFormat, values: Vector) -> None:
    """The same bytes, and the same is left."""
    expected = bytes(wire.encode(values))
    work = torch.from_numpy(values.copy()).to(DEVICE)
    assert bytes(encode_tensor(wire, work)) == expected
    np.testing.assert_array_equal(work.cpu().numpy(), values - wire.decode(expected))


def values_of(size: int, kind: str, seed: int = 0) -> Vector:
    random = np.random.default_rng(seed)
    values = random.standard_normal(size).astype(np.float32)
    match kind:
        case "tiny":
            values *= np.float32(1e-38)
        case "huge":
            values *= np.float32(1e37)
        case "wild":
            values *= (10.0 ** random.uniform(-44, 37, size)).astype(np.float32)
        case "few":
            values[random.random(size) < 0.5] = 0
        case "halves":
            # magnitudes that lie between two codes, and the largest that sets the scale
            values = (random.permutation(size) % 509).astype(np.float32) / np.float32(2)
            values += np.arange(size, dtype=np.float32) * np.float32(1e-4)
    return values


@pytest.mark.parametrize("kind", ["noise", "tiny", "huge", "wild", "few", "halves"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("parameters", "buffers"), SIZES)
def test_the_bytes_and_what_is_left_are_those_of_the_host(codec: str, parameters: int, buffers: int, kind: str) -> None:
    check_like_the_host(WireFormat(codec, parameters, buffers), values_of(parameters + buffers, kind))


@pytest.mark.parametrize("codec", ["topk", "sparse"])
def test_of_equal_magnitudes_the_first_are_kept(codec: str) -> None:
    values = np.where(np.arange(4 * 4096) % 3, np.float32(1), np.float32(-1)).astype(np.float32)
    values[:4096] = 0
    values[4096:8192:60] = 3  # more than are kept
    values[8192:12288:100] = 3  # fewer
    check_like_the_host(WireFormat(codec, 4 * 4096), values)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 4095, 4096 + 300, -1])
@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_finite_is_found(codec: str, place: int, bad: float) -> None:
    values = values_of(4096 + 301 + 2, "noise")
    values[place] = bad
    with pytest.raises(NotFiniteError):
        encode_tensor(WireFormat(codec, 4096 + 301, 2), torch.from_numpy(values).to(DEVICE))
