"""One connection of a view: whatever an answer is, or whoever waits for it no longer, the next question is answered."""

import asyncio
import itertools
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notebook_cluster.client import AsyncCluster, Cluster, ClusterError
from notebook_cluster.journal.events import PeerAdded
from notebook_cluster.protocol.state import ClusterView
from notebook_cluster.protocol.views import Closing, Execute, GetSeries, GetState
from tests.cluster import is_running, kill, read_events, stop_all, stopped
from tests.conftest import wait_until

pytestmark = pytest.mark.usefixtures("work")


@pytest.fixture
def cluster(work: None) -> Iterator[Cluster]:
    running = Cluster.start("test", local=0)
    journal = Path(running.connection.file.run_log)
    added = wait_until(
        lambda: [event for event in read_events(journal) if isinstance(event, PeerAdded)], 60, "its agent"
    )
    yield running
    running.close()
    if is_running(running.connection.file.pid):
        stop_all()  # over another connection: that of the test may be broken
    else:
        os.kill(added[0].pid or 0, signal.SIGTERM)  # it waits for its coordinator until its lease ends


def answers(cluster: Cluster) -> bool:
    view = cluster.connection.request(GetState(), ClusterView).result(30)
    return bool(view.name == "test")


def test_a_question_that_somebody_stopped_waiting_for_costs_no_other(cluster: Cluster) -> None:
    async def give_up() -> None:
        for ask in (AsyncCluster(cluster).series, AsyncCluster(cluster).state):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask(), 0.05)

    with stopped(cluster.connection.file.pid):
        asyncio.run(give_up())
    assert answers(cluster)
    assert cluster.connection.closed is None


def test_a_cell_that_nobody_waits_for_any_more_is_watched_by_nobody(cluster: Cluster) -> None:
    with stopped(cluster.connection.file.pid):
        refused = cluster.connection.request(Execute(source="1"), int)
        asked = cluster.connection.request(
            Execute(source="1", watch=True), int, queue_for_cell=queue.SimpleQueue[Any]()
        )
        assert refused.cancel()
        assert asked.cancel()
    assert answers(cluster)
    assert cluster.connection._cells == {}


def test_an_answer_of_another_kind_is_an_error_of_this_question_alone(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match=r"cluster 'test' answered GetState with what this version cannot read"):
        cluster.connection.request(GetState(), int).result(30)
    assert answers(cluster)


def test_all_who_wait_hear_of_the_end_although_one_has_given_up(cluster: Cluster) -> None:
    with stopped(cluster.connection.file.pid):
        asked = [cluster.connection.request(GetSeries()) for _ in range(3)]
        assert asked[0].cancel()
        kill(cluster.connection.file.pid)
    for future in asked[1:]:
        with pytest.raises(ClusterError, match=r"the coordinator of cluster 'test' is gone"):
            future.result(30)
    assert asked[0].cancelled()


def test_every_watched_cell_hears_of_the_end_while_others_begin_to_be_watched(cluster: Cluster) -> None:
    watched: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(20_000)]
    for number, events in enumerate(watched):
        cluster.connection.watch_queue(number, events)
    told: list[Any] = []
    cluster.subscribe(told.append)
    over = threading.Event()

    def watch_more() -> None:
        for number in itertools.count(len(watched)):
            if over.is_set():
                return
            cluster.connection.watch_queue(number, queue.SimpleQueue())

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    busy = threading.Thread(target=watch_more)
    busy.start()
    try:
        kill(cluster.connection.file.pid)
        wait_until(lambda: cluster.connection._loop.ended, 60, "the connection to end")
    finally:
        over.set()
        busy.join()
        sys.setswitchinterval(usual)
    assert all(events.get(timeout=30) is None for events in watched)
    assert isinstance(told[-1], Closing)
