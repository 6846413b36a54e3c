"""The points at which the coordinator of a real cluster dies. Imported by the coordinator itself, as it starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from notebook_cluster.coordinator.rounds.runner import RoundRunner
from notebook_cluster.journal.log import Journal
from notebook_cluster.link import Dialer
from notebook_cluster.protocol import decode
from notebook_cluster.protocol import rounds as p
from notebook_cluster.protocol.node import ToNodeBody
from notebook_cluster.protocol.peer import ToNode
from tests.fault_points import Condition, Order, around, die, is_message

HEARD = {
    p.Arrived: "ARRIVED received",
    p.RoundStatus: "answer of one received after a restart",
    p.Applied: "APPLIED received",
    p.CheckpointRequest: "checkpoint asked for",
    p.Saved: "SAVED received",
}


def _done(order: Order, order_file: Path) -> None:
    """The next point is for the next coordinator."""
    if order.points[1:]:
        order_file.write_bytes(msgspec.json.encode(msgspec.structs.replace(order, points=order.points[1:])))
    else:
        order_file.unlink()


def watch_coordinator(order_file: Path) -> None:
    """In a coordinator that is about to start: die at the point that ``order_file`` names by then."""
    told: dict[str, list[str]] = {}

    def dies_at(point: str, kind: type | str, message: Any, until: Callable[[], bool] | None = None) -> None:
        if not order_file.exists():
            return
        order = msgspec.json.decode(order_file.read_bytes(), type=Order)
        if order.points[0] != point:
            return
        if isinstance(kind, str):  # a record of the log
            fits = (message["kind"], message["job"]) == (kind, order.job) and message[kind]["round"] == order.number
        else:
            fits = is_message(kind, order.job, order.number, message)
        if fits:
            die(Path(order.folder), until, lambda: _done(order, order_file))

    def logs(when: str) -> Condition:
        def log(journal: Journal, record: Any) -> None:
            written = (lambda: journal.flush(1.0) is None) if when == "logged" else None
            for kind in ("seal", "commit"):
                dies_at(f"{kind.upper()} {when}", kind, msgspec.to_builtins(record), written)

        return log

    def sent(_dialer: Any, envelope: Any, *_buffers: Any) -> None:
        if not order_file.exists() or not isinstance(envelope, ToNode):
            return
        name, message = envelope.node, decode(envelope.body, ToNodeBody)
        kind = type(message).__name__
        if kind not in ("Seal", "Commit", "Save", "Saved"):
            return
        order = msgspec.json.decode(order_file.read_bytes(), type=Order)
        if not is_message(type(message), order.job, order.number, message):
            return
        names = told.setdefault(f"{kind} {order.job}", [])
        names.append(name)
        marks = [Path(order.folder) / f"heard.{other}.{kind}.{order.number}" for other in names]
        count = {1: "one", 3: "all"}.get(len(names))
        dies_at(f"{kind.upper()} sent to {count}", type(message), message, lambda: all(mark.exists() for mark in marks))

    def hears(_runner: Any, _node: str, _incarnation: int, message: Any) -> None:
        for kind, point in HEARD.items():
            dies_at(point, kind, message)

    def noted(_runner: Any, _node: str, _incarnation: int, message: Any) -> None:
        dies_at("PREPARED of one noted", p.Prepared, message)

    around(Journal, "round", before=logs("not logged"), after=logs("logged"))
    # not Delivery.to_node: what that is handed may wait for rows of the journal, for ever while we stand still
    around(Dialer, "send", after=sent)
    around(RoundRunner, "from_member", before=hears, after=noted)
