"""What a pseudo-gradient costs on the wire and what is lost of it: ``python -m benchmarks.codecs``.

A character transformer is trained on the standard library's sources; codecs get ``theta - theta_m`` of ``--steps``
steps. Errors are relative, ``|a - decode(encode(a))| / |a|``, beside that of the exact values of the 64 largest of 4096
for codecs that keep so many. For the times the vector is repeated up to ``--mb``, so that it does not stay in a cache;
one thread, the fastest of ``--runs``, MB of float32 per second of that thread's CPU time. One JSON line for each codec.
"""

import argparse
import json
import os
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# before numpy is loaded, which asks once
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = os.environ["VECLIB_MAXIMUM_THREADS"] = "1"

import numpy as np
import torch
from torch import nn

from notebook_cluster.codecs import CHUNKED_NAMES, CODEC_NAMES, Codec, Vector, get_codec

CONTEXT = 64
BATCH = 16
CHUNK, KEEP = 4096, 64


class Transformer(nn.Module):
    """Next byte from the bytes before."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        return self.head(self.layers(self.bytes(text) + self.places, mask=mask, is_causal=True))


def pseudo_gradient(steps: int, width: int, layers: int) -> Vector:
    """``theta - theta_m`` of the second ``steps`` steps, as the first ones are like no others."""
    torch.manual_seed(0)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    model = Transformer(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    theta = np.empty(0, np.float32)
    for step in range(2 * steps):
        if step == steps:
            theta = flat(model)
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,))
        batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).reshape(-1, 256), batch[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return theta - flat(model)


def flat(model: nn.Module) -> Vector:
    """All parameters, float32."""
    return np.concatenate([parameter.detach().numpy().ravel() for parameter in model.parameters()])


def relative_error(vector: Vector, back: Vector) -> float:
    """``|vector - back| / |vector|``."""
    return float(np.linalg.norm(vector - back) / np.linalg.norm(vector))


def ideal(vector: Vector) -> Vector:
    """The 64 largest of each 4096 as they are."""
    kept = vector.copy()
    for start in range(0, vector.size, CHUNK):
        chunk = kept[start : start + CHUNK]
        chunk[np.argsort(-np.abs(chunk), kind="stable")[KEEP:]] = 0
    return kept


def fastest(run: Callable[[], object], runs: int) -> float:
    """Seconds of the fastest of ``runs``, on this thread's own clock: it stands still while others have the core."""
    seconds = []
    for _ in range(runs):
        started = time.thread_time()
        run()
        seconds.append(time.thread_time() - started)
    return min(seconds)


def measure(codec: Codec, vector: Vector, long: Vector, runs: int) -> dict[str, object]:
    """One line: ``vector`` for size and error, ``long`` for the times."""
    back = codec.decode(codec.encode(vector), vector.size)
    data = codec.encode(long)
    result: dict[str, object] = {
        "codec": codec.name,
        "bits_per_parameter": round(8 * codec.size(vector.size) / vector.size, 4),
        "relative_error": round(relative_error(vector, back), 5),
    }
    if codec.name in ("sparse", "topk"):
        result["ideal_relative_error"] = round(relative_error(vector, ideal(vector)), 5)
    megabytes = long.nbytes / 1e6
    result["encode_mb_s"] = round(megabytes / fastest(lambda: codec.encode(long), runs))

    def decode() -> Vector:
        decoded = codec.decode(data, long.size)
        # that of float32 is a view, which takes no time whatever the size
        return decoded.copy() if codec.name == "float32" else decoded

    result["decode_mb_s"] = round(megabytes / fastest(decode, runs))
    return result | {"parameters": vector.size}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="inner steps between theta and theta_m")
    parser.add_argument("--width", type=int, default=256, help="of the transformer, a multiple of 32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mb", type=float, default=64.0, help="float32 to encode for the times")
    parser.add_argument("--runs", type=int, default=15)
    asked = parser.parse_args()
    vector = pseudo_gradient(asked.steps, asked.width, asked.layers)
    long = np.resize(vector, max(int(asked.mb * 1e6) // 4, 1))
    for name in dict.fromkeys(CODEC_NAMES + CHUNKED_NAMES):
        print(json.dumps(measure(get_codec(name), vector, long, asked.runs)), flush=True)


if __name__ == "__main__":
    main()
