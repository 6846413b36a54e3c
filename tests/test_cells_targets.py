"""Which nodes ``%%on TARGETS`` means, and what Tab offers there."""

from collections.abc import Iterator

import pytest

from notebook_cluster.magics.completion import complete
from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.parsing import choose_canary, memory_words, resolve
from notebook_cluster.protocol.state import NodeView
from tests.notebook_kernel import NotebookKernel
from tests.shared_notebook import error_of, lesson

GB = 10**9


def row(name: str, rank: int | None, device: str, kind: str, total: float, **changes: str) -> NodeView:
    return NodeView(
        name=name, rank=rank, peer=name, device=device, device_name=device, incarnation=1, memory_kind=kind,
        memory_total=int(total), **{"condition": "ok", **changes},
    )  # fmt: skip


NODES = [
    row("rig", 0, "cuda:0", "VRAM", 24 * GB),
    row("old", 1, "cuda:0", "VRAM", 7.9 * GB),
    row("mac", 2, "mps", "unified", 16 * GB),
    row("box", 3, "cpu", "RAM", 64 * GB),
    row("gone", None, "cpu", "RAM", 64 * GB, condition="dead", reason="killed by SIGKILL"),
]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("0,2", "rig mac"),
        ("1-3", "old mac box"),
        ("mac rig", "rig mac"),
        ("cuda", "rig old"),
        ("mps,cpu", "mac box"),
        ("cuda,!0", "old"),
        ("!gone", "rig old mac box"),
        ("all,!1-2", "rig box"),
        ("vram>=8GB,!mps", "rig old"),
    ],
)
def test_targets_in_rank_order(words: str, names: str) -> None:
    assert resolve(words.split(), NODES) == names.split()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("rigg", "no node is called 'rigg' (did you mean 'rig'?): there are 0 rig, 1 old, 2 mac, 3 box, gone"),
        ("7", "no node has rank 7: there are 0 rig, 1 old, 2 mac, 3 box"),
        ("3-1", "ranks '3-1' run backwards: write 1-3"),
        ("rocm", "no node has the device 'rocm': there are rig cuda:0, old cuda:0, mac mps, box cpu"),
        ("rig,!rig", "no node is left for 'rig,!rig': there are 0 rig, 1 old, 2 mac, 3 box, gone"),
        ("gone", "node 'gone' is dead (killed by SIGKILL): %cluster restart gone"),
        ("vram>=8", "'vram>=8' is not an amount of memory: write vram>=8GB or ram<16GB, with GB, GiB, MB or MiB"),
        ("cud", "no node is called 'cud' (did you mean 'cuda'?): there are 0 rig, 1 old, 2 mac, 3 box, gone"),
    ],
)
def test_unknown_targets_name_the_known_ones(words: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve([words], NODES)
    assert str(caught.value) == told


def test_the_canary_is_the_lowest_rank_among_the_targets_or_the_one_that_is_named() -> None:
    assert choose_canary("", [], NODES) == "rig"
    assert choose_canary("", ["box", "mac"], NODES) == "mac"
    assert choose_canary("3", [], NODES) == "box"
    with pytest.raises(UsageError, match="--canary rig: rig is not among the nodes that run the cell: mac, box"):
        choose_canary("rig", ["box", "mac"], NODES)
    with pytest.raises(UsageError, match="--canary gone"):
        choose_canary("gone", [], NODES)


def names(kind: str) -> list[str]:
    if kind == "RANK":
        return [str(node.rank) for node in NODES if node.rank is not None]
    return memory_words(NODES) if kind == "MEMORY" else [node.name for node in NODES]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("%%on r", ["rig", "rocm", "ram>="]),
        ("%%on vram>=", ["vram>=8GB", "vram>=16GB", "vram>=24GB"]),
        ("%%on rig,ram>=6", ["ram>=65GB"]),
        ("%%on 1-", ["1-2", "1-3"]),
        ("%%on 0,3", ["3"]),
        ("%%on !m", ["mac", "mps"]),
        ("%%on cuda --ca", ["--canary"]),
        ("%%on cuda --canary o", ["old"]),
    ],
)
def test_tab_offers_targets(text: str, found: list[str]) -> None:
    assert complete(text, names)[0] == found


@pytest.fixture(scope="module")
def notebook() -> Iterator[NotebookKernel]:
    with lesson(nodes=3) as kernel:
        yield kernel


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("0,2", "local local-3"),
        ("1-2", "local-2 local-3"),
        ("!local-2", "local local-3"),
        ("cpu,!0", "local-2 local-3"),
        ("ram>=1MB,!1", "local local-3"),
    ],
)
def test_a_cell_runs_where_it_is_sent(notebook: NotebookKernel, words: str, where: str) -> None:
    notebook.works(f"%%on {words} -o found\nnc.node()")
    assert notebook.works("' '.join(found)") == f"'{where}'"


def test_a_mistyped_target_is_one_line_in_the_notebook(notebook: NotebookKernel) -> None:
    assert error_of(notebook, "%%on locall\n1") == (
        "no node is called 'locall' (did you mean 'local'?): there are 0 local, 1 local-2, 2 local-3"
    )


def test_tab_completes_targets_in_the_kernel(notebook: NotebookKernel) -> None:
    def matches(code: str) -> list[str]:
        request = notebook.client.complete(code)
        while True:
            reply = notebook.client.get_shell_msg(timeout=60)
            if reply["parent_header"].get("msg_id") == request:
                return list(reply["content"]["matches"])

    assert matches("%%on local-") == ["local-2", "local-3"]
    assert matches("%%on 0-") == ["0-1", "0-2"]
    assert matches("%%on ram>=")[0].startswith("ram>=")
    assert matches("%cluster cells ") == ["all", "local"]
