"""Much output: the notebook and the coordinator stay small, the middle is folded, the whole is in a readable file."""

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from notebook_cluster.agent.kernels.control_socket import HOLD_BYTES, OutputHolder
from notebook_cluster.coordinator.cells.cell_files import CellFiles, Origin
from notebook_cluster.coordinator.cells.outputs import (
    HEAD_BYTES,
    MOST_WAITING_TEXT,
    TAIL_BYTES,
    WINDOW_BYTES,
    CellOutputs,
    Flow,
)
from notebook_cluster.magics.display.slots import NodeOutput
from notebook_cluster.protocol import decode
from notebook_cluster.protocol.node import HoldOutput, InterruptCell, InterruptSeen
from notebook_cluster.protocol.views import LINES_LEFT_OUT, CellEnded, CellOutput, Output
from tests.conftest import wait_until
from tests.full_disk import small_disk
from tests.node_kernels import node_kernels
from tests.shared_notebook import SharedNotebook, shared_notebook

LINE = "{:9} " + "x" * 69 + "\n"
"""80 characters."""


def flood(lines: int) -> str:
    """Source that prints so many of LINE on a node, and a last one with its name."""
    return f"""
for i in range({lines}):
    print({LINE!r}.format(i), end='')
print('the end of', nc.node())
"""


LINES = 250_000
FLOOD = flood(LINES)
"""20 MB."""
MANY_LINES = 625_000
"""50 MB on each of two nodes."""
MORE_MEMORY = 60e6
"""Bytes by which nobody may grow who prints 50 MB, or passes on 100 MB."""


@pytest.fixture(scope="module")
def notebook() -> Iterator[SharedNotebook]:
    with shared_notebook("--local 2") as started:
        started.works("%%on_all\n1 + 1")
        yield started


def memory(notebook: SharedNotebook) -> dict[str, int]:
    """Resident bytes of who prints and who passes it on."""
    with notebook.attach() as view:
        coordinator = psutil.Process(view.connection.file.pid)
    agent = coordinator.children()[0]
    processes = {"notebook": psutil.Process(notebook.kernel.pid), "coordinator": coordinator, "agent": agent}
    for kernel in agent.children():
        if "ipykernel_launcher" in kernel.cmdline():
            processes[f"kernel {kernel.pid}"] = kernel
    return {name: process.memory_info().rss for name, process in processes.items()}


def stream(text: str, node: str = "a") -> Output:
    return Output(node=node, rank=0, kind="stream", content={"name": "stdout", "text": text})


def lines_told(text: str) -> int:
    """Lines of :func:`flood` in ``text``: those that are there, that are said to be folded, or to be left out."""
    said = re.findall(r"\.\.\. ([\d,]+) lines(?: folded|, [\d,]+ bytes)", text)
    return text.count("x" * 69) + sum(int(number.replace(",", "")) for number in said)


def text_of(outputs: list[Output]) -> str:
    return "".join(output.content["text"] for output in outputs)


def test_a_hundred_megabytes_of_two_nodes_are_folded_and_whole_in_text_files(notebook: SharedNotebook) -> None:
    before = memory(notebook)
    cell = notebook.kernel.until(notebook.start(f"%%on_all --no-replay{flood(MANY_LINES)}"), timeout=180)
    assert cell.error is None, cell.error
    grown = {name: size - before[name] for name, size in memory(notebook).items()}
    assert len(grown) == 5
    assert max(grown.values()) < MORE_MEMORY, grown
    assert len(cell.shown) < 200_000
    for node in ("local", "local-2"):
        block = next(text for text in cell.displays.values() if f"[{node} ·" in text)
        assert LINE.format(0) in block
        assert f"the end of {node}" in block
        folded = re.search(r"\n\.\.\. ([\d,]+) lines folded, all of it in (\S+) \.\.\.\n", block)
        assert folded is not None
        own = block[block.index(f"[{node} ·") :].partition(f"the end of {node}")[0]
        assert lines_told(own) == MANY_LINES
        path = Path(folded[2])
        assert path.name == f"{node}.txt"
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_size == MANY_LINES * 80 + len(f"the end of {node}\n")
        with path.open() as file:
            assert all(line == LINE.format(number) for number, line in zip(range(MANY_LINES), file, strict=False))


@pytest.mark.parametrize("separator", ["\\n", "."])
def test_one_print_of_a_hundred_megabytes_is_whole_in_the_text_file(notebook: SharedNotebook, separator: str) -> None:
    before = memory(notebook)
    size, last = 100_000_000, "the end"
    source = f"text = ('x' * 99 + '{separator}') * {size // 100}\nprint(text + '{last}')\ndel text"
    for _ in range(2):
        cell = notebook.kernel.until(notebook.start(f"%%on local --no-replay\n{source}"), timeout=180)
        assert cell.error is None, cell.error
        shown = cell.shown + "".join(cell.displays.values())
        assert "left out: the link was full" not in shown
        assert last in shown
        with notebook.attach() as view:
            path = Path(view.text_file(view.state().cell.id, "local"))
        assert path.stat().st_size == size + len(last) + 1
        with path.open("rb") as file:
            assert file.read(200) == (b"x" * 99 + (b"\n" if separator == "\\n" else b".")) * 2
            file.seek(-108, 2)
            assert file.read() == b"x" * 99 + (b"\n" if separator == "\\n" else b".") + b"the end\n"
    grown = {name: size - before[name] for name, size in memory(notebook).items() if not name.startswith("kernel")}
    assert max(grown.values()) < MORE_MEMORY, grown


def test_stop_ends_a_flood(notebook: SharedNotebook) -> None:
    cell = notebook.start("%%on_all --no-replay\nprint('from', nc.node(), flush=True)\nwhile True: print('x' * 79)")
    notebook.kernel.until(cell, "lines folded")
    notebook.kernel.manager.interrupt_kernel()
    notebook.kernel.until(cell)
    assert cell.error is not None
    assert cell.error.name == "KeyboardInterrupt"
    assert "from local-2" in cell.shown
    assert "[all 2 nodes]\nOut: 5" in notebook.works("%%on_all\n5")


def test_a_view_that_does_not_read_gets_the_end_and_a_word_about_the_middle(notebook: SharedNotebook) -> None:
    with notebook.attach() as view:
        stream_ = view.execute(FLOOD, ("local",), replay=False)
        # Nothing is taken from the queue: the coordinator sends one window and keeps the rest short.
        wait_until(lambda: view.state().cell.status == "ok", 120, "the cell to end")
        events = []
        deadline = time.monotonic() + 30
        while not (events and isinstance(events[-1], CellEnded)) and time.monotonic() < deadline:
            event = stream_.get(1)
            events += [] if event is None else [event]
        text = "".join(text_of(event.outputs) for event in events if isinstance(event, CellOutput))
        assert len(text) < 2 * WINDOW_BYTES
        assert text.startswith(LINE.format(0))
        assert text.endswith(LINE.format(LINES - 1) + "the end of local\n")
        marker = re.search(
            r"\n\[\.\.\. [\d,]+ lines, ([\d,]+) bytes of output left out here; all of it: (\S+) \.\.\.\]\n", text
        )
        assert marker is not None
        assert Path(marker[2]).stat().st_size == LINES * 80 + len("the end of local\n")


def test_a_later_view_sees_beginning_and_end(notebook: SharedNotebook) -> None:
    with notebook.attach() as view:
        ended, _ = view.run(FLOOD, ("local-2",), replay=False)
        with notebook.attach() as late:
            outputs = []
            stream_ = late.watch(ended.cell)
            while not isinstance(event := stream_.get(20), CellEnded):
                assert event is not None
                outputs += event.outputs if isinstance(event, CellOutput) else []
    text = text_of(outputs)
    assert text.startswith(LINE.format(0))
    assert text.endswith("the end of local-2\n")
    assert "bytes of output left out here; all of it: " in text
    assert len(text) < 2_000_000


# ---- the parts


def test_what_waits_for_a_view_is_bounded_whatever_comes() -> None:
    flow = Flow(lambda node: Path(f"/files/{node}.txt"), 0)
    position = 0
    sent = []
    for number in range(20_000):
        batch = [stream(LINE.format(number) * 10, node) for node in ("a", "b")]
        position += 2 * 800
        if flow.offer(batch, position):
            sent += batch
    assert len(text_of(sent)) < WINDOW_BYTES + 10_000
    flow.taken(position)
    assert flow.ready
    rest, _ = flow.release()
    for node in ("a", "b"):
        text = text_of([output for output in rest if output.node == node])
        assert len(text) < MOST_WAITING_TEXT + 1000
        assert f"all of it: /files/{node}.txt ...]" in text
        assert text.endswith(LINE.format(19_999))
    flow.taken(position)
    assert flow.offer([stream("more")], position + 4)


def test_the_newest_of_very_many_short_outputs_is_kept(tmp_path: Path) -> None:
    flow = Flow(lambda node: Path(f"/files/{node}.txt"), 0)
    flow.offer([stream("")], WINDOW_BYTES + 1)
    outputs = CellOutputs(tmp_path / "000001.jsonl")
    for number in range(30_000):
        flow.offer([stream(LINE.format(number))], WINDOW_BYTES + 2)
        outputs.add(stream(LINE.format(number)), Origin("peer", number))
    outputs.close()
    last = "".join(LINE.format(number) for number in range(29_500, 30_000))
    assert text_of(flow.release()[0]).endswith(last)
    kept = text_of(outputs.all())
    assert kept.endswith(last)
    assert len(kept) > (HEAD_BYTES + TAIL_BYTES) * 0.9


def test_lines_that_were_left_out_for_a_slow_view_count_as_folded() -> None:
    total, taken = 12_000, 0
    flow = Flow(lambda node: Path(f"/files/{node}.txt"), 0)
    shown = NodeOutput("a", 0, "token")

    def take(outputs: list[Output]) -> None:
        for output in outputs:
            shown.write(output.content["text"], left_out=output.content.get(LINES_LEFT_OUT, 0))

    for number in range(total):
        batch = [stream(LINE.format(number))]
        position = number if number < 2000 else 2 * WINDOW_BYTES + number  # from then on the view is far behind
        if flow.offer(batch, position):
            take(batch)
            taken += 1
        elif number == 9000:
            take(flow.release()[0])
    take(flow.release()[0])
    assert taken < total
    text = shown.text(24 * 1024)
    assert " lines folded ...\n" in text
    assert lines_told(text) == total
    # Where the line that says so is seen, it tells of them itself.
    assert lines_told(shown.text(10_000_000)) == total


def test_a_word_about_more_than_was_sent_does_not_open_the_window() -> None:
    flow = Flow(lambda node: Path("/"), 0)
    assert flow.offer([stream("x")], WINDOW_BYTES + 1)
    flow.taken(-5)
    assert not flow.offer([stream("y")], WINDOW_BYTES + 2)
    flow.taken(1 << 60)
    assert flow.ready
    assert text_of(flow.release()[0]) == "y"


def test_files_of_a_cell_are_read_again_without_what_a_crash_cut_off(tmp_path: Path) -> None:
    files = CellFiles(tmp_path / "000001.jsonl")
    error = Output(node="a", rank=0, kind="error", content={"ename": "E", "evalue": "v", "traceback": ["one", "two"]})
    long = "grün\n" * 100
    outputs = [stream("short\n"), stream("b says\n", "b"), stream(long), error, stream("end\n")]
    for number, output in enumerate(outputs):
        files.add(output, Origin("peer", number))
    files.close()
    assert (tmp_path / "000001" / "a.txt").read_text() == f"short\n{long}one\ntwo\nend\n"
    assert not (tmp_path / "000001" / "b.txt").exists()
    with (tmp_path / "000001.jsonl").open("ab") as index, (tmp_path / "000001" / "a.txt").open("ab") as text:
        index.write(b'{"output":{"node')
        text.write(b"twice")
    files = CellFiles(tmp_path / "000001.jsonl")
    assert [line.output for line in files.load()] == outputs
    files.add(stream("more\n"), Origin("peer", 5))
    files.close()
    lines = list(files.read())
    assert [line.output for line in lines] == [*outputs, stream("more\n")]
    assert [line.sequence for line in lines] == [0, 1, 2, 3, 4, 5]
    assert (tmp_path / "000001" / "a.txt").read_text() == f"short\n{long}one\ntwo\nend\nmore\n"


def test_a_disk_that_takes_nothing_is_said_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "000001").write_text("a file where the folder should be")
    files = CellFiles(tmp_path / "000001.jsonl")
    files.add(stream("lost\n" * 1000), Origin("peer", 1))
    assert files.trouble
    files.add(stream("also lost\n"), Origin("peer", 2))
    files.close()


def test_what_a_full_disk_does_not_take_is_written_when_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        files = CellFiles(disk.folder / "000001.jsonl")
        outputs = [stream(f"{number} {'x' * 3000}\n") for number in range(40)]
        for number, output in enumerate(outputs):
            if number == 10:
                disk.fill()
            if number == 30:
                assert files.trouble
                disk.make_room()
            files.add(output, Origin("peer", number))
        assert not files.trouble
        files.close()
        lines = list(CellFiles(files.index).load())
        assert [line.output for line in lines] == outputs
        assert [line.sequence for line in lines] == list(range(40))
        assert files.text_path("a").read_text() == "".join(output.content["text"] for output in outputs)
        disk.fill()
        for _ in range(1500):
            files.add(outputs[0], Origin("peer", 40))
        disk.make_room()
        files.write()
        assert files.trouble, "not all of it was kept, so it says so for good"
        assert [line.output for line in CellFiles(files.index).load()][:40] == outputs


# ---- a link that is behind


class SlowLink:
    """A session as the holder sees it, and the socket to the nodes."""

    def __init__(self) -> None:
        self.all_told = asyncio.Event()
        self.waiting_bytes = 0
        self.condition = "connected"
        self.told: list[tuple[str, bool]] = []

    def send(self, node: str, incarnation: int, body: bytes) -> None:
        self.told.append((node, decode(body, HoldOutput).hold))
        if len(self.told) == 4:
            self.all_told.set()


@pytest.mark.parametrize("relief", ["acknowledged", "lost"])
def test_nodes_are_held_while_the_link_is_behind_and_go_on_when_it_is_free_or_gone(relief: str) -> None:
    async def scenario() -> list[tuple[str, bool]]:
        link = SlowLink()
        holder = OutputHolder(link, link)  # type: ignore[arg-type]
        holder.printed("desk", 1)
        assert link.told == []
        link.waiting_bytes = HOLD_BYTES + 1
        for node in ("desk", "desk", "mini"):
            holder.printed(node, 1)
        assert link.told == [("desk", True), ("mini", True)]
        if relief == "acknowledged":
            link.waiting_bytes = 0
        else:
            link.condition = "lost"
        await asyncio.wait_for(link.all_told.wait(), 10)
        return link.told[2:]

    assert sorted(asyncio.run(scenario())) == [("desk", False), ("mini", False)]


def test_a_held_node_waits_in_print_until_it_may_go_on_and_obeys_stop() -> None:
    with node_kernels("mini") as kernels:
        mini = kernels.nodes["mini"]
        before, after = kernels.directory / "before", kernels.directory / "after"
        source = (
            f"import pathlib\npathlib.Path({str(before)!r}).touch()\n"
            f"print('printed')\npathlib.Path({str(after)!r}).touch()"
        )
        kernels.tell("mini", HoldOutput(hold=True))
        kernels.tell("mini", InterruptCell(cell=99))  # its answer says that the hold has arrived
        wait_until(lambda: mini.said(InterruptSeen), 60, "an answer")
        request = mini.start(source, kernels.metadata())
        wait_until(before.exists, 60, "the cell to begin")
        kernels.tell("mini", InterruptCell(cell=kernels.cells))
        reply = mini.finish(request)
        assert reply["ename"] == "KeyboardInterrupt"
        assert not after.exists()
        before.unlink()
        request = mini.start(source, kernels.metadata())
        wait_until(before.exists, 60, "the cell to begin")
        kernels.tell("mini", HoldOutput(hold=False))
        assert mini.finish(request)["text"] == "printed\n"
        assert after.exists()
