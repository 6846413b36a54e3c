"""What panels and reports show of a cluster, but for the curves; and what of it outlives the coordinator."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from notebook_cluster.coordinator.cells.replay import Replay, describe_left_out
from notebook_cluster.coordinator.core import Core
from notebook_cluster.coordinator.delivery import Delivery
from notebook_cluster.coordinator.nodes.measurements import GlobalModels, Measurements, finite
from notebook_cluster.coordinator.peers.invitation import InvitationHost
from notebook_cluster.coordinator.peers.launches import Launches
from notebook_cluster.coordinator.rounds.progress import SignsOfLife
from notebook_cluster.coordinator.rounds.runner import RoundRunner
from notebook_cluster.coordinator.view_server import ViewServer
from notebook_cluster.journal.curves import CurvesFile, LastView, SeriesStore, read_series, read_view
from notebook_cluster.journal.kept_rounds import OTHER_WAITS, SHOWN_WAITS
from notebook_cluster.journal.state import Node, cell_view, cells_of_report, failure_of
from notebook_cluster.journal.store import curves_path
from notebook_cluster.peering.candidates import Trust, found_view
from notebook_cluster.peering.peer_finder import PeerFinder
from notebook_cluster.protocol.state import ClusterView, JobView, NodeView, PeerVersions, PeerView, RunHistory, Series

VIEW_PERIOD = 2.0
"""Seconds between two views that are kept on disk."""
_MAX_TEXT = 200
_MAX_PACKAGES = 64


@dataclass(kw_only=True)
class ClusterViews:
    """Makes what views show of the parts of a coordinator."""

    core: Core
    delivery: Delivery
    views: ViewServer
    measurements: Measurements
    global_models: GlobalModels
    runner: RoundRunner
    signs: SignsOfLife
    replay: Replay
    finding: PeerFinder
    trust: Trust
    invitation: InvitationHost
    head: str
    """The name of this machine as a peer, where this is a head; else empty."""
    launches: Launches

    def cluster(self) -> ClusterView:
        """Everything that a panel shows, except the curves."""
        state = self.core.state
        current = state.shown_cell()
        return ClusterView(
            name=state.cluster, epoch=state.epoch, generation=state.generation,
            started=state.started, now=time.time(), nodes=self.nodes(), peers=self.peers(),
            jobs=self.jobs(), cell=cell_view(current) if current is not None else None,
            queued=len(state.queue()), events=list(self.core.events), directory=state.directory,
            run_log=str(self.core.journal.path), invitation=self.invitation.view(), kernels=dict(self.views.kernels),
            launches=self.launches.views(), head=self.head,
        )  # fmt: skip

    def jobs(self) -> list[JobView]:
        """The jobs, with how long their nodes waited and the newest loss of the global model."""
        waits = self.core.journal.committed.waits
        return [
            self.global_models.shown_in(
                msgspec.structs.replace(job, waits=waits(job.name, OTHER_WAITS if place else SHOWN_WAITS))
            )
            for place, job in enumerate(self.runner.job_views())
        ]

    def history(self) -> RunHistory:
        """What a report says about the run beside the curves: rounds with who waited for whom, checkpoints, cells,
        versions."""
        state, committed = self.core.state, self.core.journal.committed
        return RunHistory(
            rounds=committed.rounds, rounds_seen=committed.seen, checkpoints=self.runner.checkpoints,
            cells=cells_of_report(state), cells_seen=len(state.cells), peers=self.versions(),
        )  # fmt: skip

    def versions(self) -> list[PeerVersions]:
        """What the connected peers said about themselves."""
        rows = []
        for link in self.delivery.links.values():
            if link.info is not None:
                packages = list(link.info.packages.items())[:_MAX_PACKAGES]
                rows.append(
                    PeerVersions(
                        peer=link.name, python=link.info.python[:_MAX_TEXT], platform=link.info.platform[:_MAX_TEXT],
                        packages={name[:_MAX_TEXT]: version[:_MAX_TEXT] for name, version in packages},
                    )
                )  # fmt: skip
        return rows

    # ---- what stays

    def last(self, ended: str) -> LastView:
        """What is kept on disk; ``ended``: why the cluster is over, or empty."""
        # No code stands in a file that outlives the cluster.
        state = msgspec.structs.replace(self.cluster(), invitation="")
        return LastView(state=state, checkpoints=self.runner.checkpoints, peers=self.versions(), ended=ended)

    def take_over(self, last: LastView) -> None:
        """Go on from what the coordinator before this one has shown."""
        self.core.events.extend(last.state.events)
        self.views.kernels |= last.state.kernels
        self.runner.take_over(last.state.nodes, last.checkpoints)
        self.global_models.take_over(last.state.jobs)

    # ---- nodes

    def nodes(self) -> list[NodeView]:
        """The nodes as panels show them, in order of joining."""
        facts = self.runner.node_facts()
        nodes = sorted(self.core.state.nodes.values(), key=lambda node: node.order)
        return [self._node(node, facts.get(node.name, {})) for node in nodes]

    def _node(self, node: Node, facts: dict[str, Any]) -> NodeView:
        state, measured = self.core.state, self.measurements
        running = state.running()
        device, kind, total = state.device(node)
        telemetry, sample = measured.telemetry(node.name), measured.sample(node.name)
        used, peak = measured.memory(node.name)
        condition, reason = self._condition(node, facts)
        last = measured.device(node.peer, node.device or "cpu")
        return NodeView(
            name=node.name, rank=state.rank(node.name), peer=node.peer, device=node.device or "cpu",
            device_name=device, incarnation=node.incarnation, condition=condition,  # type: ignore[arg-type]
            reason=reason, log_tail=list(node.log_tail),
            busy=running is not None and running.nodes.get(node.name) == "running",
            memory_kind=kind, memory_used=used, memory_peak=peak, memory_total=total,
            cpu=sample.cpu if sample is not None else 0.0,
            load=finite(last.load) if last is not None else None,
            temperature=finite(last.temperature) if last is not None else None, step=telemetry.step,
            loss=telemetry.loss, scalars=telemetry.scalars, samples_per_s=telemetry.samples_per_s,
            waiting=telemetry.waiting, threads=telemetry.threads, threads_chosen=telemetry.threads_chosen,
            epoch=telemetry.epoch, epoch_share=finite(telemetry.epoch_share), of_steps=telemetry.of_steps,
            step_cell=telemetry.step_cell, replaying=self.replay.progress(node.name), place=node.order,
            failed=failure_of(state, node),
            left_out="" if condition == "dead" else describe_left_out(node.name, node.left_out),
            **{name: value for name, value in facts.items() if name != "refused"},
        )  # fmt: skip

    def _condition(self, node: Node, facts: dict[str, Any]) -> tuple[str, str]:
        """How a node is, for people, and why."""
        link = self.delivery.links.get(node.peer)
        if node.condition == "ok" and link is not None and link.condition == "suspect":
            return "suspect", node.reason
        if node.condition == "ok" and (trouble := self.signs.trouble(node.name)):
            return "suspect", trouble
        if node.condition == "lost" and link is not None and link.asleep:
            return "asleep", link.why
        if node.condition == "ok" and node.name in self.replay.names():
            return "replaying", node.reason
        if node.condition == "ok" and facts.get("refused"):
            return "refused", facts["refused"]
        return node.condition, node.reason

    # ---- peers

    def peers(self) -> list[PeerView]:
        """The peers of this cluster, then those that were found."""
        found = {candidate.key: candidate for candidate in self.finding.candidates()}
        rows: list[PeerView] = []
        for peer in self.core.state.peers.values():
            if peer.dropped:
                continue
            link, candidate = self.delivery.links.get(peer.name), found.pop(peer.key, None)
            round_trip, jitter = (link.dialer.round_trip, link.dialer.jitter) if link is not None else (None, None)
            battery, plugged = self.measurements.power(peer.name)
            rows.append(
                PeerView(
                    name=peer.name, key=peer.key, address=peer.address.removeprefix("tcp://"),
                    condition=link.shown if link is not None else "lost",
                    found_by=peer.found_by,  # type: ignore[arg-type]
                    trusted=True,
                    device=peer.device_names,
                    reason=link.why if link is not None else "",
                    round_trip_ms=None if round_trip is None else round_trip * 1000,
                    jitter_ms=None if jitter is None else jitter * 1000,
                    pairing=candidate is not None and candidate.pairing_port > 0,
                    slept=link.slept if link is not None else None, battery=battery, plugged=plugged,
                    kept=link.kept if link is not None else [],
                )
            )  # fmt: skip
        trusted = self.trust.keys()
        rows += [found_view(candidate, self.trust, trusted) for candidate in found.values()]
        return rows + self.finding.silent_views()


class ViewPersistence:
    """Keeps on disk what neither the journal nor the nodes know: curves, lines, checkpoints, the last view.

    A coordinator that was killed gets it back; when the cluster is gone a report is made of it.
    """

    def __init__(self, folder: Path, series: SeriesStore, shown: ClusterViews) -> None:
        self._folder = folder
        self._series = series
        self._shown = shown
        self._curves = CurvesFile(folder, series)
        self._view_due = 0.0

    def recall(self) -> None:
        """Go on from what the coordinator before this one has left."""
        self._series.take_over(read_series(curves_path(self._folder)))
        last = read_view(curves_path(self._folder))
        if last is not None:
            self._shown.take_over(last)

    def keep(self, now: float) -> list[Series]:
        """Call a few times a second; ``now`` is monotonic. Returns the points that are new since the last call."""
        fresh = self._series.take_fresh()
        if fresh:
            self._curves.append(fresh)
        if now >= self._view_due:
            self._view_due = now + VIEW_PERIOD
            self._keep_view("")
        return fresh

    def close(self, reason: str) -> None:
        """The cluster ends, its nodes still as they were."""
        fresh = self._series.take_fresh()
        if fresh:
            self._curves.append(fresh)
        self._keep_view(reason)
        self._curves.close()

    def _keep_view(self, ended: str) -> None:
        self._curves.keep_view(self._shown.last(ended))
