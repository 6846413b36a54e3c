"""Launches: how the agents that an engine (Slurm, SSH) starts come into a cluster, and what views say and hear of it.

Who launches makes a CURVE key pair for each launch and hands it, with the cluster's own public key, to every host of
the launch: in a file of mode 0600 on a file system that they share, or through standard input (:class:`LaunchKey`). A
host connects with that pair to where the cluster's peers dial in, and says which place of the launch it takes and the
public key that it has made for itself::

    agent   -> cluster  Enlist(place, start, key)
    cluster -> agent    Enlisted, or NotEnlisted(reason)

CURVE has proven both by then: the agent that it was given the launch's key, the cluster that it has its own. From there
on the agent dials in with its own key, as one that was paired; the launch's opens no other door.
"""

from typing import Annotated, Literal

import msgspec

from notebook_cluster.protocol.wire import Message

MAX_HOSTS = 1000
"""Of one launch."""
MAX_NODES_PER_HOST = 64
ANY_PLACE = -1
"""One that is free: the engine does not number what it starts."""
MAX_LAUNCH_KEY_BYTES = 16 * 1024
_Text = Annotated[str, msgspec.Meta(max_length=200)]


class LaunchKey(Message, frozen=True):
    """What each host of a launch is given, as one line of JSON."""

    cluster: _Text
    owner: _Text
    """``user@machine``, for people."""
    server_key: _Text
    """CURVE public key of the coordinator: nobody else is talked to."""
    public_key: _Text
    """The launch's own pair. Whoever has it can become a peer of the cluster, once for each place and start."""
    secret_key: _Text

    def __repr__(self) -> str:
        return f"LaunchKey(cluster={self.cluster!r})"


class Enlist(Message, frozen=True):
    """Agent: first and only message on a connection with a launch's key."""

    protocol: int
    name: _Text
    """Of its host."""
    place: int
    """From 0, below the launch's number of hosts; or ANY_PLACE."""
    start: int
    """How often the engine has started this place before."""
    key: _Text
    """CURVE public key of this agent, made for this start."""


class Enlisted(Message, frozen=True):
    """Cluster: dial in with that key now."""


class NotEnlisted(Message, frozen=True):
    """Cluster: not with this key, now or later."""

    protocol: int
    reason: str


# ---- requests of views ---------------------------------------------------------------------------------------


class StartLaunch(Message, frozen=True):
    """Have an engine start agents. Reply value, once it has accepted that: the ``launch`` of its LaunchView; its hosts
    come when they run."""

    on: str
    """``slurm``, ``ssh:gpu1,gpu2``: an engine, and what it needs to be told behind a colon."""
    hosts: int = 0
    """0: as many as ``on`` names, else 1."""
    gpus: int = 0
    """Of each host; 0: whole hosts, as they are."""
    nodes_per_host: int = 0
    """0: one for each GPU that it may use, or one on the processor."""
    time: str = ""
    """How long they are wanted, as the engine writes it."""
    partition: str = ""
    setup: str = ""
    """A shell line that is run on each host first."""
    address: str = ""
    """Of this machine, for the hosts; empty: they try all that it has."""
    folder: str = ""
    """One that the hosts share with this machine, for the launch's key; empty: this user's data folder."""
    more: bool = False
    """Also when hosts of this engine are there or on their way."""


LAUNCH_OPTIONS = tuple(name for name in StartLaunch.__struct_fields__ if name != "more")
"""What people say of the hosts that they want, as ``Cluster.start`` and ``Cluster.grow`` take it."""


class ShrinkLaunches(Message, frozen=True):
    """Give back so many hosts that engines started: those that have not come first, then those of the highest ranks.
    Reply value: what was given back, one text each."""

    hosts: int


AnyLaunching = StartLaunch | ShrinkLaunches


# ---- what they show ------------------------------------------------------------------------------------------


class LaunchView(Message, frozen=True):
    """Hosts that were asked of an engine at one time."""

    launch: str
    name: str
    """``slurm 4711``: by which its engine knows it."""
    condition: Literal["starting", "pending", "running", "ended"]
    """``pending``: not all of them run yet."""
    hosts: int
    """That are still wanted."""
    running: int
    joined: int
    """That have come into the cluster."""
    text: str
    """``slurm 4711: 4 of 16 running, pending: Priority``."""
