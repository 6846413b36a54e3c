"""What the panel says about a real training cluster of two nodes, point by point."""

import math
import queue
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from notebook_cluster.client import Cluster
from notebook_cluster.protocol.clock import ABSENT
from notebook_cluster.widgets.actions import Actions
from notebook_cluster.widgets.model import panel_model
from tests.cluster import Watcher, kernel_pid, kill, running_cluster
from tests.conftest import shared_folders, wait_until

TRAIN = """
import os, time, torch
torch.set_num_threads(1)
ballast = torch.ones(20_000_000)
model = torch.nn.Linear(64, 64)
sync = nc.DiLoCo(model, every=5)

def step(broken=False):
    with torch.no_grad():
        model.weight -= 0.01 * (rank + 1)
        if broken:
            model.weight[0, 0] = float("nan")
    done = sync.step(loss=float("nan") if broken else 1.0 / (1 + sync.round), samples=8)
    time.sleep(0.02)
    return done

def until(name):
    while not os.path.exists(name):
        step()

until("go")
while not step(broken=rank == 1):
    pass
# Both wait in their next round until the file is there, so that the refusal can be looked at.
while not os.path.exists("on"):
    time.sleep(0.02)
until("enough")
"""


class Run:
    """Cards and header as they were at the named moments of one run."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.moments: dict[str, dict[str, Any]] = {}

    def model(self) -> dict[str, Any]:
        return panel_model(self.cluster.state())

    def card(self, name: str) -> dict[str, Any]:
        return next(card for card in self.model()["nodes"] if card["name"] == name)

    def keep(self, moment: str) -> None:
        self.moments[moment] = self.model()


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with shared_folders() as root, pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        with running_cluster("facts", local=2) as cluster:
            run = Run(cluster)
            train(run, root)
            yield run


def train(run: Run, root: Path) -> None:
    cluster = run.cluster
    watcher = Watcher(cluster.execute(TRAIN, replay=False))
    wait_until(lambda: (jobs := cluster.state().jobs) and jobs[0].round >= 4 and jobs[0].waits, 60, "four rounds")
    wait_until(lambda: all(node.load is not None for node in cluster.state().nodes), 60, "a load")
    wait_until(lambda: all(node.samples_per_s for node in cluster.state().nodes), 60, "samples a second")
    cluster.checkpoint("early")

    def waited() -> bool:
        run.keep("training")
        return any(width for lane in run.moments["training"]["waits"] for _, width, _ in lane["bars"])

    wait_until(waited, 60, "a round that was waited for")
    (root / "go").touch()
    wait_until(lambda: run.card("local-2")["condition"] == "refused", 60, lambda: str(run.model()["events"]))
    wait_until(lambda: run.card("local-2")["loss"] == "NaN", 60, lambda: str(run.card("local-2")))
    run.keep("refused")
    (root / "on").touch()
    wait_until(lambda: run.card("local-2")["condition"] == "busy", 60, lambda: str(run.card("local-2")))
    run.keep("again")
    (root / "enough").touch()
    assert watcher.wait_end().status == "ok"
    run.keep("ready")


def facts(model: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {fact["label"]: fact for fact in model["facts"]}


def cards(model: dict[str, Any]) -> list[dict[str, Any]]:
    assert [card["name"] for card in model["nodes"]] == ["local", "local-2"]
    return list(model["nodes"])


def test_the_header_has_cluster_state_round_rate_traffic_and_time(run: Run) -> None:
    model = run.moments["training"]
    assert (model["name"], model["level"]) == ("facts", "info")
    assert re.fullmatch(r"training( · (gathering|exchanging))?", model["status"])
    shown = facts(model)
    assert list(shown) == ["Nodes", "Round", "Sent", "Saved", "Samples/s", "Up"]
    assert int(shown["Round"]["value"]) >= 4
    assert "DiLoCo · 4,160 parameters" in shown["Round"]["note"] or "waiting for" in shown["Round"]["note"]
    # Two nodes, float32, five steps a round: a fifth of the bytes.
    assert shown["Saved"]["note"] == "5\u00d7 less than data parallel"
    assert float(shown["Samples/s"]["value"]) > 50
    assert shown["Samples/s"]["note"] == "of 2 nodes"
    assert re.fullmatch(r"[0-9.]+ s|\d+ min \d\d s", shown["Up"]["value"])


def test_a_card_has_device_memory_load_and_what_its_training_does(run: Run) -> None:
    for rank, card in enumerate(cards(run.moments["training"])):
        assert (card["rank"], card["peer"], card["condition"], card["level"]) == (str(rank), "local", "busy", "info")
        assert card["device"].startswith("cpu")
        memory = card["memory"]
        assert (memory["kind"], memory["used"][-2:], memory["total"][-2:]) == ("RAM", "MB", "GB")
        assert 0 < memory["fraction"] <= memory["peak_fraction"] < 1
        assert re.match(r"machine's CPU \d+ %( · |$)", card["vitals"])
        assert int(card["step"]) >= 20
        assert 0 < float(card["loss"]) < 1
        assert int(card["round"]) >= 4
        assert re.fullmatch(r"[0-9.]+ (ms|s)", card["wait"])
        assert re.fullmatch(r"\d+ samples/s", card["extra"])
        assert re.fullmatch(r"Saved early at round \d+, step \d+, \d+ s ago", card["checkpoint"])


def test_each_round_has_its_place_in_time_and_in_the_lane_of_whom_it_waited_for(run: Run) -> None:
    head, *lanes = run.moments["training"]["waits"]
    rounds = [int(said.removeprefix("round ")) for _, _, said in head["bars"]]
    assert rounds == list(range(rounds[0], rounds[0] + len(rounds)))
    assert {lane["name"] for lane in lanes} <= {"local", "local-2"}
    assert sorted(said.split(":")[0] for lane in lanes for _, _, said in lane["bars"]) == sorted(
        said for _, _, said in head["bars"]
    )
    places = [left for left, _, _ in head["bars"]]
    assert places == sorted(places)
    assert places[-1] == 100.0


def test_a_node_whose_work_is_refused_says_so_with_the_reason_until_it_counts_again(run: Run) -> None:
    good, refused = cards(run.moments["refused"])
    assert (refused["condition"], refused["level"]) == ("refused", "warning")
    assert re.fullmatch(
        r"the work of 'local-2' for round \d+ holds NaN or infinity: lower its learning rate", refused["reason"]
    )
    assert good["condition"] == "busy"
    assert facts(run.moments["refused"])["Samples/s"]["note"] == "of 2 nodes"
    assert [(card["condition"], card["reason"]) for card in cards(run.moments["again"])] == [("busy", "")] * 2
    assert any("holds NaN or infinity" in event["text"] for event in run.moments["ready"]["events"])
    assert (good["loss"][:2], refused["loss"]) == ("0.", "NaN")


def test_a_loss_of_nan_is_in_the_curve_as_a_gap_between_numbers(run: Run) -> None:
    def finite() -> list[bool]:
        (loss,) = [one for one in run.cluster.series() if (one.node, one.name) == ("local-2", "loss")]
        return [math.isfinite(value) for value in loss.value]

    wait_until(lambda: finite()[-1], 60, "the newest loss")
    assert finite()[0]
    assert not all(finite())


def test_after_the_cell_the_buttons_fit_what_can_be_done(run: Run) -> None:
    training, ready = run.moments["training"], run.moments["ready"]
    assert (training["can_interrupt"], training["can_checkpoint"]) == (True, True)
    assert (ready["can_interrupt"], ready["can_checkpoint"], ready["status"]) == (False, True, "ready")
    assert re.fullmatch(r"model-round-\d+", ready["checkpoint_name"])


def test_a_cell_that_trains_nothing_is_not_called_training(run: Run) -> None:
    watcher = Watcher(run.cluster.execute("import time\nwhile True: time.sleep(0.01)", replay=False))
    wait_until(lambda: run.model()["can_interrupt"], 60, "the cell")
    model = run.model()
    assert (model["status"], model["level"]) == ("running a cell", "info")
    assert "Samples/s" not in facts(model)
    run.cluster.interrupt()
    assert watcher.wait_end().status == "interrupted"


def test_a_killed_node_is_down_with_its_reason_and_the_restart_button_brings_it_back(run: Run) -> None:
    kill(kernel_pid(run.cluster, "local-2"))
    wait_until(lambda: run.card("local-2")["condition"] == "dead", 60, lambda: str(run.card("local-2")))
    assert "SIGKILL" in run.card("local-2")["reason"]
    assert (run.model()["status"], run.model()["level"]) == ("local-2 is down", "bad")
    gone, there = run.card("local-2"), run.card("local")
    assert (gone["vitals"], gone["memory"]["used"], gone["memory"]["fraction"], gone["extra"]) == ("", ABSENT, 0.0, "")
    assert int(gone["step"]) >= 20  # how far it was
    assert there["vitals"]
    assert there["memory"]["used"] != ABSENT
    click(run, "restart", "local-2")
    wait_until(lambda: run.card("local-2")["condition"] == "ok", 60, lambda: str(run.card("local-2")))


def test_the_other_buttons_act_on_the_cluster(run: Run) -> None:
    assert click(run, "checkpoint", "by hand") == "Checkpoint by-hand saved"
    round, step = map(int, re.findall(r"Saved by-hand at round (\d+), step (\d+),", run.card("local")["checkpoint"])[0])
    assert 20 < step <= 5 * round
    watcher = Watcher(run.cluster.execute("import time\nwhile True: time.sleep(0.01)"))
    wait_until(lambda: run.model()["can_interrupt"], 60, "the cell")
    assert click(run, "interrupt", "") == "Interrupted"
    assert watcher.wait_end().status == "interrupted"
    second = "import torch\nsync = nc.DiLoCo(torch.nn.Linear(2, 2), every=1, name='second')\nsync.step()\nsync.finish()"
    assert Watcher(run.cluster.execute(second)).wait_end().status == "ok"
    # One that was late for the first round has its step in another one.
    wait_until(lambda: run.model()["checkpoint_name"].startswith("second-round-"), 60, lambda: str(run.model()))
    name = run.model()["checkpoint_name"]
    assert click(run, "checkpoint", name) == f"Checkpoint {name} saved"
    assert click(run, "add", "local") == "local-3 added"
    assert click(run, "remove", "local-3") == "local-3 removed"
    cards(run.model())
    assert click(run, "stop", "") == "The cluster was stopped"
    assert run.cluster.connection.closed is not None


def click(run: Run, action: str, target: str) -> str:
    """What the panel answers to a button."""
    ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    actions = Actions(run.cluster, ended.put)
    actions.ask({"action": action, "target": target, "id": "1"})
    ended.get(timeout=60)()
    (answer,) = actions.answers()
    assert answer["status"] == "done", answer
    return answer["text"]
