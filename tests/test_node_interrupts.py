"""SIGINT at a known line of the kernel around a cell: the request is answered, the code runs whole or not at all."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.node_kernels import NodeKernel, NodeKernels, node_kernels

STRIKE = """
import os, signal
kernel, ran = get_ipython().kernel, False
def strike(owner, name):
    original, this_cell = getattr(owner, name), kernel.get_parent()["header"]["msg_id"]
    def call(*args, **kwargs):
        if kernel.get_parent()["header"]["msg_id"] == this_cell:
            return original(*args, **kwargs)
        setattr(owner, name, original)
        os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **kwargs)
    setattr(owner, name, call)
"""


@pytest.fixture(scope="module")
def kernels() -> Iterator[NodeKernels]:
    with node_kernels("mini") as kernels:
        yield kernels


@pytest.fixture(params=["of the cluster", "of another client"])
def metadata(request: pytest.FixtureRequest, kernels: NodeKernels) -> dict[str, Any] | None:
    return kernels.metadata() if request.param == "of the cluster" else None


def _interrupted_at(node: NodeKernel, place: str, code: str, metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Run ``code``; SIGINT comes when the kernel calls ``place`` for it."""
    owner, _, name = place.rpartition(".")
    assert node.run(f"{STRIKE}strike({owner}, {name!r})")["status"] == "ok"
    return node.run(code, metadata)


@pytest.mark.parametrize(
    "place",
    ["kernel._publish_execute_input", "get_ipython().transform_cell", "get_ipython().transform_ast"],
)
def test_before_the_code_it_ends_the_cell(kernels: NodeKernels, place: str, metadata: dict[str, Any] | None) -> None:
    mini = kernels.nodes["mini"]
    reply = _interrupted_at(mini, place, "ran = True", metadata)
    told = reply["evalue"] if metadata is not None else reply["ename"]
    assert told == ("interrupted before the cell began" if metadata is not None else "KeyboardInterrupt")
    assert mini.run("print(ran)", kernels.metadata())["text"] == "False\n"


def test_before_code_that_awaits_it_ends_the_first_wait(kernels: NodeKernels) -> None:
    mini = kernels.nodes["mini"]
    code = "import asyncio\nran = True\nawait asyncio.sleep(600)"
    reply = _interrupted_at(mini, "kernel._publish_execute_input", code, None)
    assert reply["ename"] == "CancelledError"
    assert mini.run("print(ran)", kernels.metadata())["text"] == "True\n"


def test_behind_the_code_the_cell_is_answered(kernels: NodeKernels, metadata: dict[str, Any] | None) -> None:
    mini = kernels.nodes["mini"]
    reply = _interrupted_at(mini, "get_ipython().payload_manager.read_payload", "ran = True", metadata)
    assert (reply["status"], reply["ename"], reply["traceback"]) == ("error", "KeyboardInterrupt", [])
    assert mini.run("print(ran)", kernels.metadata())["text"] == "True\n"


def test_behind_the_reply_of_ipython_it_does_nothing(kernels: NodeKernels, metadata: dict[str, Any] | None) -> None:
    mini = kernels.nodes["mini"]
    assert _interrupted_at(mini, "kernel.finish_metadata", "ran = True", metadata)["status"] == "ok"
    assert mini.run("print(ran)", kernels.metadata())["text"] == "True\n"


@pytest.mark.parametrize("place", ["kernel.post_handler_hook", "kernel.should_handle"])
def test_between_cells_it_does_nothing_to_the_next(
    kernels: NodeKernels, place: str, metadata: dict[str, Any] | None
) -> None:
    mini = kernels.nodes["mini"]
    first = _interrupted_at(mini, place, "ran = True", metadata)
    assert first["status"] == ("ok" if place == "kernel.post_handler_hook" else "error")
    assert mini.run("print('next')", kernels.metadata())["text"] == "next\n"


def test_it_reaches_the_code_again_after_all_this(kernels: NodeKernels, metadata: dict[str, Any] | None) -> None:
    reply = kernels.nodes["mini"].run("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('no')", metadata)
    assert (reply["ename"], reply["text"]) == ("KeyboardInterrupt", "")
