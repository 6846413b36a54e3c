"""What the replay of earlier cells leaves out, who is told, and how it is taken back."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from notebook_cluster.client import Cluster, ClusterError
from notebook_cluster.protocol.state import NodeView, PeerView
from notebook_cluster.protocol.views import CellChanged
from tests.cluster import Watcher, kernel_pid, kill, node, run, running_cluster
from tests.conftest import Agents, wait_until
from tests.ports import free_port

MINI = f"mini-{os.getpid()}"
"""Others on this network may share a machine called mini as well."""

HOLD = "import os, time\nwhile os.path.exists({file!r}): time.sleep(0.01)\n"


def held(file: Path) -> str:
    """A cell that lasts as long as ``file`` is there, and leaves ``setup``."""
    return HOLD.format(file=str(file)) + "setup = 7"


@contextmanager
def restarting(cluster: Cluster, name: str) -> Iterator[list[str]]:
    """A restart of ``name`` beside the block; the list has its error afterwards, or nothing."""
    errors: list[str] = []

    def restart() -> None:
        try:
            cluster.restart(name)
        except ClusterError as error:
            errors.append(str(error))

    thread = threading.Thread(target=restart)
    thread.start()
    try:
        yield errors
    finally:
        thread.join(60)
        assert not thread.is_alive()


def row(cluster: Cluster, name: str) -> NodeView:
    return node(cluster.state(), name)


def peer(cluster: Cluster) -> PeerView:
    return next(peer for peer in cluster.state().peers if peer.name == MINI)


def replays(cluster: Cluster, name: str) -> bool:
    return row(cluster, name).condition == "replaying"


def test_who_watches_a_cell_sees_that_a_node_that_has_replayed_runs_it(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    with running_cluster(local=1) as cluster:
        run(cluster, "before = 1")
        stream = cluster.execute(held(hold))
        assert cluster.add("local", 1) == ["local-2"]
        seen: list[str | None] = []

        def runs() -> bool:
            event = stream.get(0.02)
            if isinstance(event, CellChanged) and seen[-1:] != [event.nodes.get("local-2")]:
                seen.append(event.nodes.get("local-2"))
            return seen[-1:] == ["running"]

        wait_until(runs, 60, lambda: f"local-2 runs; it was {seen}")
        hold.unlink()
        Watcher(stream).wait_end()


def test_an_agent_that_dies_during_a_replay_leaves_no_cell_out(agents: Agents, work: Path) -> None:
    hold = work / "hold"
    port = ("--port", str(free_port(1)))  # where it is dialled again
    agents(MINI, options=port)
    with running_cluster(local=1, peers=[MINI]) as cluster:
        run(cluster, held(hold))
        hold.touch()
        with restarting(cluster, MINI) as errors:
            wait_until(lambda: replays(cluster, MINI), 60, "the replay to begin")
            agents.end(MINI, signal.SIGKILL)
            agents(MINI, options=port)
            wait_until(lambda: row(cluster, MINI).condition == "dead", 60, lambda: f"the end of {row(cluster, MINI)}")
        hold.unlink()
        assert "leaves that cell out" not in errors[0]
        wait_until(lambda: row(cluster, MINI).condition == "dead", 60, "mini to be known again")
        cluster.restart(MINI)
        assert run(cluster, "print(setup)") == {"local": "7\n", MINI: "7\n"}
        assert row(cluster, MINI).left_out == ""


def test_a_stop_of_sharing_during_a_replay_leaves_no_cell_out(agents: Agents, work: Path) -> None:
    hold = work / "hold"
    port = ("--port", str(free_port(1)))
    agents(MINI, options=port)
    with running_cluster(local=1, peers=[MINI]) as cluster:
        run(cluster, held(hold))
        hold.touch()
        with restarting(cluster, MINI) as errors:
            wait_until(lambda: replays(cluster, MINI), 60, "the replay to begin")
            agents.end(MINI)
            wait_until(lambda: row(cluster, MINI).condition == "dead", 60, "mini to be gone")
        hold.unlink()
        assert "leaves that cell out" not in errors[0]
        wait_until(lambda: peer(cluster).condition != "connected", 60, "its connection to be gone")
        agents(MINI, options=port)
        wait_until(lambda: peer(cluster).condition == "connected", 30, lambda: f"mini to be back: {peer(cluster)}")
        cluster.restart(MINI)
        assert run(cluster, "print(setup)")[MINI] == "7\n"


def test_a_cell_that_ended_a_kernel_is_left_out_and_said_until_it_is_taken_back(work: Path) -> None:
    with running_cluster(local=2) as cluster:
        run(cluster, "import os\nif os.path.exists('deadly') and rank == 1: os._exit(3)\nsetup = 7")
        (work / "deadly").touch()
        with pytest.raises(ClusterError, match="while it replayed cell 1: %cluster restart local-2 leaves that cell"):
            cluster.restart("local-2")
        cluster.restart("local-2")
        lacks = "without cell 1, whose replay ended its kernel: %cluster restart local-2 --all-cells runs it again"
        assert row(cluster, "local-2").left_out == lacks
        assert row(cluster, "local").left_out == ""
        # In the next cell once, and in the error of each that fails there.
        stream = cluster.execute("print(setup)", replay=False)
        watcher = Watcher(stream)
        ended = watcher.wait_end()
        assert f"local-2 runs {lacks}" in watcher.notes
        assert (ended.results["local-2"].error_name, ended.results["local-2"].reason) == (
            "NameError", f"local-2 runs {lacks}",
        )  # fmt: skip
        assert ended.results["local"].reason == ""
        again = Watcher(cluster.execute("1", replay=False))
        again.wait_end()
        assert again.notes == []
        (work / "deadly").unlink()
        cluster.restart("local-2", all_cells=True)
        assert row(cluster, "local-2").left_out == ""
        assert run(cluster, "print(setup)") == {"local": "7\n", "local-2": "7\n"}


def test_what_is_left_out_is_known_to_a_restarted_coordinator(work: Path) -> None:
    cluster = Cluster.start("test", local=2)
    run(cluster, "import os\nif os.path.exists('deadly') and rank == 1: os._exit(3)\nsetup = 7")
    (work / "deadly").touch()
    with pytest.raises(ClusterError, match="leaves that cell out"):
        cluster.restart("local-2")
    cluster.restart("local-2")
    kill(cluster.connection.file.pid)
    wait_until(lambda: cluster.connection.closed, 60, "the view to notice")
    cluster.close()
    with running_cluster(local=2) as revived:
        wait_until(lambda: row(revived, "local-2").condition == "ok", 60, "local-2 to be back")
        assert "without cell 1" in row(revived, "local-2").left_out
        revived.restart("local-2")
        assert "without cell 1" in row(revived, "local-2").left_out


def test_a_replay_is_shown_with_its_place_and_time_and_a_skipped_cell_is_said(work: Path) -> None:
    hold = work / "hold"
    with running_cluster(local=2) as cluster:
        run(cluster, "first = 1")
        run(cluster, "seen = 1", replay=False)
        run(cluster, held(hold))
        run(cluster, "third = 3")
        assert cluster_error(cluster, "local-2") == "node 'local-2' replays no cell now: nothing to skip"
        hold.touch()
        with restarting(cluster, "local-2") as errors:
            wait_until(lambda: row(cluster, "local-2").replaying, 60, "the replay to be shown")
            wait_until(lambda: row(cluster, "local-2").replaying.startswith("replaying cell 2 of 3, "), 60, "cell 2")
            assert row(cluster, "local-2").condition == "replaying"
            assert cluster.skip("local-2") == 3
            # A second click, which comes late, skips no other cell.
            assert cluster.skip("local-2") == 3
        hold.unlink()
        assert errors == []
        assert row(cluster, "local-2").left_out == (
            "without cell 3, which was skipped: %cluster restart local-2 --all-cells runs it again"
        )
        assert run(cluster, "print(first, third, 'setup' in globals())")["local-2"] == "1 3 False\n"
        cluster.restart("local-2")
        assert "without cell 3" in row(cluster, "local-2").left_out
        cluster.restart("local-2", all_cells=True)
        assert run(cluster, "print(first, third, setup)")["local-2"] == "1 3 7\n"


def test_a_skip_lets_the_node_join_the_running_cell(work: Path) -> None:
    hold, go = work / "hold", work / "go"
    with running_cluster(local=2) as cluster:
        run(cluster, held(hold))
        pid = kernel_pid(cluster, "local-2")
        watcher = Watcher(
            cluster.execute(
                "import os, time\nprint('on', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)"
            )
        )
        watcher.wait_for("on", "local-2")
        hold.touch()
        kill(pid)
        wait_until(lambda: row(cluster, "local-2").condition == "dead", 60, "its end")
        with restarting(cluster, "local-2"):
            wait_until(lambda: row(cluster, "local-2").replaying, 60, "the replay")
            cluster.skip("local-2")
        wait_until(lambda: watcher.text("local-2").count("on") == 2, 60, "local-2 to join the cell")
        go.touch()
        assert watcher.wait_end().status == "ok"


def test_a_cell_that_does_not_stop_is_left_out_by_the_next_restart(work: Path) -> None:
    source = (
        "import os, time\nwhile True:\n    try:\n        while os.path.exists('hold'):\n"
        "            open('begun', 'w').close()\n            time.sleep(0.01)\n        break\n"
        "    except KeyboardInterrupt: pass\nsetup = 7"
    )
    with running_cluster(local=2) as cluster:
        run(cluster, source)
        (work / "hold").touch()
        with restarting(cluster, "local-2") as errors:
            wait_until((work / "begun").exists, 60, "the replay")
            assert cluster_error(cluster, "local-2") == (
                "cell 1 does not stop on 'local-2': %cluster restart local-2 starts it anew without that cell"
            )
            cluster.restart("local-2")
            assert "without cell 1, which was skipped" in row(cluster, "local-2").left_out
        assert len(errors) == 1


def test_a_skipped_cell_that_ends_all_the_same_is_not_left_out(work: Path) -> None:
    source = (
        "import os, time\ntry:\n    while os.path.exists('hold'):\n        open('begun', 'w').close()\n"
        "        time.sleep(0.01)\nexcept KeyboardInterrupt: pass\nsetup = 7"
    )
    with running_cluster(local=2) as cluster:
        run(cluster, source)
        (work / "hold").touch()
        with restarting(cluster, "local-2"):
            wait_until((work / "begun").exists, 60, "the replay")
            cluster.skip("local-2")
        assert row(cluster, "local-2").left_out == ""
        assert run(cluster, "print(setup)")["local-2"] == "7\n"


def test_a_stop_during_a_replay_is_said_and_the_next_restart_runs_the_cell_again(work: Path) -> None:
    hold = work / "hold"
    with running_cluster(local=2) as cluster:
        run(cluster, held(hold))
        watcher = Watcher(
            cluster.execute("import time\nprint('on', flush=True)\nwhile rank == 0: time.sleep(0.01)", replay=False)
        )
        watcher.wait_for("on", "local")
        hold.touch()
        with restarting(cluster, "local-2"):
            wait_until(lambda: row(cluster, "local-2").replaying, 60, "the replay")
            cluster.interrupt()
        watcher.wait_end()
        hold.unlink()
        assert row(cluster, "local-2").left_out == (
            "without cell 1, which Stop interrupted: %cluster restart local-2 runs it again"
        )
        cluster.restart("local-2")
        assert row(cluster, "local-2").left_out == ""
        assert run(cluster, "print(setup)")["local-2"] == "7\n"


def test_a_node_whose_peer_was_away_during_its_replay_is_started_anew(agents: Agents, work: Path) -> None:
    hold = work / "hold"
    agents(MINI)
    with running_cluster(local=1, peers=[MINI]) as cluster:
        run(cluster, held(hold))
        run(cluster, "second = 2")
        hold.touch()
        with restarting(cluster, MINI):
            wait_until(lambda: replays(cluster, MINI), 60, "the replay to begin")
            agent = psutil.Process(agents.pid(MINI))
            agent.suspend()
            wait_until(lambda: row(cluster, MINI).condition == "lost", 60, "mini to be lost")
            agent.resume()
            hold.unlink()
            wait_until(lambda: row(cluster, MINI).condition == "ok", 60, "mini to be back")
        assert run(cluster, "print(setup, second)")[MINI] == "7 2\n"


def cluster_error(cluster: Cluster, name: str) -> str:
    with pytest.raises(ClusterError) as caught:
        cluster.skip(name)
    return str(caught.value)
