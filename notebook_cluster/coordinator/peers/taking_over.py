"""Going on from what a cluster of this name, whose coordinator is gone, has left on the machines of its owner."""

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from notebook_cluster.coordinator.core import LOCAL, Core
from notebook_cluster.coordinator.delivery import PeerLink
from notebook_cluster.coordinator.nodes.membership import Membership
from notebook_cluster.coordinator.peers.kept_choice import ChosenState, choose, newest, possible
from notebook_cluster.coordinator.peers.links import PeerLinks
from notebook_cluster.coordinator.peers.provisioning import ALL, OwnMachinesAgent
from notebook_cluster.coordinator.peers.resolving import PeerResolver
from notebook_cluster.journal import events as e
from notebook_cluster.peering.candidates import Candidate
from notebook_cluster.peering.peer_finder import PeerFinder
from notebook_cluster.protocol.clock import clock, duration
from notebook_cluster.protocol.kept import (
    MOST_LINES,
    MOST_TEXT,
    QUIET,
    AskKept,
    FindKept,
    FoundKept,
    KeptAnswer,
    KeptState,
    TakenJob,
    TakenState,
)
from notebook_cluster.protocol.views import RequestError

ANSWER = 5.0
"""Seconds for a peer to be reached, and then to say whether the coordinator before is heard there."""
KEEPING = 90.0
"""Seconds for an agent to have the training kept, to end the nodes and to read what is kept, while it is there."""
AGAIN = 0.5
BEFORE = "local-before"
"""Name here of the agent that the coordinator before had on this machine."""


@dataclass
class _Looked:
    """What became of asking: whom, and lines for people."""

    asked: dict[str, PeerLink]
    lines: list[str]


class StateTakeOver:
    """First :meth:`find`, then nodes are added, then :meth:`take`."""

    def __init__(
        self,
        core: Core,
        *,
        links: PeerLinks,
        resolver: PeerResolver,
        finding: PeerFinder,
        own_agent: OwnMachinesAgent,
        membership: Membership,
    ) -> None:
        self._core = core
        self._links = links
        self._resolver = resolver
        self._finding = finding
        self._own_agent = own_agent
        self._membership = membership
        self._tickets = itertools.count(1)
        self._waiting: dict[tuple[str, int], asyncio.Future[KeptAnswer]] = {}
        self._kept: dict[str, list[KeptState]] = {}
        """By peer, what it said last."""

    def on_answer(self, peer: str, answer: KeptAnswer) -> None:
        """The agent of ``peer`` says what is kept there."""
        waiting = self._waiting.get((peer, answer.ticket))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    # ---- what is there

    async def find(self, request: FindKept) -> FoundKept:
        """Have every peer that answers keep and end what the cluster before has there, and say what is kept.

        Raises:
            RequestError: that cluster still runs, no machine could have a node, or nothing is kept, so that no node has
                been ended; one line with the way out.
        """
        self._kept = {}
        looked = _Looked({}, [])
        await self._reach_own(request, looked)
        await self._reach(request.peers, looked)
        await self._see_that_it_is_gone(looked)
        if LOCAL not in request.peers and not looked.asked.keys() - {LOCAL, BEFORE}:
            raise RequestError(self._nobody(looked))
        left = await self._end([BEFORE], looked)
        left += await self._end(looked.asked.keys() - {BEFORE}, looked)
        if not any(self._kept.values()):
            raise RequestError(self._nothing(looked))
        await self._end(left, looked)
        if looked.asked.pop(BEFORE, None) is not None:
            self._links.forget(BEFORE, "its cluster was taken over")
        peers = [name for name in looked.asked if name != LOCAL]
        return FoundKept(peers=peers, lines=looked.lines, states=sum(map(len, self._kept.values())))

    def _nothing(self, looked: _Looked) -> str:
        asked = [name for name in looked.asked if name != BEFORE]
        more = "".join(f"; {line}" for line in looked.lines)
        return (
            f"nothing is kept of a cluster {self._core.state.cluster!r}: asked {', '.join(asked)}{more}. Check "
            "the name, and share the machines that trained it: each keeps its part when its coordinator is gone for "
            "20 s"
        )

    def _nobody(self, looked: _Looked) -> str:
        more = "".join(f"; {line}" for line in looked.lines)
        return (
            f"no machine could go on with cluster {self._core.state.cluster!r}: this one shall have no node, and no "
            f"peer answered{more}. Use --local 1, or --peers with some that are shared"
        )

    async def _reach_own(self, request: FindKept, looked: _Looked) -> None:
        await self._own_agent.wait()
        looked.asked[LOCAL] = await self._links.ready(LOCAL)
        if request.own is not None:
            address, key = request.own
            self._links.connect(BEFORE, key, address, "local")
            await self._wait_for(BEFORE, BEFORE, looked, quietly=True)

    async def _reach(self, wanted: list[str], looked: _Looked) -> None:
        """Dial those of ``wanted`` that may be used, and wait for them for a moment."""
        found: dict[str, Candidate] = {}
        if ALL in wanted:
            await self._finding.present()
            candidates = self._finding.candidates()
            found = {row.key: row for row in candidates if self._resolver.usable(row)}
            looked.lines += [f"{row.name}: {row.reason}" for row in self._finding.silent_views()]
        for text in dict.fromkeys([*wanted, *(self._finding.typed_names if ALL in wanted else ())]):
            if text not in (ALL, LOCAL):
                try:
                    row, _ = await self._finding.resolve(text)
                    found[row.key] = row
                except RequestError as error:
                    looked.lines.append(str(error))
        await asyncio.gather(*(self._reach_one(candidate, looked) for candidate in found.values()))

    async def _reach_one(self, candidate: Candidate, looked: _Looked) -> None:
        try:
            name = await self._resolver.admit(candidate)
        except RequestError as error:
            looked.lines.append(f"{error}: it goes on without it")
        else:
            await self._wait_for(name, candidate.name, looked)

    async def _wait_for(self, name: str, called: str, looked: _Looked, *, quietly: bool = False) -> None:
        try:
            looked.asked[name] = await asyncio.wait_for(self._links.ready(name), ANSWER)
        except (RequestError, TimeoutError) as error:
            why = str(error) or f"{called} did not answer within {ANSWER:g} s"
            if not quietly:
                looked.lines.append(f"{why}: it goes on without it")
            if self._links.has(name):
                self._links.forget(name, why)

    # ---- asking

    async def _ask(self, name: str, link: PeerLink, *, end: bool, patience: float) -> KeptAnswer | None:
        """What the agent says; None: it did not in time, or is gone."""
        ticket = next(self._tickets)
        answer: asyncio.Future[KeptAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[name, ticket] = answer
        directory = self._core.state.directory if name == LOCAL else ""
        link.dialer.send(AskKept(ticket=ticket, end=end, directory=directory))
        deadline = asyncio.get_running_loop().time() + patience
        try:
            while asyncio.get_running_loop().time() < deadline and link.is_open:
                done, _ = await asyncio.wait([answer], timeout=0.2)
                if done:
                    return answer.result()
            return None
        finally:
            del self._waiting[name, ticket]

    async def _see_that_it_is_gone(self, looked: _Looked) -> None:
        """Return once no agent has heard the coordinator before for a while. RequestError: one hears it."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            asked_at, names = loop.time(), list(looked.asked)
            answers = await asyncio.gather(
                *(self._ask(name, looked.asked[name], end=False, patience=ANSWER) for name in names)
            )
            quiet = True
            for name, answer in zip(names, answers, strict=True):
                if answer is None:
                    self._leave_out(name, f"{name} did not answer within {ANSWER:g} s", looked)
                elif answer.silent is not None:
                    if asked_at - answer.silent > began:
                        raise RequestError(self._still_runs(name, answer.silent))
                    quiet = quiet and answer.silent >= QUIET
            if quiet:
                return
            await asyncio.sleep(AGAIN)

    def _still_runs(self, peer: str, silent: float) -> str:
        cluster = self._core.state.cluster
        return (
            f"cluster {cluster!r} still runs: {peer} heard its coordinator {duration(max(silent, 0.0))} ago. On the "
            f"machine where it was started, %cluster attach {cluster} goes on with it, %cluster stop {cluster} ends it"
        )

    async def _end(self, names: Iterable[str], looked: _Looked) -> list[str]:
        """Returns those that have left nodes as they are, for nothing is kept there."""
        asked = [name for name in names if name in looked.asked]
        left = await asyncio.gather(*(self._end_one(name, looked) for name in asked))
        return [name for name, has_left in zip(asked, left, strict=True) if has_left]

    async def _end_one(self, name: str, looked: _Looked) -> bool:
        answer = await self._ask(name, looked.asked[name], end=True, patience=KEEPING)
        if answer is None:
            self._leave_out(name, f"{name} did not say what it keeps within {KEEPING:g} s", looked)
            return False
        shown = "this machine" if name in (LOCAL, BEFORE) else name
        if answer.silent is not None and answer.silent >= QUIET:
            if not answer.damaged:
                return True
            looked.lines.append(f"{shown}: nodes of the cluster before stay there, for they kept no checkpoint")
        elif answer.silent is not None:
            looked.lines.append(f"{shown} hears the coordinator before again: its nodes there stay")
        elif answer.nodes > 0:
            nodes = "1 node" if answer.nodes == 1 else f"{answer.nodes} nodes"
            looked.lines.append(f"{shown}: ended {nodes} of the cluster before, after a checkpoint")
        looked.lines += [f"{shown}: {_plain(line)}: left out" for line in answer.damaged[:MOST_LINES]]
        self._kept[name] = possible(answer.states)
        return False

    def _leave_out(self, name: str, why: str, looked: _Looked) -> None:
        if name != BEFORE:
            looked.lines.append(f"{why}: it goes on without it")
        del looked.asked[name]
        if name != LOCAL and self._links.has(name):
            self._links.forget(name, why)

    # ---- taking

    def take(self) -> list[TakenJob]:
        """Have the nodes that are there go on from the newest states that lie on their machines.

        Raises:
            RequestError: none of these machines has one.
        """
        peers = {node.peer for node in self._core.state.roster_nodes()}
        chosen = choose(self._kept, peers)
        if not chosen:
            kept = "; ".join(f"{peer} has kept {_described(state)}" for peer, state in newest(self._kept))
            raise RequestError(
                f"no machine with a node has the newest state: {kept or 'nothing is kept'}. Add one there"
            )
        states = [choice.state for choice in chosen]
        self._core.record(
            e.StatesTaken(
                states=[TakenState(job=s.job, name=s.name, round=s.round, state_hash=s.state_hash) for s in states]
            )
        )
        self._membership.announce()
        for choice in chosen:
            self._core.tell("info", f"took over {_described(choice.state)}, kept by {', '.join(choice.peers)}")
        return [_taken(choice) for choice in chosen]


def _taken(choice: ChosenState) -> TakenJob:
    state, line = choice.state, ""
    if choice.newer is not None:
        line = f"{choice.newer[0]} has kept {_described(choice.newer[1])}, but no node is there now"
    return TakenJob(
        job=state.job, name=state.name, round=state.round, time=state.time, bytes=state.bytes, peers=choice.peers,
        line=line,
    )  # fmt: skip


def _described(state: KeptState) -> str:
    return f"training {state.job!r} after round {state.round} ({clock(state.time)})"


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text[:MOST_TEXT])
