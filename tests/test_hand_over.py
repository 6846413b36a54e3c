"""A cluster that is handed over to a peer while it runs, and back."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from notebook_cluster.client import Cluster, ClusterError
from notebook_cluster.journal.reading import has_crashed, read_rounds
from notebook_cluster.journal.records import CommitRecord
from notebook_cluster.journal.store import journal_path
from notebook_cluster.protocol.hand_over import HandOver
from notebook_cluster.protocol.heads import MOVED_FILE
from notebook_cluster.protocol.interaction import InputRequested
from notebook_cluster.security import runtime_directory
from tests.cluster import Watcher, kill, run, running_cluster, stopped
from tests.conftest import wait_until
from tests.full_disk import small_disk
from tests.strangers import Stranger, Strangers
from tests.test_head import COUNT, counted, head_of, head_pid, window

pytestmark = pytest.mark.usefixtures("work")


def test_a_running_cell_goes_on_when_the_cluster_is_led_from_a_peer_and_again_from_here(strangers: Strangers) -> None:
    mini = strangers("mini")
    with running_cluster("lesson", local=1) as cluster:
        cluster.add(mini.name, code=mini.code)
        run(cluster, "kept = 41")
        stop = Path.cwd() / "stop"
        watcher = Watcher(cluster.execute(COUNT.format(stop=stop)))
        wait_until(lambda: len(counted(watcher.text())) > 20, what="the cell to count")
        assert cluster.hand_over(mini.name) == mini.name
        assert window().head == mini.name
        assert cluster.state().head == mini.name
        before = len(counted(watcher.text()))
        wait_until(lambda: len(counted(watcher.text())) > before + 20, what="the cell to go on")
        with pytest.raises(ClusterError, match=f"led from {mini.name} already"):
            cluster.hand_over(mini.name)
        assert cluster.hand_over("local") == ""
        assert window().head == ""
        before = len(counted(watcher.text()))
        wait_until(lambda: len(counted(watcher.text())) > before + 20, what="the cell to go on")
        stop.touch()
        watcher.wait_end(60)
        counted_whole(watcher, mini)
        state = cluster.state()
        print([(row.name, row.condition, row.reason) for row in state.nodes], [row.text for row in state.events])
        assert run(cluster, "print(kept + 1, world_size)") == {"local": "42 2\n", mini.name: "42 2\n"}
        with Cluster.attach("lesson") as other:
            assert [node.condition for node in other.state().nodes] == ["ok", "ok"]


def counted_whole(watcher: Watcher, mini: Stranger) -> None:
    """No number that COUNT prints is missing, doubled or out of order on either node."""
    for name in ("local", mini.name):
        numbers = counted(watcher.text(name))
        assert numbers == list(range(1, numbers[-1] + 1))


TRAIN = """
import hashlib, os, time
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
sync = nc.DiLoCo(model, every=5, name="moving")
stops = False
while not stops:
    with torch.no_grad():
        model.weight += 0.01 * torch.randn(16, 16)
    stops = sync.step() and nc.should_stop(os.path.exists({stop!r}))  # all after the same round
    time.sleep(0.02)
sync.finish()
print("trained", sync.round, hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()[:16])
"""


def folder() -> Path:
    return runtime_directory() / "clusters" / "lesson"


def rounds_of(cluster: Cluster) -> int:
    """Committed so far, as views are told."""
    return max((job.round for job in cluster.state().jobs), default=0)


def after(cluster: Cluster, round: int) -> bool:
    return rounds_of(cluster) > round


def test_no_round_is_lost_or_doubled_on_the_way_there_and_back(strangers: Strangers) -> None:
    mini, desk = strangers("mini"), strangers("desk")
    with running_cluster("lesson", local=1) as cluster:
        for peer in (mini, desk):
            cluster.add(peer.name, code=peer.code)
        stop = Path.cwd() / "stop"
        watcher = Watcher(cluster.execute(TRAIN.format(stop=str(stop))))
        for to in (mini.name, desk.name, "local"):  # from one peer to the next, too
            wait_until(lambda: rounds_of(cluster), what="a round")
            cluster.hand_over(to)
            wait_until(partial(after, cluster, rounds_of(cluster) + 3), what=f"rounds led from {to}")
        stop.touch()
        assert watcher.wait_end(60).status == "ok"
        ends = [line.split()[1:] for line in watcher.text().splitlines() if line.startswith("trained")]
        assert len(ends) == 3
        assert len({tuple(end) for end in ends}) == 1, ends
        commits = [
            row.record.commit for row in read_rounds(journal_path(folder())) if isinstance(row.record, CommitRecord)
        ]
        assert [commit.round for commit in commits] == list(range(1, int(ends[0][0]) + 1))
        assert [(commit.round, commit.members) for commit in commits if len(commit.members) != 3] == []
    for peer in (mini, desk):
        (grant,) = json.loads((peer.home / "agent" / "grants.json").read_text())
        assert grant["until"] == 0, f"{peer.name} is obeyed as a head by nobody"


def test_a_question_of_a_cell_waits_for_its_answer(strangers: Strangers) -> None:
    mini = strangers("mini")
    with running_cluster("lesson", local=0) as cluster:
        cluster.add(mini.name, code=mini.code)
        stream = cluster.execute("print('got', input('name? '))", stdin=True)
        question = wait_until(lambda: asked(stream), what="the question")
        assert question is not None
        cluster.hand_over(mini.name)
        cluster.hand_over("local")
        cluster.hand_over(mini.name)
        assert asked(stream) is None, "it is put once"
        moving = cluster.connection.request(HandOver(to="local"))
        wait_until(lambda: (head_of(mini) / MOVED_FILE).exists() or moving.done(), what="the head to be frozen")
        cluster.answer_input(question, "Ada")  # to whoever leads when it is heard
        moving.result(60)
        watcher = Watcher(stream)
        assert watcher.wait_end().status == "ok"
        assert "got Ada" in watcher.text()


def asked(stream: Any) -> int | None:
    """The number of a question that has come; what else has come is left out."""
    while (event := stream.get(0.1)) is not None:
        if isinstance(event, InputRequested):
            return event.id
    return None


@pytest.mark.proof
def test_a_head_that_is_killed_after_the_hand_over_goes_on_and_the_one_before_does_not(strangers: Strangers) -> None:
    mini = strangers("mini")
    with running_cluster("lesson", local=1) as cluster:
        cluster.add(mini.name, code=mini.code)
        stop = Path.cwd() / "stop"
        cluster.execute(COUNT.format(stop=stop))
        cluster.hand_over(mini.name)
        assert not has_crashed(journal_path(folder())), "nothing is begun from the journal of before"
        kill(head_pid(mini))
        wait_until(lambda: cluster.connection.closed, what="views to hear that it was started again")
        with Cluster.attach("lesson") as again:
            watcher = Watcher(again.watch(1))
            wait_until(lambda: len(counted(watcher.text(mini.name))) > 20, what="the cell to be shown")
            again.hand_over("local")
            stop.touch()
            watcher.wait_end(60)
            counted_whole(watcher, mini)
            again.stop()


DIES = """
import os, sys
if {module!r} in sys.orig_argv and not any(word.startswith("--head=") for word in sys.orig_argv):
    from notebook_cluster.window import departures, seat
    def die(*words):
        os.kill(os.getpid(), 9)
    {place} = die
"""


@pytest.mark.proof
@pytest.mark.parametrize("place", ["departures.Departures._leave", "departures.begin", "seat.settle"])
def test_a_process_that_dies_in_the_middle_leaves_a_cluster_that_goes_on(
    place: str, strangers: Strangers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the way there, when this machine still leads, and when it leads no more and the head does not yet; and on the
    way back."""
    mini = strangers("mini")
    code = DIES.format(module="notebook_cluster.coordinator", place=place)
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with running_cluster("lesson", local=1) as cluster:
        monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].partition(os.pathsep)[2])
        cluster.add(mini.name, code=mini.code)
        stop = Path.cwd() / "stop"
        cluster.execute(COUNT.format(stop=stop))
        if place == "seat.settle":
            cluster.hand_over(mini.name)
        with pytest.raises(ClusterError, match="is gone"):
            cluster.hand_over("local" if place == "seat.settle" else mini.name)
        with Cluster.attach("lesson") as again:
            assert again.state().head == (mini.name if place == "departures.begin" else "")
            watcher = Watcher(again.watch(1))
            wait_until(lambda: len(counted(watcher.text(mini.name))) > 20, what="the cell to be shown")
            stop.touch()
            watcher.wait_end(60)
            counted_whole(watcher, mini)
            again.stop()


@pytest.mark.proof
def test_where_a_disk_is_full_it_is_led_from_where_it_was(strangers: Strangers, jupyter_dirs: Path) -> None:
    """On the way there, and on the way back."""
    theirs, ours = jupyter_dirs / "strangers" / "mini" / "agent", runtime_directory() / "clusters"
    with small_disk(theirs) as their_disk, small_disk(ours) as our_disk:
        mini = strangers("mini", folder="mini")
        with running_cluster("lesson", local=1) as cluster:
            cluster.add(mini.name, code=mini.code)
            stop = Path.cwd() / "stop"
            watcher = Watcher(cluster.execute(COUNT.format(stop=stop)))
            wait_until(lambda: len(counted(watcher.text())) > 20, what="the cell to count")
            for disk, to, words in (
                (their_disk, mini.name, f"{mini.name}: no room for the cluster's journal and outputs"),
                (our_disk, mini.name, "no room for the journal and the outputs .* where it is led from"),
                (our_disk, "local", "no room for the journal and the outputs .* on the machine of its owner"),
                (their_disk, "local", "no room for the journal and the outputs .* where it is led from"),
            ):
                disk.fill()
                before, led = len(counted(watcher.text())), cluster.state().head
                wait_until(lambda count=before: len(counted(watcher.text())) > count + 20, what="the cell to go on")
                with pytest.raises(ClusterError, match=words):
                    cluster.hand_over(to)
                assert cluster.state().head == led
                disk.make_room()
                if "led from" in words:
                    assert cluster.hand_over(to) == ("" if to == "local" else to)
            stop.touch()
            watcher.wait_end(60)
            counted_whole(watcher, mini)
        mini.end()


def test_a_cluster_that_came_back_ends_when_who_led_it_answers_no_more(strangers: Strangers) -> None:
    """It was to be told that its part is over; ``stop`` gives up after 30 s."""
    mini = strangers("mini")
    with running_cluster("lesson", local=1) as cluster:
        cluster.add(mini.name, code=mini.code)
        cluster.hand_over(mini.name)
        assert cluster.hand_over("local") == ""
        with stopped(mini.process.pid):
            cluster.stop()


def test_what_cannot_be_handed_over_says_why_and_goes_on_from_where_it_was(strangers: Strangers) -> None:
    mini, desk = strangers("mini"), strangers("desk")
    with running_cluster("lesson", local=1) as cluster:
        for to, words in (
            ("local", "led from this machine already"),
            ("nobody-here", "nobody-here"),
            (mini.name, f"{mini.name}.*not paired with you yet"),
        ):
            with pytest.raises(ClusterError, match=words):
                cluster.hand_over(to)
        cluster.add(mini.name, code=mini.code)
        first = cluster.connection.request(HandOver(to=mini.name))
        with pytest.raises(ClusterError, match=f"is being handed over to {mini.name} already"):
            cluster.hand_over(desk.name, code=desk.code)
        assert first.result(60) == mini.name
        cluster.hand_over("local")
        assert run(cluster, "print(1)") == {"local": "1\n", mini.name: "1\n"}


STAND_INS = {
    "gdbus": 'exec tail -n +1 -F "$SLEEP_NOTICES/bus"',
    "systemd-inhibit": 'echo held >> "$SLEEP_NOTICES/lock"; cat; echo let go >> "$SLEEP_NOTICES/lock"',
}
"""For logind: what is appended to the file ``bus`` is heard, and who holds the machine back is noted."""


def test_a_machine_that_is_about_to_sleep_hands_its_cluster_over_first(
    strangers: Strangers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mini, bus, lock = strangers("mini"), tmp_path / "bus", tmp_path / "lock"
    bus.touch()
    for name, script in STAND_INS.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("SLEEP_NOTICES", str(tmp_path))
    with running_cluster("lesson", local=1) as cluster:
        with pytest.raises(ClusterError, match="not paired with you yet"):
            cluster.hand_over(mini.name, survive=True)
        cluster.add(mini.name, code=mini.code)
        assert cluster.hand_over(mini.name, survive=True) == ""
        stop = Path.cwd() / "stop"
        watcher = Watcher(cluster.execute(COUNT.format(stop=stop)))
        wait_until(lambda: lock.exists() and lock.read_text() == "held\n", what="the machine to be held back")
        assert cluster.state().head == ""
        append(bus, "PrepareForSleep (true,)")
        wait_until(lambda: lock.read_text() == "held\nlet go\n", what="the machine to be let go")
        assert cluster.state().head == mini.name, "it was let go when another one led"
        append(bus, "PrepareForSleep (false,)")
        wait_until(lambda: lock.read_text() == "held\nlet go\nheld\n", what="it to be held back the next time")
        cluster.hand_over("local")
        append(bus, "PrepareForSleep (true,)")
        wait_until(lambda: cluster.state().head == mini.name, what="the next hand over")
        cluster.hand_over("local")
        cluster.hand_over("local", survive=True)
        append(bus, "PrepareForSleep (true,)")
        stop.touch()
        watcher.wait_end(60)
        counted_whole(watcher, mini)
        assert cluster.state().head == ""


def test_a_machine_that_tells_nobody_before_it_sleeps_says_so(
    strangers: Strangers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mini = strangers("mini")
    monkeypatch.setenv("PATH", str(tmp_path))
    with running_cluster("lesson", local=0) as cluster:
        cluster.add(mini.name, code=mini.code)
        with pytest.raises(ClusterError, match="--survive: nothing says here that the machine is about to sleep"):
            cluster.hand_over(mini.name, survive=True)
        assert cluster.hand_over(mini.name) == mini.name


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(f"/org/freedesktop/login1: org.freedesktop.login1.Manager.{line}\n")
