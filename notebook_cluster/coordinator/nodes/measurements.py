"""Memory, load, steps and losses of the nodes: what agents and runtimes say, as curves and as rows of a panel."""

import math
import time
from typing import TYPE_CHECKING

from notebook_cluster.coordinator.cells import left_out
from notebook_cluster.protocol import peer as p
from notebook_cluster.protocol.node import GlobalMeasured, RunLosses, Telemetry
from notebook_cluster.protocol.runs import IN_A_CELL
from notebook_cluster.protocol.state import NodeView

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

CLOCK_WAS_SET = 12 * 3600.0
MOST_DEVICES = 64
MOST_RUNS = 16
"""Of which one message tells losses."""


class Measurements:
    """The newest numbers of nodes, devices and peers, and the rows that views get of them."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        self._telemetry: dict[str, Telemetry] = {}
        self._samples: dict[str, p.NodeSample] = {}
        self._devices: dict[str, dict[str, p.DeviceSample]] = {}
        self._power: dict[str, tuple[float | None, bool]] = {}
        self._ahead: dict[str, float] = {}

    def on_telemetry(self, name: str, new: Telemetry) -> None:
        """What a node's runtime says about its training, at most 4 times a second."""
        before = self._telemetry.get(name, Telemetry())
        self._telemetry[name] = new
        if not self._hub.state.nodes[name].is_in:
            return
        if new.waiting != before.waiting:
            self._hub.cells.notices.on_waiting(name, new.waiting)
        for told in [RunLosses(job="", run=0, points=new.history), *new.losses[:MOST_RUNS]]:
            if told.job and not self._is_run(told):
                continue
            ahead = self._clock_difference(name, told.points[-1][1]) if told.points else 0.0
            for step, when, loss in told.points:
                if math.isfinite(when):  # a loss that is not finite is a gap in the curve
                    self._hub.series.add(name, "loss", step, when + ahead, loss, job=told.job, run=told.run)
        if new.step is not None:
            for scalar, value in new.scalars.items():
                if new.step != before.step or not _same(value, before.scalars.get(scalar)):
                    self._hub.series.add(name, scalar, new.step, time.time(), value)
        self._hub.dirty()

    def _is_run(self, told: RunLosses) -> bool:
        """It is of a job that there is, and of a cell that was."""
        newest = (max(self._hub.state.cells, default=0) + 1) * IN_A_CELL
        return self._hub.rounds.committed(told.job) is not None and 0 <= told.run < newest

    def on_global(self, name: str, message: GlobalMeasured) -> None:
        """What a node has measured of a global model."""
        if self._hub.state.nodes[name].is_in and math.isfinite(message.time):
            when = message.time + self._clock_difference(name, message.time)
            self._hub.global_models.told(name, message, when)

    def _clock_difference(self, name: str, said: float) -> float:
        """Seconds that this machine's clock is ahead of the node's, about, from the time that a message says: of
        every one the time on the way is in it, so the smallest is the best."""
        if not math.isfinite(said):
            return self._ahead.get(name, 0.0)
        now = time.time() - said
        known = self._ahead.get(name, now)
        # A clock that was set is not a message that took half a day.
        self._ahead[name] = now if now - known > CLOCK_WAS_SET else min(known, now)
        return self._ahead[name]

    def on_sample(self, peer: str, sample: p.PeerSample) -> None:
        """What the agent of ``peer`` measures each second."""
        self._devices[peer] = {device.id: device for device in sample.devices[:MOST_DEVICES]}
        self._power[peer] = _finite(sample.battery), sample.plugged
        for row in sample.nodes:
            node = self._hub.state.nodes.get(row.node)
            if node is None or node.peer != peer:
                continue
            self._samples[row.node] = row
            step = self._telemetry[row.node].step if row.node in self._telemetry else None
            # Our clock: a peer's may be a day off.
            self._hub.series.add(row.node, "memory", step or 0, time.time(), float(self._memory(row.node)[0]))
        self._hub.dirty()

    def _memory(self, name: str) -> tuple[int, int]:
        """(used, peak) bytes: of the accelerator where the node uses one, else resident."""
        sample, telemetry = self._samples.get(name), self._telemetry.get(name)
        if self._hub.state.nodes[name].device not in ("", "cpu"):
            if telemetry is not None and telemetry.memory_used is not None:
                return telemetry.memory_used, telemetry.memory_peak or telemetry.memory_used
            if sample is not None and sample.device_memory is not None:
                return sample.device_memory, sample.device_memory
        return (sample.rss, sample.rss_peak) if sample is not None else (0, 0)

    def power(self, peer: str) -> tuple[float | None, bool]:
        """(charge of its battery in percent or None, whether it is on mains)."""
        return self._power.get(peer, (None, True))

    def forget(self, name: str) -> None:
        """The node was removed."""
        self._telemetry.pop(name, None)
        self._samples.pop(name, None)
        self._ahead.pop(name, None)

    def views(self) -> list[NodeView]:
        """The nodes as panels show them, in order of joining."""
        state = self._hub.state
        running = state.running()
        jobs = self._hub.rounds.node_facts()
        replaying = self._hub.replay.names()
        rows: list[NodeView] = []
        for node in sorted(state.nodes.values(), key=lambda node: node.order):
            peer = state.peers[node.peer]
            device = next((d for d in peer.devices if d[0] == (node.device or "cpu")), ("cpu", "cpu", 0, False))
            link = self._hub.peers.links.get(node.peer)
            telemetry = self._telemetry.get(node.name, Telemetry())
            sample = self._samples.get(node.name)
            used, peak = self._memory(node.name)
            facts = jobs.get(node.name, {})
            condition = node.condition
            reason = node.reason
            if condition == "ok" and link is not None and link.condition == "suspect":
                condition = "suspect"
            elif condition == "ok" and (trouble := self._hub.signs.trouble(node.name)):
                condition, reason = "suspect", trouble
            elif condition == "lost" and link is not None and link.asleep:
                condition, reason = "asleep", link.why
            elif condition == "ok" and node.name in replaying:
                condition = "replaying"
            elif condition == "ok" and facts.get("refused"):
                condition, reason = "refused", facts["refused"]
            accelerator = node.device not in ("", "cpu")
            measured = self._devices.get(node.peer, {}).get(node.device or "cpu")
            rows.append(
                NodeView(
                    name=node.name, rank=state.rank(node.name), peer=node.peer, device=node.device or "cpu",
                    device_name=device[1], incarnation=node.incarnation, condition=condition,  # type: ignore[arg-type]
                    reason=reason, log_tail=list(node.log_tail),
                    busy=running is not None and running.nodes.get(node.name) == "running",
                    memory_kind="unified" if device[3] else ("VRAM" if accelerator else "RAM"),
                    memory_used=used, memory_peak=peak, memory_total=device[2],
                    cpu=sample.cpu if sample is not None else 0.0,
                    load=_finite(measured.load) if measured is not None else None,
                    temperature=_finite(measured.temperature) if measured is not None else None, step=telemetry.step,
                    loss=telemetry.loss, scalars=telemetry.scalars, samples_per_s=telemetry.samples_per_s,
                    waiting=telemetry.waiting, threads=telemetry.threads, threads_chosen=telemetry.threads_chosen,
                    replaying=self._hub.replay.progress(node.name),
                    left_out="" if condition == "dead" else left_out.describe(node.name, node.left_out),
                    **{name: value for name, value in facts.items() if name != "refused"},
                )
            )  # fmt: skip
        return rows


def _same(value: float, before: float | None) -> bool:
    """NaN is the same as NaN."""
    return value == before or (before is not None and math.isnan(value) and math.isnan(before))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
