"""``%%on`` by amounts of memory."""

import msgspec
import pytest

from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.parsing import resolve
from notebook_cluster.protocol.state import NodeView

GB = 10**9


def row(name, rank, device, kind, total):
    return NodeView(
        name=name, rank=rank, peer=name, device=device, device_name=device, incarnation=1, condition="ok",
        memory_kind=kind, memory_total=int(total),
    )  # fmt: skip


NODES = [
    row("rig", 0, "cuda:0", "VRAM", 24 * GB),
    row("old", 1, "cuda:0", "VRAM", 7.9 * GB),
    row("mac", 2, "mps", "unified", 16 * GB),
    row("box", 3, "cpu", "RAM", 64 * GB),
]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["vram>=8GB"], ["rig", "old", "mac"]),
        (["vram>=16gb"], ["rig", "mac"]),
        (["vram<10GB"], ["old"]),
        (["ram>=32GiB"], ["box"]),
        (["vram>=8GB,!mac"], ["rig", "old"]),
        (["!vram<10GB"], ["rig", "mac", "box"]),
        (["vram>20000MB", "cpu"], ["rig", "box"]),
    ],
)
def test_amounts_of_memory_choose_nodes(words, names):
    assert resolve(words, NODES) == names


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("vram>=80GB", ["no node has vram>=80GB", "rig 24.0 GB", "mac 16.0 GB"]),
        ("vram>=8", ["'vram>=8' is not an amount", "vram>=8GB"]),
        ("vram=8GB", ["not an amount of memory"]),
    ],
)
def test_an_amount_that_fits_nothing_says_what_there_is(word, parts):
    with pytest.raises(UsageError) as caught:
        resolve([word], NODES)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_node_whose_work_a_round_refused_runs_cells_all_the_same():
    refused = msgspec.structs.replace(NODES[1], condition="refused", reason="the work of 'old' holds NaN")
    nodes = [NODES[0], refused]
    assert resolve(["old"], nodes) == ["old"]
    assert resolve(["cuda"], nodes) == ["rig", "old"]
