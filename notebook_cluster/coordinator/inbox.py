"""What agents, nodes and kernels say: one table from the type of a message to who handles it.

An agent speaks for the nodes that it runs and for no other. What a node's runtime or kernel says comes inside a message
of its agent; it is unpacked here and looked up in the same table.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from notebook_cluster.coordinator.cells.cell_files import Origin
from notebook_cluster.coordinator.cells.executions import Executions
from notebook_cluster.coordinator.cells.notices import Notices
from notebook_cluster.coordinator.cells.questions import StdinQuestions
from notebook_cluster.coordinator.cells.streaming import OutputStreaming
from notebook_cluster.coordinator.core import Core
from notebook_cluster.coordinator.decisions.host import Decisions
from notebook_cluster.coordinator.delivery import Delivery, PeerLink, read_content, read_headers
from notebook_cluster.coordinator.examination import Examination
from notebook_cluster.coordinator.kernels.comms import Comms
from notebook_cluster.coordinator.kernels.inspection import Inspections, VariableTable
from notebook_cluster.coordinator.kernels.transfers import Transfers
from notebook_cluster.coordinator.nodes.measurements import Measurements
from notebook_cluster.coordinator.nodes.membership import Membership
from notebook_cluster.coordinator.nodes.relay import FrameRelay
from notebook_cluster.coordinator.peers.links import PeerLinks
from notebook_cluster.coordinator.peers.taking_over import StateTakeOver
from notebook_cluster.coordinator.rounds.deadlocks import Deadlocks
from notebook_cluster.coordinator.rounds.progress import SignsOfLife
from notebook_cluster.coordinator.rounds.runner import RoundRunner
from notebook_cluster.journal.state import Node
from notebook_cluster.link import Dialer, Drops
from notebook_cluster.protocol import decisions as d
from notebook_cluster.protocol import decode
from notebook_cluster.protocol import node as n
from notebook_cluster.protocol import peer as p
from notebook_cluster.protocol import rounds as r
from notebook_cluster.protocol import transfers as t
from notebook_cluster.protocol.interaction import Variables
from notebook_cluster.protocol.kept import KeptAnswer
from notebook_cluster.protocol.measuring import PairMeasured
from notebook_cluster.protocol.runs import Joined, Register
from notebook_cluster.protocol.wire import Message, ProtocolError

log = logging.getLogger(__name__)

ABOUT_NODE = p.FromKernel | p.FromNode | p.NodeRefused | p.NodeEnded | p.LogLines
OUTPUT_KINDS = ("stream", "display_data", "update_display_data", "execute_result", "error", "clear_output")
ROUND_MESSAGES = (
    Register, Joined, r.Arrived, r.Prepared, r.Applied, r.Stalled, r.LeftRounds, r.RoundStatus, r.CommitReport,
    r.CheckpointRequest, r.Saved, n.Kept,
)  # fmt: skip
"""What the round machine is told of, as it comes."""


class MessageSource(NamedTuple):
    """Where a message comes from. ``parent``: the request that a kernel's message belongs to."""

    link: PeerLink
    node: Node | None
    buffers: list[bytes]
    kind: str = ""
    parent: str = ""

    @property
    def of_node(self) -> Node:
        """The node, of a message that is about one."""
        assert self.node is not None
        return self.node


Handler = Callable[[MessageSource, Any], None]


class AgentInbox:
    """Hands on what comes over the links. The body that a handler gets is the message; of a kernel, the parts of it."""

    def __init__(
        self,
        core: Core,
        *,
        delivery: Delivery,
        links: PeerLinks,
        membership: Membership,
        measurements: Measurements,
        relay: FrameRelay,
        signs: SignsOfLife,
        deadlocks: Deadlocks,
        decisions: Decisions,
        runner: RoundRunner,
        executions: Executions,
        stdin: StdinQuestions,
        streaming: OutputStreaming,
        notices: Notices,
        comms: Comms,
        inspections: Inspections,
        variables: VariableTable,
        transfers: Transfers,
        examination: Examination,
        taking_over: StateTakeOver,
    ) -> None:
        self._core = core
        self._delivery = delivery
        self._signs = signs
        self._executions = executions
        self._stdin = stdin
        self._streaming = streaming
        self._notices = notices
        self._comms = comms
        self._dropped = Drops()

        def on_sample(source: MessageSource, sample: p.PeerSample) -> None:
            measurements.on_sample(source.link.name, sample)
            signs.on_sample(source.link.name, sample)

        self._handlers: Mapping[object, Handler] = {
            # agents, about their machine
            p.PeerInfo: lambda source, message: links.on_described(source.link, message),
            p.PeerSample: on_sample,
            p.Inventory: lambda source, message: membership.on_inventory(source.link.name, message),
            p.KeptCheckpoints: lambda source, message: links.on_kept(source.link, message),
            KeptAnswer: lambda source, message: taking_over.on_answer(source.link.name, message),
            p.Slept: lambda source, message: links.on_slept(source.link, message),
            p.Released: lambda source, message: source.link.released.set(),
            p.Farewell: lambda source, message: links.on_farewell(source.link, message),
            p.Diagnosis: lambda source, message: examination.on_diagnosis(source.link.name, message, source.buffers),
            t.FilesAnswer: lambda source, message: transfers.on_agent(source.link.name, message),
            # agents, about a node
            p.NodeRefused: lambda source, message: membership.on_refused(message),
            p.NodeEnded: lambda source, message: membership.on_ended(message),
            p.LogLines: lambda source, message: transfers.on_log_lines(message),
            p.FromNode: self._from_runtime,
            p.FromKernel: self._from_kernel,
            # a node's runtime
            n.NodeHello: lambda source, message: membership.on_hello(source.of_node, message),
            n.Heartbeat: lambda source, message: signs.on_heartbeat(source.of_node.name, message),
            n.Telemetry: lambda source, message: measurements.on_telemetry(source.of_node.name, message),
            n.GlobalMeasured: lambda source, message: measurements.on_global(source.of_node.name, message),
            n.Blocked: lambda source, message: deadlocks.on_blocked(
                source.of_node.name, source.of_node.incarnation, message
            ),
            n.InterruptSeen: lambda source, message: executions.interrupt_seen(source.of_node.name, message.cell),
            n.NodeLog: self._on_node_log,
            n.Unreachable: lambda source, message: relay.on_unreachable(source.of_node, message),
            n.RelayFrame: lambda source, message: relay.on_frame(source.of_node, message),
            n.RelayTaken: lambda source, message: relay.on_taken(source.of_node, message),
            PairMeasured: lambda source, message: relay.on_measured(source.of_node, message),
            Variables: lambda source, message: variables.on_answer(
                source.of_node.name, source.of_node.incarnation, message
            ),
            t.ValuePart: lambda source, message: transfers.on_node(source.of_node, message),
            t.PartWritten: lambda source, message: transfers.on_node(source.of_node, message),
            **dict.fromkeys(
                (d.Ask, d.Withdrawn, d.PlaceReached, d.DecisionState),
                lambda source, message: decisions.on_message(source.of_node.name, message),
            ),
            **dict.fromkeys(
                ROUND_MESSAGES,
                lambda source, message: runner.from_member(
                    source.of_node.name, source.of_node.incarnation, message
                ),
            ),
            # a node's kernel, by channel and kind
            ("iopub", "status"): self._on_status,
            **dict.fromkeys((("iopub", kind) for kind in OUTPUT_KINDS), self._on_output),
            **dict.fromkeys(
                (("iopub", kind) for kind in ("comm_open", "comm_msg", "comm_close")),
                lambda source, parts: comms.on_message(source.of_node, source.kind, parts),
            ),
            ("stdin", "input_request"): self._on_input_request,
            ("shell", "execute_reply"): self._on_execute_reply,
            **dict.fromkeys(
                (("shell", kind) for kind in ("complete_reply", "inspect_reply")),
                lambda source, parts: inspections.on_reply(source.of_node.name, source.parent, read_content(parts)),
            ),
        }  # fmt: skip

    def receive(self, dialer: Dialer, peer: str, message: Message, buffers: list[bytes]) -> None:
        """A message of the agent of ``peer``, which came over ``dialer``."""
        link = self._delivery.links.get(peer)
        if link is None or link.dialer is not dialer:
            return
        link.heard()
        node = None
        if isinstance(message, ABOUT_NODE):
            node = self._core.state.nodes.get(message.node)
            if node is None:
                return
            if node.peer != link.name:
                log.warning("%s spoke for node %s, which is not there: dropped", link.name, node.name)
                return
        self._handle(type(message), MessageSource(link, node, buffers), message)

    def _handle(self, key: object, source: MessageSource, body: Any) -> None:
        handler = self._handlers.get(key)
        if handler is not None:
            handler(source, body)

    # ---- unpacking what runtimes and kernels say

    def _from_runtime(self, source: MessageSource, message: p.FromNode) -> None:
        node = source.of_node
        if node.incarnation != message.incarnation:
            return
        self._signs.said(node.name)
        try:
            body = decode(message.body, n.FromNodeBody)
        except ProtocolError as error:
            self._dropped.note("control", "a control message of %s is not readable: %s", message.node, error)
            return
        self._handle(type(body), source, body)

    def _from_kernel(self, source: MessageSource, message: p.FromKernel) -> None:
        """A Jupyter message; anything unreadable is dropped and said."""
        if source.of_node.incarnation != message.incarnation:
            return
        self._signs.said(message.node)
        parts = source.buffers
        try:
            header, parent = read_headers(parts)
            self._executions.heard(parent)
            inner = source._replace(kind=header.msg_type, parent=parent)
            self._handle((message.channel, header.msg_type), inner, parts)
        except (msgspec.DecodeError, IndexError, UnicodeDecodeError) as error:
            self._dropped.note("kernel", "a message of %s is not readable: %s", message.node, error)

    # ---- rows of the table that ask more than one part

    def _on_node_log(self, source: MessageSource, message: n.NodeLog) -> None:
        name = source.of_node.name
        if message.cell:
            self._notices.told(name, message.level, message.text)
        else:
            self._core.tell(message.level, f"{name}: {message.text}")

    def _on_input_request(self, source: MessageSource, parts: list[bytes]) -> None:
        run = self._executions.run_of(source.parent)
        if run is not None and not run.replay:
            self._stdin.on_request(run, read_content(parts))

    def _on_execute_reply(self, source: MessageSource, parts: list[bytes]) -> None:
        run = self._executions.run_of(source.parent)
        if run is not None:
            self._executions.on_reply(run, read_content(parts))

    def _on_status(self, source: MessageSource, parts: list[bytes]) -> None:
        state = read_content(parts).get("execution_state")
        run = self._executions.run_of(source.parent)
        if state != "idle":
            return
        if run is not None:
            self._executions.on_idle(run)
        else:
            self._comms.on_idle(source.of_node.name, source.parent)

    def _on_output(self, source: MessageSource, parts: list[bytes]) -> None:
        node, content = source.of_node, read_content(parts)
        if self._comms.catches(node, source.parent, source.kind, content):
            return
        run = self._executions.run_of(source.parent)
        if run is not None and run.replay:
            return
        key, dialer = self._core.state.peers[source.link.name].key, source.link.dialer
        origin = Origin(key, dialer.received, dialer.handling, node.incarnation)
        self._streaming.add(origin, node.name, None if run is None else run.cell, source.kind, content)
