"""A cluster whose coordinator runs on a peer, its *head*: what the owner's *window* and the agents say to each other.

The window is a process on the owner's machine that looks to views like a coordinator, and passes what they say over the
link to the head. A :class:`Grant` lets agents obey the head's key for that one cluster in place of the owner's.
Bulk buffers beside the struct are named in each docstring.
"""

from typing import Literal

from notebook_cluster.protocol.wire import Message

MOST_SECONDS = 31 * 86400.0
"""That a grant may hold at most, from its receipt."""
MOST_HEAD_PEERS = 256
FILE_CHUNK = 1 << 20
"""Bytes of a journal in one message."""
CODE_VARIABLE = "NOTEBOOK_CLUSTER_WINDOW_CODE"
"""In the environment of a window: the code for its head. Every user of a machine can read arguments."""
MOVED_FILE: Literal["moved.tar"] = "moved.tar"
"""What a coordinator has written, packed for the next one (:mod:`notebook_cluster.journal.moving`)."""
HeadFileName = Literal["run.journal", "curves.journal", "moved.tar"]


class PeerKey(Message, frozen=True):
    """A peer that a head may use: it is paired with the cluster's owner and has a grant. ``address`` is ``HOST:PORT``
    where it was last reached, or empty."""

    name: str
    key: str
    owner: str
    address: str = ""


class StartHead(Message, frozen=True):
    """Window to the agent of the head: run the coordinator of the cluster of that name, or say how it is. Answered by
    HeadState. ``only_look``: start nothing; ``fresh``: what an earlier run has left is set aside. ``token``: of the
    hand over whose file it begins from, once."""

    ticket: int
    cluster: str
    only_look: bool = False
    fresh: bool = False
    directory: str = ""
    """Working directory of the nodes on the owner's machine."""
    lease: float = 86400.0
    agent_lease: float = 600.0
    peers: list[PeerKey] = []
    token: str = ""


class HeadState(Message, frozen=True):
    """Agent of the head. ``error``: why there is none; one line. ``key`` and ``reception``: its public key, and the
    port where agents dial in."""

    ticket: int
    error: str = ""
    running: bool = False
    ended: str = ""
    """Why the last run here has ended, where none runs."""
    key: str = ""
    reception: int = 0
    epoch: int = 0
    found: bool = False
    """It ran already."""
    begun: bool = False
    """The last run here is the one that the order's token names."""
    left: str = ""
    """The token of the hand over with which the last run here has ended, and whose file is still here."""


class AskReady(Message, frozen=True):
    """Owner to the agent of a peer: can this cluster be led from here? Answered by HeadReady. ``places``: peers by
    name, each with its HOST:PORT; ``bytes``: of what would be sent."""

    ticket: int
    cluster: str
    places: list[tuple[str, str]] = []
    bytes: int = 0


class HeadReady(Message, frozen=True):
    """Agent. ``error``: why not, one line; ``key``: that the head will have; ``unreachable``: names of the peers that
    cannot be reached from there, each with why."""

    ticket: int
    error: str = ""
    key: str = ""
    unreachable: list[tuple[str, str]] = []


class WriteHeadFile(Message, frozen=True):
    """Owner to the agent of the head: bytes of MOVED_FILE of the hand over ``token``, from ``offset`` on. Answered by
    HeadFileTaken. Buffers: those bytes, at most FILE_CHUNK."""

    ticket: int
    cluster: str
    token: str
    offset: int
    total: int


class HeadFileTaken(Message, frozen=True):
    """Agent. ``error``: why not, one line."""

    ticket: int
    error: str = ""


class FollowHead(Message, frozen=True):
    """Owner to the private agent of their machine: go to the coordinator with ``key`` at ``address`` (HOST:PORT), and
    obey it as the owner; empty: to none. Answered by Granted."""

    ticket: int
    key: str = ""
    address: str = ""


class HeadPeers(Message, frozen=True):
    """Window to the agent of the head: these are all the peers that the head may use from now on."""

    cluster: str
    peers: list[PeerKey]


class ToHead(Message, frozen=True):
    """Window to the agent of the head: what view number ``view`` (from 1) says. ``epoch``: of the start of the head
    that the window knows. ``opens``: it may be the first word of that view. Buffers: one message of the view protocol,
    or none: that view is gone."""

    cluster: str
    view: int
    epoch: int
    opens: bool = False


class FromHead(Message, frozen=True):
    """Agent of the head. Buffers: one message for that view, or none: that view is not there any more; of view 0: the
    head that the window knows is gone, and all views with it."""

    view: int


class Grant(Message, frozen=True):
    """Owner to every agent that is paired with them: for ``seconds`` from receipt whoever has ``key`` is the
    coordinator of the owner's ``cluster``; 0: nobody is any more. A ``serial`` that is not higher than the last one is
    refused. Answered by Granted. ``head``: the peer where it runs, for people."""

    ticket: int
    cluster: str
    head: str
    key: str
    serial: int
    seconds: float


class Granted(Message, frozen=True):
    """Agent. ``error``: why the grant is not in force; one line."""

    ticket: int
    error: str = ""


class ReadHeadFile(Message, frozen=True):
    """Window to the agent of the head: the bytes of a copy of this file from ``offset`` on; at 0 the copy is made.
    Answered by HeadFile. ``offset`` -1, of MOVED_FILE: it is not needed any more."""

    ticket: int
    cluster: str
    name: HeadFileName
    offset: int = 0


class HeadFile(Message, frozen=True):
    """Agent of the head. ``total``: bytes of the copy. Buffers: those from the offset on, at most FILE_CHUNK."""

    ticket: int
    total: int = 0
    error: str = ""


ToHeadAgent = StartHead | HeadPeers | ToHead | Grant | ReadHeadFile | AskReady | WriteHeadFile | FollowHead
FromHeadAgent = HeadState | FromHead | Granted | HeadFile | HeadReady | HeadFileTaken
