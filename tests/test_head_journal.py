"""The copy of a run that was led from a peer, as it is brought to its owner's machine."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from notebook_cluster.journal import events as e
from notebook_cluster.journal.log import Journal
from notebook_cluster.journal.reading import has_crashed, recover
from notebook_cluster.protocol import heads as h
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.window.journal_copy import bring_files


class MadeUpHead:
    """Answers as the agent of a head does, with the files in ``folder``."""

    candidate = SimpleNamespace(name="mini")

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def ask(self, question: Any, kind: Any) -> tuple[h.HeadFile, list[bytes]]:
        asked = question(1)
        content = (self._folder / asked.name).read_bytes()
        return h.HeadFile(ticket=1, total=len(content)), [content[asked.offset : asked.offset + h.FILE_CHUNK]]


async def run_in(folder: Path, *, ended: bool) -> None:
    """A run with a node on this machine, and a word about its end or not."""
    folder.mkdir()  # noqa: ASYNC240
    journal = Journal(folder)
    events: list[Any] = [
        e.ClusterStarted(cluster="lesson", cluster_id="lesson-1", epoch=1, directory="/", time=time.time()),
        e.NodeAdded(node="local", peer="local", device="cpu"),
        *([e.Stopped(reason="stopped", time=time.time())] if ended else []),
    ]
    for event in events:
        journal.event(event, durable=True)
    assert journal.close()
    (folder / "curves.journal").write_bytes(b"curves")


def test_a_run_that_has_ended_is_brought(tmp_path: Path) -> None:
    asyncio.run(run_in(tmp_path / "there", ended=True))
    here = tmp_path / "here"
    here.mkdir()
    asyncio.run(bring_files(MadeUpHead(tmp_path / "there"), "lesson", here))  # type: ignore[arg-type]
    assert sorted(path.name for path in here.iterdir()) == ["curves.journal", "run.journal"]
    assert recover(here / "run.journal").state.cluster == "lesson"


def test_no_coordinator_here_goes_on_from_what_a_head_has_sent(tmp_path: Path) -> None:
    """Nobody but a machine that means harm says that a run is over whose journal does not: a coordinator here would
    order its nodes, on this machine too, and run its cells again."""
    asyncio.run(run_in(tmp_path / "there", ended=False))
    assert has_crashed(tmp_path / "there" / "run.journal")
    here = tmp_path / "here"
    here.mkdir()
    with pytest.raises(RequestError, match="the journal of mini does not say that its run has ended"):
        asyncio.run(bring_files(MadeUpHead(tmp_path / "there"), "lesson", here))  # type: ignore[arg-type]
    assert not list(here.iterdir())
