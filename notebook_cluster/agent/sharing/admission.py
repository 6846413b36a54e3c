"""Whether a node may start here now, by what the owner of this machine allows."""

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass

import msgspec

from notebook_cluster.agent.events import EventKind, SharingEvent, Tell
from notebook_cluster.agent.settings import Limits
from notebook_cluster.agent.sharing.presence import IDLE_AFTER_S, Presence
from notebook_cluster.memory import amount
from notebook_cluster.protocol.peer import Device

ANSWER_S = 60.0
"""For the person at the machine to say whether a node may start."""


class StartRefused(Exception):
    """A node cannot be started; the text is the one-line reason."""


@dataclass(frozen=True)
class Applicant:
    """A node that wants to start. ``gone`` is set when it is not wanted any more; ``owner`` is for people, ``owner_id``
    the same for all clusters of one owner, and for nobody else's."""

    node: str
    cluster: str
    owner: str
    gone: asyncio.Event
    owner_id: str = ""


class Admission:
    """The limits of one agent, applied to all clusters together.

    Args:
        peer: this machine, as refusals name it.
        tell: hears the questions to the person here (``confirm``) and their end.

    Attributes:
        used_memory: resident bytes of all kernels, when they were last counted; for whoever counts.
        closed: why nothing is started any more; empty as long as it is.
    """

    def __init__(
        self,
        peer: str,
        limits: Limits,
        presence: Presence,
        tell: Tell,
    ) -> None:
        self.limits = limits
        self._peer = peer
        self._presence = presence
        self._tell = tell
        self.used_memory = 0
        self.closed = ""
        self._admitted: dict[Hashable, Applicant] = {}
        self._questions: dict[int, asyncio.Future[bool]] = {}
        self._asked = 0

    async def admit(self, ticket: Hashable, applicant: Applicant) -> None:
        """Let a node in; ``ticket`` is what :meth:`leave` gets when it is over, also after a refusal.

        Raises:
            StartRefused: a limit is in the way, or the person here said no.
        """
        if self.closed:
            raise StartRefused(self.closed)
        allowed = self.limits.max_nodes
        if allowed is not None and len(self._admitted) >= allowed:
            raise StartRefused(
                f"{self._peer} allows {_nodes(allowed)} at a time and has {_nodes(len(self._admitted))}: remove one "
                "there, or ask its owner for a higher --max-nodes"
            )
        self._check_owners(applicant)
        self._admitted[ticket] = applicant
        memory, used = self.limits.memory_bytes, self.used_memory
        if memory is not None and used >= memory:
            raise StartRefused(
                f"nodes on {self._peer} use {amount(used)}, its owner allows {amount(memory)}: remove one "
                "there, or ask its owner for a higher --memory"
            )
        if self.limits.idle_only or self.limits.on_power is not None:
            await asyncio.to_thread(self._presence.poll)
            if (reason := self.objection()) is not None:
                raise StartRefused(reason)
        if self.limits.confirm:
            await self._ask(applicant)

    def leave(self, ticket: Hashable) -> None:
        """The node is over."""
        self._admitted.pop(ticket, None)

    def _check_owners(self, applicant: Applicant) -> None:
        """StartRefused when as many others as this machine's owner allows have nodes here."""
        others: dict[str, tuple[str, dict[str, None]]] = {}
        for there in self._admitted.values():
            if there.owner_id != applicant.owner_id:
                others.setdefault(there.owner_id, (there.owner, {}))[1][there.cluster] = None
        allowed = self.limits.owners
        if len(others) < allowed:
            return
        who = " and ".join(f"{owner} (cluster {', '.join(clusters)})" for owner, clusters in others.values())
        number = "one owner" if allowed == 1 else f"{allowed} owners"
        raise StartRefused(
            f"{self._peer} is used by {who} and is shared with {number} at a time: add it when nodes are removed "
            f"there, or ask its owner to share with --owners {allowed + 1}"
        )

    def objection(self) -> str | None:
        """Why no kernel may run here now, or None."""
        limits, battery, idle = self.limits, self._presence.battery, self._presence.idle
        if limits.idle_only and idle < IDLE_AFTER_S:
            return (
                f"{self._peer} is shared only while nobody uses it, and somebody did {idle:.0f} s ago: start the node "
                f"again after {IDLE_AFTER_S:.0f} s without anybody, or ask its owner to share without --idle-only"
            )
        if limits.on_power is not None and battery and not battery.plugged and battery.percent < limits.on_power:
            return (
                f"{self._peer} is on battery at {battery.percent:.0f} %, below the {limits.on_power:g} % that its "
                "owner set: plug it in"
            )
        return None

    def permits(self, device: Device) -> bool:
        """Whether nodes may use ``device``."""
        allowed = self.limits.devices
        return not allowed or device.id in allowed or device.kind in allowed

    def limited(self, device: Device) -> Device:
        """``device`` with the memory that nodes may use of it."""
        allowed = self.limits.memory_bytes
        if allowed is None or allowed >= device.memory_bytes or not (device.kind == "cpu" or device.unified):
            return device
        return msgspec.structs.replace(device, memory_bytes=allowed)

    def answer(self, ticket: int, allowed: bool) -> bool:
        """What the person here said to the question ``ticket``; False when nobody waits for it any more."""
        question = self._questions.get(ticket)
        if question is None or question.done():
            return False
        question.set_result(allowed)
        return True

    async def _ask(self, applicant: Applicant) -> None:
        """Wait for the person here; StartRefused unless it is a yes."""
        self._asked += 1
        ticket = self._asked
        question = self._questions[ticket] = asyncio.get_running_loop().create_future()
        who = f"{applicant.owner} wants to start node {applicant.node} of cluster {applicant.cluster} here"
        self._tell(self._event("confirm", f"{who}: allow it?", applicant, ticket))
        gone = asyncio.ensure_future(applicant.gone.wait())
        try:
            await asyncio.wait([question, gone], timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            del self._questions[ticket]
        if question.done():
            if not question.result():
                raise StartRefused(f"the person at {self._peer} did not allow it: ask them, then start the node again")
            return
        if applicant.gone.is_set():
            reason = f"it is not wanted any more, before the person at {self._peer} answered"
        else:
            reason = (
                f"nobody at {self._peer} answered within {ANSWER_S:.0f} s: ask its owner, then start the node again"
            )
        self._tell(self._event("confirm-over", f"node {applicant.node}: {reason}", applicant, ticket))
        raise StartRefused(reason)

    @staticmethod
    def _event(kind: EventKind, text: str, applicant: Applicant, ticket: int) -> SharingEvent:
        return SharingEvent(
            kind, text, owner=applicant.owner, cluster=applicant.cluster, node=applicant.node, ticket=ticket
        )


def _nodes(count: int) -> str:
    return f"{count} {'node' if count == 1 else 'nodes'}"
