"""A real cluster of three kernels in which one process dies at a named point.

A case trains a job of its own; everything that is checked afterwards comes from the journal and from what the nodes
noted (:mod:`tests.fault_nodes`); :mod:`tests.fault_reference` does that.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from notebook_cluster.client import Cluster, ClusterError
from tests.cluster import Watcher, run, stop_all
from tests.conftest import shared_folders, wait_until
from tests.fault_points import SAVING, Order, points_of
from tests.fault_reference import EVERY, STEPS, Journal, Outcome, check
from tests.training_cells import SETUP, commits, job

ALL = os.environ.get("FAULT_POINTS") == "all"
"""Every point in every role, not only those that a test file names for the suite."""
ROOT = Path(__file__).parents[1]
ONE_OWNER, ALL_OWN = 16_000, 40_000
"""Elements of a model that one node adds up alone, and of one that is divided between all."""

SITE = """
import os, pathlib, sys
if "notebook_cluster.coordinator" in sys.orig_argv:
    from tests.fault_coordinator import watch_coordinator
    watch_coordinator(pathlib.Path(os.environ["FAULT_ORDER"]))
"""

CELL = """
watching = fault_nodes.watch(**options, **({{"point": point}} if nc.node() == victim else {{}}))
{more}
model = make_model({elements}, seed=rank)
sync = nc.DiLoCo(model, every={every}, name=options["job"])
def state():
    return state_hash(model.weight.detach().numpy(), sync._replica.momentum)
watching.note("begins", model.weight.detach().numpy(), hash=state())
for step in range({steps}):
    work(model, step)
    with watching.timed():
        done = sync.step(loss=step, samples=rank + 1)
    if done:
        watching.note("applied", round=done.round, hash=state())
    if done and done.round == 2 and saves:
        with watching.timed():
            path = sync.checkpoint(options["job"])
        watching.note("saved", path=str(path.absolute()))
with watching.timed():
    sync.finish()
watching.note("ends", round=sync.round, hash=state(), longest=watching.longest)
fault_points.stop_watching()
"""


def cases(suite: dict[str, dict[str, int]], *, saving: bool = False) -> Any:
    """Parametrise a test with ``role``, ``point`` and ``elements``: what ``suite`` says (role -> point -> elements), or
    with FAULT_POINTS=all every point of these roles, with both models, where a checkpoint is saved or is not."""
    every = {role: [point for point in points_of(role) if point.startswith(SAVING) == saving] for role in suite}
    chosen = [(role, point, size) for role, points in suite.items() for point, size in points.items()]
    if ALL:
        chosen = [(role, point, size) for role in every for size in (ONE_OWNER, ALL_OWN) for point in every[role]]
    assert all(point in every[role] for role, point, _ in chosen), chosen
    ids = [f"{role}, {point}, {'one owner' if size == ONE_OWNER else 'all own'}" for role, point, size in chosen]
    return pytest.mark.parametrize(("role", "point", "elements"), chosen, ids=ids)


class FaultCluster:
    """Three nodes that are used for many cases; whatever died is started again before the next one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.order_file = root / "order.json"
        self.cases = 0
        self.began, self.dead = 0.0, ""
        self.cluster = Cluster.start("test", local=3, directory=str(root))
        run(self.cluster, SETUP + "\nfrom tests import fault_nodes, fault_points\nfault_nodes.smaller_chunks()")

    def told(self) -> list[str]:
        """What the cluster has told people in this case, oldest first."""
        return [event.text for event in self.cluster.state().events if event.time >= self.began]

    def names(self) -> list[str]:
        """Nodes by rank, all of them alive: without a fault the first one adds up the slice of a small model. A case
        that failed leaves neither its order nor its dead coordinator to the next one."""
        try:
            self.cluster.state()
        except ClusterError:
            self.order_file.unlink(missing_ok=True)
            self.cluster.close()
            self.cluster = wait_until(self._started_again, 60, "the coordinator to start again")
        if self.dead:
            self.cluster.restart(self.dead)
            self.dead = ""
        return [row.name for row in self.cluster.state().nodes]

    def dies(self, point: str, role: str, elements: int) -> Outcome:
        """One case."""
        saves = point.startswith(SAVING)
        if role == "coordinator":
            return self.coordinator_dies(point, elements, saves)
        return self.node_dies(point, role, elements, saves)

    def node_dies(self, point: str, role: str, elements: int, saves: bool) -> Outcome:
        """One case in which the node that has this ``role`` dies."""
        names = self.names()
        victim = names[0] if role == "owner" else names[-1]
        watcher, name = self._start(point, elements, saves, victim)
        ended = watcher.wait_end(120)
        self.dead = victim
        assert "SIGKILL" in ended.results[victim].reason, (ended, watcher.text())
        assert self._killed(name) == 1, f"{victim} did not get to its point"
        survivors = [other for other in names if other != victim]
        return self._outcome(name, elements, saves, watcher, survivors, victim)

    def coordinator_dies(self, point: str, elements: int, saves: bool) -> Outcome:
        """One case in which the coordinator dies and is started again."""
        names, name = self.names(), self._job_name()
        points = [point] if "after a restart" not in point else ["COMMIT logged", point]
        self.order_file.write_bytes(msgspec.json.encode(Order(points, str(self.root / name), name)))
        watcher, _ = self._start("", elements, saves, "", name)
        for count in range(1, len(points) + 1):
            wait_until(lambda count=count: self._killed(name) >= count, 60, f"the coordinator to die at {points}")
            self.cluster.close()
            self.cluster = wait_until(self._started_again, 60, "the coordinator to start again")
        again = Watcher(self.cluster.watch(watcher.stream.cell))
        again.wait_end(120)
        return self._outcome(name, elements, saves, again, names)

    def _killed(self, name: str) -> int:
        """How many processes have got to their points and ended; all that they had sent was noted before."""
        file = self.root / name / "killed"
        pids = file.read_text().splitlines() if file.exists() else []
        ended = sum(_has_ended(int(pid)) for pid in pids)
        assert not ended or not (self.root / name / "unnoticed").exists(), "what was sent before was never received"
        return ended

    def _started_again(self) -> Cluster | None:
        """None: it was killed before anybody could attach."""
        try:
            cluster = Cluster.start("test", local=3, directory=str(self.root))
        except ClusterError:
            return None
        assert cluster.attached
        return cluster

    def wrong(self, more: str, elements: int, meanwhile: Callable[[Path], None] = lambda folder: None) -> Outcome:
        """One case in which nobody dies: every node runs ``more`` before it trains, ``meanwhile`` runs here again and
        again with the folder of the case."""
        names = self.names()
        watcher, name = self._start("", elements, False, "", more=more)

        def over() -> bool:
            meanwhile(self.root / name)
            watcher.look()
            return watcher.ended is not None

        wait_until(over, 120, lambda: f"the end of the cell; so far: {watcher.text()}")
        return self._outcome(name, elements, False, watcher, names)

    def _job_name(self) -> str:
        self.cases += 1
        return f"case-{self.cases}"

    def _start(
        self, point: str, elements: int, saves: bool, victim: str, name: str = "", more: str = ""
    ) -> tuple[Watcher, str]:
        name, self.began = name or self._job_name(), time.time()
        options = {
            "folder": str(self.root / name), "job": name, "run_log": str(self.cluster.connection.file.run_log)
        }  # fmt: skip
        settings = f"{options = }\n{point = }\n{victim = }\n{saves = }\n"
        source = settings + CELL.format(more=more, elements=elements, steps=STEPS, every=EVERY)
        return Watcher(self.cluster.execute(source, replay=False)), name

    def _outcome(
        self, name: str, elements: int, saves: bool, watcher: Watcher, survivors: list[str], victim: str = ""
    ) -> Outcome:
        ended = watcher.wait_end()
        status = {node: ended.results[node].status for node in survivors}
        assert set(status.values()) == {"ok"}, (status, watcher.text())
        folder = self.root / name
        journals = {path.stem: Journal.read(path) for path in folder.glob("*.journal")}
        outcome = Outcome(name, elements, commits(self.cluster, name), journals, survivors, victim)
        if saves:
            outcome.saved = {node: [Path(row["path"]) for row, _ in journals[node].of("saved")] for node in survivors}
        view = job(self.cluster, name)
        ends = {(view.round, view.state_hash)}
        ends |= {(row["round"], row["hash"]) for row, _ in (journals[node].one("ends") for node in survivors)}
        assert len(ends) == 1, ends
        outcome.mismatches = view.hash_mismatches
        outcome.left_out = [text for text in self.told() if "goes on without" in text]
        return outcome


def _has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@contextmanager
def fault_cluster() -> Iterator[FaultCluster]:
    """Its coordinator can be told to die, also the one that is started after it."""
    with shared_folders() as root, pytest.MonkeyPatch.context() as patch:
        (root / "site").mkdir()
        (root / "site" / "sitecustomize.py").write_text(SITE)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(root / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("FAULT_ORDER", str(root / "order.json"))
        patch.chdir(root)
        try:
            cluster = FaultCluster(root)
            yield cluster
            cluster.cluster.close()
        finally:
            stop_all()


def check_death(
    cluster: FaultCluster, point: str, role: str, elements: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Let a process of ``role`` die at ``point``, check what comes of it, and print how long the others waited."""
    outcome = cluster.dies(point, role, elements)
    check(outcome)
    with capsys.disabled():
        print(f"\n[{role} killed, {point}: the others waited {outcome.longest:.2f} s at most]", end=" ")
