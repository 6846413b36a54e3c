"""Jupyter server <-> sidebar in the browser, as JSON over one WebSocket per browser, or over REST.

What the server sends has every field, also those with default values, and the name of its kind as ``type``; numbers
that are not finite are ``null``. ``labextension/src/generated.ts`` is made from this module and from
:mod:`.state` by ``python -m notebook_cluster.server.typescript``.
"""

from typing import Any, Literal

import msgspec

from notebook_cluster.protocol.launches import StartLaunch
from notebook_cluster.protocol.state import ClusterView, PeerView
from notebook_cluster.protocol.wire import Message

ClusterCondition = Literal["running", "ended", "unreachable"]
ActionName = Literal[
    "start",
    "add",
    "hand_over",
    "remove",
    "restart",
    "interrupt",
    "detach",
    "checkpoint",
    "stop",
    "share_on",
    "share_off",
    "invite",
    "log",
    "dismiss",
]


# ---- server -> browser ---------------------------------------------------------------------------------------------


class ClusterRow(Message, frozen=True):
    """One cluster of this user. ``state`` is the last one that was heard."""

    name: str
    condition: ClusterCondition
    reason: str
    """Why it has ended or cannot be reached, one line."""
    state: ClusterView | None


class Sharing(Message, frozen=True):
    """Whether this machine is shared, and how it is added elsewhere."""

    on: bool
    name: str
    code: str
    """Empty while no code is open: only who is trusted already can add this machine."""
    command: str
    """What is typed in a notebook to add this machine."""
    qr_svg_data_url: str
    """``command`` as a picture; empty without a code."""
    keys: list[str] = []
    """Of this user's agents on this machine: a peer with one of them is this machine."""


class ServerInfo(Message, frozen=True):
    """The server extension."""

    version: str
    protocol: int


class EngineChoice(Message, frozen=True):
    """An engine that can start hosts for a cluster, and what it is to be asked for."""

    name: str
    """As it is typed: ``slurm``."""
    title: str
    """As people write it: ``Slurm``."""
    hosts: Literal["number", "names", "either"]
    """Of its hosts people say how many, or which; ``either``: only the engine itself knows."""
    options: list[str]
    """Fields of a StartLaunch that it may take besides."""


class Overview(Message, frozen=True):
    """Everything except the curves: when a browser connects, and when something has changed, at most twice a second."""

    peers: list[PeerView]
    """Found on this network, or paired once."""
    clusters: list[ClusterRow]
    sharing: Sharing
    server: ServerInfo
    engines: list[EngineChoice] = []


class Curve(Message, frozen=True):
    """Points of one curve: ``loss``, ``memory`` (bytes) or a reported scalar. The lists are equally long."""

    node: str
    """Empty: what was measured of the global model of ``job``."""
    job: str
    """Empty where it is of none."""
    name: str
    step: list[int]
    time: list[float]
    """Seconds since 1970."""
    value: list[float]
    run: int = 0
    """Of ``job``: a larger number was begun later."""


class CurvePoints(Message, frozen=True):
    """Points of a cluster's curves, at most one message a second and cluster."""

    cluster: str
    reset: bool
    """True: the whole history, thinned to at most 200 points a curve, in place of what was sent before; False: new
    points only."""
    series: list[Curve]


class Done(Message, frozen=True):
    """Answer to the Action with the same id; 0 when none could be read. ``error`` is one line, empty when it worked."""

    id: int
    error: str
    value: Any = None
    """add: names of the nodes; interrupt: names of nodes that are still busy; checkpoint: its folder; start and
    invite: lines to show; log: the lines, without control characters; share_on: the Sharing; else null."""


ServerMessage = Overview | CurvePoints | Done


# ---- browser -> server ---------------------------------------------------------------------------------------------


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What a person clicked.

    - start: cluster ``cluster`` (default ``cluster``) with ``value`` nodes on this machine (default 1) and on the
      peers ``target`` (names or HOST:PORT with commas between, or ``all``), ``code`` for those that are not trusted
      yet; with ``launch`` on hosts that an engine starts too, and by default with no node on this machine; with
      ``head`` led from that peer
    - add: nodes of peer ``target`` (name, HOST:PORT, ``local`` or ``all``), ``value`` of them (default: one per
      accelerator); ``code`` when it is not trusted yet
    - hand_over: led from the peer ``target`` (or ``local``) from now on; ``code`` as for add
    - remove, restart: node ``target``
    - interrupt: the running cell and what waits; ``value`` true: kill and respawn the nodes that are still busy
    - detach, stop: the cluster; checkpoint: named ``value``, of job ``target`` (default: the only one)
    - log: the last ``value`` lines (default 200, at most 1,000) that node ``target`` wrote to its terminal
    - dismiss: a cluster that has ended is not listed any more; what it left is kept
    - invite: open an invitation with ``code`` (default: one is made); ``value`` false closes it
    - share_on: share this machine, with ``code`` (default: codes are made up); share_off
    """

    id: int
    action: ActionName
    cluster: str = ""
    target: str = ""
    code: str = ""
    value: bool | int | str | None = None
    launch: StartLaunch | None = None
    head: str = ""
