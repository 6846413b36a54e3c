"""The steps of a hand over between this machine and a head, as its owner's window takes them."""

import asyncio
import logging
import shutil
import time
from collections.abc import Iterable

import msgspec

from notebook_cluster.coordinator.core import LOCAL
from notebook_cluster.coordinator.startup import PrivateAgent
from notebook_cluster.coordinator.view_server import ViewServer
from notebook_cluster.journal.state import State
from notebook_cluster.peering.candidates import Candidate
from notebook_cluster.protocol import hand_over as o
from notebook_cluster.protocol import heads as h
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.state import ClusterView
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security import owner
from notebook_cluster.window.head_link import HeadRefuses
from notebook_cluster.window.journal_copy import bring_moved
from notebook_cluster.window.service import Window
from notebook_cluster.window.views import OWN_VIEW

log = logging.getLogger(__name__)

AGAIN_S = 2.0
"""Seconds between two tries to reach a head that may lead already."""
PATIENCE_S = 40.0
"""Seconds for a head to be reached that has the word already."""
ANSWER_S = 15.0
STAY_S = 1.5
"""Seconds between two words to a head that is frozen."""


def cannot_move(state: State) -> str:
    """Why a cluster with this state is not handed over from its owner's machine, or empty."""
    going = [launch for launch, row in state.launches.items() if row.ended is None]
    if going:
        return f"machines of {going[0]} were started by an engine, which a head does not ask: %cluster shrink first"
    peers = [peer for peer in state.peers.values() if not peer.dropped and peer.name != LOCAL]
    if came := [peer.name for peer in peers if peer.found_by == "dialled"]:
        return f"{came[0]} has joined by itself, and goes to this machine alone: %cluster remove its nodes first"
    return ""


def places_of(state: State) -> list[Candidate]:
    """The peers of the cluster, where they are dialled."""
    rows = []
    for peer in state.peers.values():
        host, _, port = peer.address.removeprefix("tcp://").rpartition(":")
        if not peer.dropped and peer.name != LOCAL:
            rows.append(Candidate(peer.name, peer.key, (host,), int(port), peer.found_by))  # type: ignore[arg-type]
    return rows


async def prepare(window: Window, peers: Iterable[Candidate], size: int) -> None:
    """The head of ``window`` can lead the cluster of ``peers``, all of which obey it from now on beside their owner.

    Raises:
        RequestError: it cannot; names who is in the way.
    """
    await window.finder.start()
    await window.head.dial(window.context, window.identity)
    for trouble in await admit(window, peers, size):
        raise trouble


async def admit(
    window: Window, peers: Iterable[Candidate], size: int, *, all_of_them: bool = True
) -> list[BaseException]:
    """:func:`prepare`, once the head is dialled. Returns why peers do not obey it. ``all_of_them`` False: some may be
    out of its reach. RequestError: it cannot lead."""
    head = window.head.link.candidate
    others = [peer for peer in peers if peer.key != head.key]
    places = [(peer.name, peer.address) for peer in others]
    ready, _ = await window.head.link.ask(
        lambda ticket: h.AskReady(ticket=ticket, cluster=window.settings.cluster, places=places, bytes=size),
        h.HeadReady,
    )
    if ready.error:
        raise RequestError(ready.error)
    if ready.unreachable and all_of_them:
        name, why = ready.unreachable[0]
        more = f", nor {len(ready.unreachable) - 1} others" if len(ready.unreachable) > 1 else ""
        raise RequestError(f"{head.name} cannot reach {name}{more} ({why}): the cluster is led from where it was")
    await window.owner.lead(ready.key)
    results = await asyncio.gather(*(window.owner.grant(peer) for peer in others), return_exceptions=True)
    return [result for result in results if isinstance(result, BaseException)]


async def begin(window: Window, token: str, before: ViewServer | None, agent: PrivateAgent | None) -> None:
    """The head begins, with the views of ``before``, which has left; ``agent``: of this machine.

    Raises:
        HeadRefuses: it has not begun, and does not.
        Unreached: it may lead already, or has led and ended: nobody may lead from here.
    """
    if agent is not None:
        window.owner.use_local(h.PeerKey(LOCAL, agent.public_key, owner()))
    state = await _begun(window, token)
    if not state.running:
        raise Unreached(
            f"cluster {window.settings.cluster!r} has gone to {window.settings.head}, and ended: {state.ended}"
        )
    window.head.state = state
    window.views.adopt(before)
    for view in list(window.views.views.values()):
        number = window.views.number_of(view)
        await _say(window, o.TakeView(view=view.kept()), number)
    await _say(window, o.GoOn(), OWN_VIEW)
    if agent is not None:
        await window.follow(agent, state.key, window.head.reception)


async def _begun(window: Window, token: str) -> h.HeadState:
    """How the head is, as soon as it says so."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await window.head.look(only_look=False, peers=window.owner.peers(), token=token, timeout=ANSWER_S)
        except HeadRefuses as error:
            if error.has_led:
                raise Unreached(str(error)) from None
            raise
        except RequestError as error:
            log.warning("%s", error)
            if time.monotonic() > deadline:
                name = window.settings.cluster
                raise Unreached(
                    f"{window.settings.head} cannot be reached in the middle of the hand over of cluster {name!r}: "
                    f"%cluster attach {name} when it can be, and it goes on there"
                ) from None
            await asyncio.sleep(AGAIN_S)


async def _say(window: Window, body: object, view: int) -> None:
    """A view that cannot be told of is told to attach again; the cluster begins by itself after a while."""
    try:
        await window.head.ask(body, view)
    except RequestError as error:
        log.warning("view %d: %s", view, error)
        if view != OWN_VIEW:
            window.views.close_one(view, f"{error}: %cluster attach {window.settings.cluster}")


class Unreached(RequestError):
    """Nobody here knows whether the head leads."""


class FrozenHead:
    """From its freezing to its last word; ends with :meth:`close`."""

    def __init__(self, window: Window, token: str) -> None:
        self._window = window
        self._token = token
        self._epoch = window.head.state.epoch
        self._staying: asyncio.Task[None] | None = None

    async def freeze(self) -> None:
        """The head does nothing more, and its views are known here.

        Raises:
            RequestError: it goes on as before, or begins again in a moment.
        """
        window = self._window
        state = msgspec.convert(await window.head.ask(v.GetState()), ClusterView)
        if away := window.owner.out_of_reach(peer.key for peer in state.peers if peer.condition == "connected"):
            raise RequestError(
                f"this machine cannot reach {' and '.join(away)}: the cluster is led from {window.settings.head}"
            )
        room = max(1, shutil.disk_usage(window.settings.runtime).free)  # 0 would not be looked at
        self._staying = asyncio.create_task(self._stay(room))
        await window.head.ask(o.Freeze(token=self._token, epoch=self._epoch, room=room))
        for view, number in window.views.known():
            view.take(await window.head.ask_view(number))

    async def _stay(self, room: int) -> None:
        while True:
            await asyncio.sleep(STAY_S)
            try:
                await self._window.head.ask(o.Freeze(token=self._token, epoch=self._epoch, room=room))
            except RequestError as error:
                log.warning("%s", error)

    async def bring(self) -> None:
        """What it has written is in the folder of this window's cluster. RequestError, OSError: it is not."""
        window = self._window
        await bring_moved(window.head.link, window.settings.cluster, window.settings.runtime)

    async def leave(self, to: str) -> None:
        """It leads no more; a head that cannot be reached is asked until it says how it is.

        Raises:
            RequestError: it was started again, and leads; or it is not known, and the window finds out.
        """
        window = self._window
        try:
            await window.head.ask(o.Leave(to=to, token=self._token))
            return
        except RequestError as error:
            log.warning("%s", error)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                state = await window.head.look(only_look=True, timeout=ANSWER_S)
            except RequestError as error:
                log.warning("%s", error)
            else:
                if state.left == self._token:
                    return
                if state.running and state.epoch != self._epoch:
                    raise RequestError(f"the head on {window.settings.head} was started again in the middle of it")
            await asyncio.sleep(AGAIN_S)
        raise RequestError(f"{window.settings.head} cannot be reached: the cluster comes here as soon as it can be")

    def close(self) -> None:
        """Nothing more is said to it: a head that stays frozen ends, and is started again."""
        if self._staying is not None:
            self._staying.cancel()
