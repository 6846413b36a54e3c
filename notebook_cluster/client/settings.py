"""With what the jobs of a run were trained, from its journal, and on what."""

import logging
from pathlib import Path

import msgspec

from notebook_cluster.journal.kept_runs import LastRun
from notebook_cluster.journal.reading import recover
from notebook_cluster.journal.records import BaseRecord, CellRecord, RegisterRecord
from notebook_cluster.journal.store import journal_path
from notebook_cluster.protocol.runs import Register
from notebook_cluster.protocol.state import ClusterView
from notebook_cluster.rounds.leader.runs import described_settings

log = logging.getLogger(__name__)


def cluster_settings(view: ClusterView) -> dict[str, str]:
    """Of the cluster: its name, nodes and devices."""
    devices = {node.name: node.device_name or node.device or "cpu" for node in view.nodes}
    return {
        "cluster": view.name,
        "world_size": str(len(devices)),
        "nodes": ", ".join(devices),
        "devices": ", ".join(f"{name}: {device}" for name, device in devices.items()),
    }


def job_settings(folder: Path) -> dict[str, dict[str, str]]:
    """Of each job, as it was registered last: strategy, codec, every and what else was chosen. Empty when the journal
    cannot be read: the curves are worth more."""
    found: dict[str, Register] = {}
    try:
        for record in recover(journal_path(folder)).rounds:
            if isinstance(record, RegisterRecord):
                found[record.job] = record.register
            elif isinstance(record, BaseRecord | CellRecord):
                found[record.job] = record.settings
    except (ValueError, OSError) as error:
        log.warning("no settings are known: %s", error)
    return {job: described_settings(register) for job, register in found.items()}


def with_settings(run: LastRun, folder: Path) -> LastRun:
    """``run``, which lies in ``folder``, with the settings of its jobs also where the last view of it has none, as an
    earlier version wrote it."""
    if all(job.settings for job in run.view.jobs):
        return run
    known = job_settings(folder)
    jobs = [msgspec.structs.replace(job, settings=job.settings or known.get(job.name, {})) for job in run.view.jobs]
    return msgspec.structs.replace(run, view=msgspec.structs.replace(run.view, jobs=jobs))
