"""What a run was trained with, from its journal: what a tracker shows as its configuration."""

import logging
from pathlib import Path

from notebook_cluster.journal.reading import recover
from notebook_cluster.journal.records import BaseRecord, CellRecord, RegisterRecord
from notebook_cluster.journal.store import journal_path
from notebook_cluster.protocol.runs import Register
from notebook_cluster.protocol.state import ClusterView
from notebook_cluster.rounds.numerics.bits import bits_float

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
        log.warning("the configuration is not logged: %s", error)
    return {job: _described(register) for job, register in found.items()}


def _described(told: Register) -> dict[str, str]:
    shown = {"strategy": told.strategy, "codec": told.codec, "every": told.every, "parameters": str(told.parameters)}
    if told.lr_bits is not None:
        shown["outer_lr"] = f"{bits_float(told.lr_bits):g}"
        shown["outer_momentum"] = f"{bits_float(told.momentum_bits):g}"
    optional = {
        "mode": told.mode,
        "fragments": told.fragments if told.fragments > 1 else "",
        "overlap": told.overlap or "",
        "quorum": "" if told.quorum is None else told.quorum,
    }
    return shown | {name: str(value) for name, value in optional.items() if value != ""}
