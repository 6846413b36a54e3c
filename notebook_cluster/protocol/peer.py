"""Coordinator <-> agent: start kernels, relay their Jupyter messages, report devices and memory.

Bulk buffers beside the struct are named in each docstring; a message without that line has none.
"""

from typing import Literal

from notebook_cluster.protocol.heads import FromHeadAgent, ToHeadAgent
from notebook_cluster.protocol.kept import AskKept, KeptAnswer
from notebook_cluster.protocol.transfers import FilesAnswer, FilesRequest
from notebook_cluster.protocol.wire import Message

DeviceKind = Literal["cpu", "cuda", "rocm", "mps"]
KernelChannel = Literal["shell", "iopub", "control", "stdin"]


class Device(Message, frozen=True):
    """One thing a node can compute on."""

    id: str
    """``cpu``, ``mps``, ``cuda:0``, ``rocm:1``: torch's word, except that ROCm is named as such."""
    kind: DeviceKind
    name: str
    memory_bytes: int
    """Total VRAM, or RAM for ``cpu`` and for unified memory."""
    unified: bool = False


class PeerInfo(Message, frozen=True):
    """Agent: what this machine is. Sent after each (re)connection of a coordinator and when it changes."""

    name: str
    machine: str
    """Same for all agents on one machine: nodes of one machine reach each other over 127.0.0.1."""
    devices: list[Device]
    hosts: list[str]
    """IP addresses of this machine, non-loopback first."""
    python: str
    platform: str
    version: str
    protocol: int
    packages: dict[str, str] = {}
    leased: dict[str, str] = {}
    """Device id -> name of the cluster that uses it."""
    portable: bool = False
    """It has a battery: silence may mean that its lid is closed."""
    limits: list[str] = []
    """What its owner allows, one line each: ``at most 2 nodes``, ``8 GB of memory``."""


class DeviceSample(Message, frozen=True):
    id: str
    memory_used: int
    memory_total: int
    load: float | None = None
    temperature: float | None = None


class NodeSample(Message, frozen=True):
    """Memory and processor of one kernel: ``rss`` always, ``device_memory`` where the device tells by process."""

    node: str
    rss: int
    rss_peak: int
    device_memory: int | None = None
    cpu: float = 0.0
    cpu_seconds: float | None = None
    """Processor time of the process so far."""
    stopped: bool = False
    """The system runs it no more until it is told to (SIGSTOP, a debugger)."""


class PeerSample(Message, frozen=True):
    """Agent, each second."""

    time: float
    cpu: float
    """Load of the whole machine, 0 to 1."""
    ram_used: int
    ram_total: int
    devices: list[DeviceSample]
    nodes: list[NodeSample]
    battery: float | None = None
    """Charge in percent; None without a battery."""
    plugged: bool = True
    """On mains."""


class StartNode(Message, frozen=True):
    """Coordinator: start a kernel. Answered by NodeStarted or NodeRefused. The agent puts its own variables
    (control address, torch device visibility) on top of ``environment``."""

    node: str
    incarnation: int
    device: str = ""
    """A Device.id, or empty: the best free accelerator, else ``cpu``."""
    environment: dict[str, str] = {}
    directory: str = ""
    """Working directory; empty: the agent's own folder for this cluster."""


class NodeStarted(Message, frozen=True):
    """Agent: the kernel process runs and answers on its channels."""

    node: str
    incarnation: int
    device: str
    pid: int


class NodeRefused(Message, frozen=True):
    node: str
    incarnation: int
    reason: str


class NodeEnded(Message, frozen=True):
    """Agent: the kernel's process is gone, asked for or not."""

    node: str
    incarnation: int
    asked: bool
    reason: str
    """``killed by SIGKILL (out of memory?)``, ``exit code 1``, ``stopped``, ``agent ended`` ..."""
    log_tail: list[str] = []
    by_itself: bool = False
    """It crashed, exited or was killed for want of memory: nobody had asked it to end."""


class InterruptNode(Message, frozen=True):
    """Coordinator: SIGINT to the kernel. With ``cell`` only while it is inside that cell, and InterruptSeen comes back;
    otherwise its runtime is asked (InterruptCell), which keeps the cell from beginning."""

    node: str
    incarnation: int
    cell: int = 0


class StopNode(Message, frozen=True):
    """Coordinator: end the kernel; ``force``: SIGKILL at once, else shutdown_request first. Answered by NodeEnded."""

    node: str
    incarnation: int
    force: bool = False


class ToKernel(Message, frozen=True):
    """Coordinator: a Jupyter message. Buffers: header, parent_header, metadata, content (JSON), then the message's
    own buffers. The agent signs it with the kernel's key. An execute_request whose ``msg_id`` was already
    delivered to this incarnation is dropped."""

    node: str
    incarnation: int
    channel: KernelChannel
    subshell: bool = False
    """A shell message that the kernel shall answer also while it runs a cell: it goes to the kernel's subshell, where
    the kernel has them (ipykernel 7)."""


class FromKernel(Message, frozen=True):
    """Agent: a Jupyter message, signature checked and removed. Buffers: as in ToKernel."""

    node: str
    incarnation: int
    channel: KernelChannel


class ToNode(Message, frozen=True):
    """Coordinator: ``body`` is an encoded message of :mod:`.node` or :mod:`.rounds` for the node's runtime."""

    node: str
    incarnation: int
    body: bytes


class FromNode(Message, frozen=True):
    """Agent: ``body`` as ToNode, in the other direction, in order."""

    node: str
    incarnation: int
    body: bytes


class ReadLog(Message, frozen=True):
    """Coordinator: the last ``lines`` of a kernel's stderr/stdout file. Answered by LogLines."""

    node: str
    lines: int = 100


class LogLines(Message, frozen=True):
    node: str
    lines: list[str]


class Inventory(Message, frozen=True):
    """Agent: the kernels of this cluster that run here; first message of every new session, after a silence, and the
    answer to AskInventory."""

    nodes: list[NodeStarted]
    ended: str = ""
    """Why this agent has ended the kernels that this cluster had here, while its coordinator was not there."""


class KeptCheckpoint(Message, frozen=True):
    """What ``resume=name`` on this peer goes on from."""

    name: str
    job: str
    round: int
    time: float
    """When it was kept, seconds since 1970 on the agent's clock."""
    folder: str


class KeptCheckpoints(Message, frozen=True):
    """Agent, after each (re)connection of a coordinator: what it has kept of trainings, this cluster's and others', the
    newest of each name."""

    checkpoints: list[KeptCheckpoint]


class AskInventory(Message, frozen=True):
    """Coordinator: this peer was given up, and is heard again. Answered by Inventory: a machine that only stood still
    for a while (asleep) may not have noticed."""


class Release(Message, frozen=True):
    """Coordinator: this cluster is over; end all its kernels and forget it. Answered by Released."""

    keep: str = ""
    """Nobody asked for the end: nodes save their training first, for this reason."""
    jobs: list[str] = []
    """Those that are saved; empty: all."""


class Released(Message, frozen=True):
    pass


class Slept(Message, frozen=True):
    """Agent: this machine was asleep for so long, just now."""

    seconds: float


class Diagnose(Message, frozen=True):
    """Coordinator, for the doctor: look at yourself, and try to reach others. Buffers: bytes to receive, to measure
    the link; answered by Diagnosis with as many bytes back."""

    ticket: int
    reach: dict[str, list[tuple[str, int]]] = {}
    """Label -> (host, port) to connect to over TCP, any of which will do."""
    packages: list[str] = []
    """Distributions to name with their version; empty: all that are installed."""
    only_bytes: bool = False
    """Look at nothing and answer at once: the bytes and the clock are measured."""


class Diagnosis(Message, frozen=True):
    """Agent. Buffers: as many bytes as Diagnose brought."""

    ticket: int
    time: float
    """This machine's wall clock when it answered."""
    interfaces: list[tuple[str, str]] = []
    """(interface, IPv4 address)."""
    multicast: str = ""
    """Why mDNS does not work here, or empty."""
    reached: dict[str, str] = {}
    """Label of Diagnose.reach -> ``host:port`` that answered, or ``no: `` and the reason."""
    packages: dict[str, str] = {}
    facts: dict[str, str] = {}
    """``python``, ``platform``, ``cuda`` (driver), ``rocm``, ``notebook-cluster``."""


class Farewell(Message, frozen=True):
    """Agent: it ends now (the person stopped sharing); its kernels are ended."""

    reason: str


FromCoordinator = (
    StartNode
    | InterruptNode
    | StopNode
    | ToKernel
    | ToNode
    | ReadLog
    | AskInventory
    | AskKept
    | Diagnose
    | FilesRequest
    | Release
    | ToHeadAgent
)
FromAgent = (
    PeerInfo
    | PeerSample
    | NodeStarted
    | NodeRefused
    | NodeEnded
    | FromKernel
    | FromNode
    | LogLines
    | Inventory
    | KeptCheckpoints
    | KeptAnswer
    | Released
    | Slept
    | Diagnosis
    | FilesAnswer
    | Farewell
    | FromHeadAgent
)
