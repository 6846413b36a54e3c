"""A cluster whose coordinator runs on a peer, its head: used through a window as one that is led from here."""

import json
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from notebook_cluster.client import Cluster, ClusterError, start
from notebook_cluster.client.start import read_connection, read_last_run
from notebook_cluster.journal.reading import recover
from notebook_cluster.journal.store import journal_path
from notebook_cluster.protocol.views import ConnectionFile
from notebook_cluster.security import fingerprint, runtime_directory
from tests.cluster import Watcher, is_running, kernel_pid, kill, run, running_cluster, told
from tests.command import COMMAND
from tests.conftest import wait_until
from tests.full_disk import small_disk
from tests.strangers import Stranger, Strangers

pytestmark = pytest.mark.usefixtures("work")

COUNT = """
import os, time
count = 0
while not os.path.exists("{stop}"):
    count += 1
    print("count", count, flush=True)
    time.sleep(0.05)
print("done", count)
"""


def head_of(stranger: Stranger) -> Path:
    """Where its head of the cluster keeps its run."""
    (folder,) = (stranger.home / "agent" / "heads").glob("lesson-*")
    return folder


def head_pid(stranger: Stranger) -> int:
    return int(json.loads((head_of(stranger) / "connection.json").read_bytes())["pid"])


def window() -> ConnectionFile:
    file = read_connection("lesson")
    assert file is not None
    return file


def kill_window() -> None:
    kill(window().pid)


def counted(text: str) -> list[int]:
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith("count ")]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *words], capture_output=True, text=True, timeout=60, check=False)


def test_a_cluster_that_is_led_from_a_peer_runs_cells_here_and_there(strangers: Strangers) -> None:
    mini, desk = strangers("mini"), strangers("desk")
    said: list[str] = []
    with running_cluster("lesson", local=1, head=mini.name, code=mini.code, on_progress=said.append) as cluster:
        assert cluster.add(mini.name) == [mini.name]
        assert cluster.add(desk.name, code=desk.code) == [desk.name]
        assert run(cluster, "print(world_size)") == {"local": "3\n", mini.name: "3\n", desk.name: "3\n"}
        assert run(cluster, "import os; print(os.getcwd())", ("local",)) == {"local": f"{Path.cwd()}\n"}
        with Cluster.attach("lesson") as other:
            assert [node.name for node in other.state().nodes] == ["local", mini.name, desk.name]
        told(cluster, f"paired with {desk.name} of")
        cluster.push({"weights": [1, 2]}, [desk.name])
        assert cluster.pull(["weights"], [desk.name])["weights"][desk.name].value == [1, 2]
        with pytest.raises(ClusterError, match=rf"is led from {mini.name}, where machines cannot join by themselves"):
            cluster.invite()
        with pytest.raises(ClusterError, match=f"led from {mini.name} asks no engine for hosts"):
            cluster.grow("ssh:nobody.invalid")
        listed = command("trust", "list", "--data-dir", str(mini.home / "agent")).stdout
        assert f"{mini.name} (key " in listed
        assert "leads cluster lesson of" in listed
        (coordinator,) = (psutil.Process(head_pid(mini)),)
        assert f"--head={mini.name}" in coordinator.cmdline()
        # Every user of this machine can read that.
        assert not [word for word in psutil.Process(window().pid).cmdline() if mini.code in word]
    # The run is here, and nobody obeys the head any more.
    assert "stopped" in read_last_run("lesson").ended
    assert not (runtime_directory() / "clusters" / "lesson" / "head.json").exists()
    for stranger in (mini, desk):
        (grant,) = json.loads((stranger.home / "agent" / "grants.json").read_text())
        assert grant["until"] == 0


def test_what_cannot_lead_is_named_with_the_way_out(strangers: Strangers) -> None:
    mini = strangers("mini")
    for options, words in (
        ({"head": mini.name}, f"{mini.name}.*not paired with you yet"),
        ({"head": mini.name, "code": "wrong-code-77"}, "wrong"),
        ({"head": "nobody-here"}, "nobody-here"),
    ):
        with pytest.raises(ClusterError, match=words):
            Cluster.start("lesson", local=0, **options)  # type: ignore[arg-type]
        assert read_connection("lesson") is None
    with pytest.raises(ClusterError, match="no cluster 'lesson' runs"):
        Cluster.attach("lesson")
    with (
        running_cluster("lesson", local=0, head=mini.name, code=mini.code),
        pytest.raises(ClusterError, match=f"runs already, led from {mini.name}: %cluster stop lesson first"),
    ):
        Cluster.start("lesson", head="desk")
    with pytest.raises(ClusterError, match=f"no cluster 'lesson' runs on {mini.name}: ended at .*stopped"):
        Cluster.attach(f"lesson@{mini.name}")
    led_here = pytest.raises(ClusterError, match="runs already, led from this machine")
    with running_cluster("lesson", local=0), led_here:
        Cluster.start("lesson", head=mini.name)


@pytest.mark.proof
def test_a_head_that_takes_long_to_start_is_waited_for(strangers: Strangers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a start may say nothing: the window says what it waits for."""
    monkeypatch.setattr(start, "START_TIMEOUT", 7.0)
    slow = "import sys, time\nif 'notebook_cluster.coordinator' in sys.orig_argv:\n    time.sleep(8)\n"
    mini = strangers("mini", start_up=slow)
    said: list[str] = []
    with running_cluster("lesson", local=0, head=mini.name, code=mini.code, on_progress=said.append) as cluster:
        assert cluster.add(mini.name) == [mini.name]
    assert said.count(f"cluster 'lesson' is being led from {mini.name}: waiting for its coordinator there") == 1


def test_a_cell_goes_on_without_its_window_and_all_of_its_output_is_found_again(strangers: Strangers) -> None:
    mini = strangers("mini")
    with running_cluster("lesson", local=0, head=mini.name, code=mini.code) as cluster:
        cluster.add(mini.name)
        stop = Path.cwd() / "stop"
        watcher = Watcher(cluster.execute(COUNT.format(stop=stop)))
        wait_until(lambda: counted(watcher.look() or watcher.text()), what="the cell to count")
        kill_window()
        wait_until(lambda: cluster.connection.closed, what="the view to see it")
        assert "the cluster goes on there: %cluster attach lesson" in str(cluster.connection.closed)
        # Folder and all: another machine of the same user, or this one after its runtime folder was emptied.
        (runtime_directory() / "clusters" / "lesson" / "head.json").unlink()
        with pytest.raises(ClusterError, match="no cluster 'lesson' runs"):
            Cluster.attach("lesson")
        with Cluster.attach(f"lesson@{mini.name}") as again:
            watcher = Watcher(again.watch(1))
            stop.touch()
            watcher.wait_end(60)
            numbers = counted(watcher.text())
            assert numbers == list(range(1, len(numbers) + 1))
            assert f"done {numbers[-1]}" in watcher.text()
            kill_window()
        # The same from the command line, which finds the head by what the window left.
        stopped = command("stop", "lesson")
        assert stopped.returncode == 0, stopped.stderr
        wait_until(lambda: not (head_of(mini) / "connection.json").exists(), what="the end of the head")


def test_a_head_that_is_killed_goes_on_from_its_journal(strangers: Strangers) -> None:
    mini = strangers("mini")
    with running_cluster("lesson", local=1, head=mini.name, code=mini.code) as cluster:
        cluster.add(mini.name)
        run(cluster, "kept = 41")
        kernels = {name: kernel_pid(cluster, name) for name in ("local", mini.name)}
        before = head_pid(mini)
        kill(before)
        wait_until(lambda: cluster.connection.closed, what="the view to hear of it")
        assert "was started again: %cluster attach lesson" in str(cluster.connection.closed)
        with Cluster.attach("lesson") as again:
            again.wait_until(lambda state: len(state.nodes) == 2 and all(row.condition == "ok" for row in state.nodes))
            assert head_pid(mini) != before
            assert run(again, "print(kept + 1)") == {"local": "42\n", mini.name: "42\n"}
            assert {name: kernel_pid(again, name) for name in kernels} == kernels
            again.stop()


def test_a_head_comes_back_with_its_agent(strangers: Strangers) -> None:
    mini, desk = strangers("mini", "--port", "0"), strangers("desk")
    with running_cluster("lesson", local=0, head=mini.name, code=mini.code) as cluster:
        cluster.add(desk.name, code=desk.code)
        run(cluster, "kept = 41")
        kernel, before = kernel_pid(cluster, desk.name), head_pid(mini)
        said: list[str] = []
        mini.end(signal.SIGKILL)
        wait_until(lambda: not is_running(before), what="the head to end with its agent")
        mini.again()
        wait_until(lambda: cluster.connection.closed, what="the view to hear of it")

        def attached() -> Cluster | None:
            try:
                return Cluster.attach("lesson")
            except ClusterError as error:
                said.append(str(error))
                return None

        with wait_until(attached, what=lambda: f"the head to be there again: {said[-1:]} {mini.output}") as again:
            again.wait_until(lambda state: [row.condition for row in state.nodes] == ["ok"])
            assert run(again, "print(kept + 1)") == {desk.name: "42\n"}
            assert kernel_pid(again, desk.name) == kernel
            again.stop()


def test_trust_that_is_removed_ends_the_head_and_what_it_has_elsewhere(strangers: Strangers) -> None:
    mini, desk = strangers("mini"), strangers("desk")
    with running_cluster("lesson", local=0, head=mini.name, code=mini.code) as cluster:
        cluster.add(mini.name)
        cluster.add(desk.name, code=desk.code)
        kernels = [kernel_pid(cluster, name) for name in (mini.name, desk.name)]
        removed = command("trust", "remove", mini.name)
        assert removed.returncode == 0, removed.stderr
        wait_until(lambda: cluster.connection.closed, what="the view to hear of it")
        assert "its head is trusted no more" in str(cluster.connection.closed)
        wait_until(lambda: not any(map(is_running, kernels)), what="all kernels to end")


@pytest.mark.proof
def test_a_peer_that_is_asked_for_twice_at_once_has_one_link(strangers: Strangers) -> None:
    mini, desk = strangers("mini"), strangers("desk")
    paired = command("pair", desk.pairing, "--code", desk.code)
    assert paired.returncode == 0, paired.stderr

    def links() -> int:
        rows = psutil.Process(window().pid).net_connections()
        return sum(bool(row.raddr) and row.raddr.port == desk.port for row in rows)

    with running_cluster("lesson", local=0, head=mini.name, code=mini.code) as cluster:
        with ThreadPoolExecutor() as pool:
            added = [pool.submit(cluster.add, desk.name) for _ in range(2)]
        assert [one.result() for one in added] == [[desk.name]] * 2
        assert links() == 1
        assert command("trust", "remove", desk.name).returncode == 0
        wait_until(lambda: links() == 0, what="the link to end")


def test_a_grant_is_taken_back_at_the_peer(strangers: Strangers) -> None:
    mini, desk = strangers("mini"), strangers("desk")
    with running_cluster("lesson", local=0, head=mini.name, code=mini.code) as cluster:
        cluster.add(desk.name, code=desk.code)
        kernel = kernel_pid(cluster, desk.name)
        (grant,) = json.loads((desk.home / "agent" / "grants.json").read_text())
        removed = command("trust", "remove", fingerprint(grant["key"]), "--data-dir", str(desk.home / "agent"))
        assert f"the grant of {mini.name} to lead cluster lesson" in removed.stdout, removed.stderr
        wait_until(lambda: not is_running(kernel), what="the kernel to end")
        desk.said("(the head of cluster lesson is granted no more)")
        assert cluster.connection.closed is None


@pytest.mark.proof
def test_fresh_ends_what_is_led_elsewhere_and_begins_here(strangers: Strangers) -> None:
    mini = strangers("mini")
    cluster = Cluster.start("lesson", local=0, head=mini.name, code=mini.code)
    cluster.close()
    kill_window()
    again = Cluster.start("lesson", local=0)
    assert again.attached, "a start without --head goes to the cluster that runs"
    again.close()
    kill_window()
    # Another machine of the same user does not know of it.
    (runtime_directory() / "clusters" / "lesson" / "head.json").unlink()
    before = head_pid(mini)
    with running_cluster("lesson", local=0, head=mini.name, fresh=True) as anew:
        assert not anew.attached
        assert head_pid(mini) != before
        assert not is_running(before)
        anew.close()
        kill_window()
    again = Cluster.attach("lesson")
    again.close()
    kill_window()
    with running_cluster("lesson", local=1, fresh=True) as here:
        assert window().head == ""
        assert not (head_of(mini) / "connection.json").exists()
        assert run(here, "print(world_size)") == {"local": "1\n"}


def test_a_run_that_ended_while_nobody_looked_is_told_and_its_journal_brought(strangers: Strangers) -> None:
    mini = strangers("mini")
    with running_cluster("lesson", local=0, head=mini.name, code=mini.code) as cluster:
        cluster.add(mini.name)
        run(cluster, "print('seen')")
        kill_window()
        mini.end()
        mini.again()
        with pytest.raises(ClusterError, match=rf"no cluster 'lesson' runs on {mini.name}: ended at .*SIGTERM"):
            wait_until(attached, what="it to be looked for")
        last = read_last_run("lesson")
        assert "SIGTERM" in last.ended
        assert [node.name for node in last.view.nodes] == [mini.name]
        with pytest.raises(ClusterError, match="no cluster 'lesson' runs on this machine"):
            Cluster.attach("lesson")


def test_a_run_that_was_led_from_here_is_kept_beside_that_of_a_head(strangers: Strangers) -> None:
    mini = strangers("mini")
    Cluster.start("lesson", local=0, head=mini.name, code=mini.code).close()
    kill_window()
    folder = runtime_directory() / "clusters" / "lesson"
    (folder / "head.json").unlink()
    with running_cluster("lesson", local=0):
        pass
    with Cluster.attach(f"lesson@{mini.name}") as again:
        again.stop()
        again.connection.wait_closed()
    kept = {journal_path(run) for run in (folder / "runs").iterdir()}
    assert [recover(path).state.cluster for path in kept] == ["lesson"]


def attached() -> Cluster | None:
    """None while its head cannot be reached."""
    try:
        return Cluster.attach("lesson")
    except ClusterError as error:
        if "cannot be reached" in str(error) or "cannot be found" in str(error):
            return None
        raise


def test_a_head_without_torch_needs_little_memory(strangers: Strangers) -> None:
    mini = strangers("mini")
    with running_cluster("lesson", local=1, head=mini.name, code=mini.code) as cluster:
        run(cluster, "import torch; print(torch.ones(2).sum().item())")
        coordinator = psutil.Process(head_pid(mini))
        assert not [line.path for line in coordinator.memory_maps() if "torch" in line.path]
        print(f"the head takes {coordinator.memory_info().rss / 1e6:.0f} MB")


@pytest.mark.proof
def test_a_head_without_room_for_its_journal_says_so_and_leads_when_there_is_room(
    strangers: Strangers, jupyter_dirs: Path
) -> None:
    with small_disk(jupyter_dirs / "strangers" / "mini" / "agent") as disk:
        mini = strangers("mini", folder="mini")
        with running_cluster("lesson", local=0, head=mini.name, code=mini.code):
            pass
        disk.fill()
        with pytest.raises(ClusterError, match=rf"{mini.name}: .*(No space left on device|is full)"):
            Cluster.start("lesson", local=0, head=mini.name)
        assert read_connection("lesson") is None
        disk.make_room()
        with running_cluster("lesson", local=0, head=mini.name) as cluster:
            cluster.add(mini.name)
            assert run(cluster, "print(1)") == {mini.name: "1\n"}
        mini.end()
