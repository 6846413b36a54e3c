"""What is missing of an exchange, and asking for it again without having it sent twice. Same habits as
:mod:`.exchange`.

On a slow link nothing may come for seconds though everything is on its way: in the queues of the sender, where nobody
sees it. Frames from one node to another keep their order, so a WANT for what was handed to the mesh already is answered
with SENT, a frame without payload that comes after it: what has not come by then is lost (a connection broke), and only
a second WANT, with the ticket of that SENT, makes the sender send it again.
"""

from notebook_cluster.memory import first_gap
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.rounds import Stalled
from notebook_cluster.rounds.member.chunks import hear, my_bytes, send_slice
from notebook_cluster.rounds.member.events_effects import Buffer, Effect, Frame, SendChunk
from notebook_cluster.rounds.member.state import Exchange, MemberState

# ---- asking --------------------------------------------------------------------------------------------------


def request_missing(state: MemberState, effects: list[Effect]) -> None:
    """Ask for everything that is missing: contributions from their senders, means from the owner, and where that is
    silent (or COMPLETE named others) from any member that may be PREPARED, one after the other. The exchange is a copy
    already."""
    exchange = state.exchange
    assert exchange is not None
    others = exchange.sources or tuple(name for name in exchange.senders if name != state.node)
    if others and _is_silent(state, exchange, others[exchange.turn % len(others)]):
        exchange.turn += 1
    for index, name, kind in missing(state, exchange):
        elsewhere = exchange.sources or name == state.node or _is_silent(state, exchange, name)
        node = others[exchange.turn % len(others)] if kind == "mean" and others and elsewhere else name
        _ask(state, exchange, index, node, name, kind, effects)
    exchange.wanted = state.now


def _is_silent(state: MemberState, exchange: Exchange, node: str) -> bool:
    """Nothing has come from ``node`` since it was asked, which is a while ago."""
    asked = exchange.asked.get(node)
    if asked is None or exchange.heard.get(node, asked - 1) >= asked:
        return False
    return state.now - asked >= state.settings.stalled_after


def _ask(
    state: MemberState, exchange: Exchange, index: int, node: str, name: str, kind: str, effects: list[Effect]
) -> None:
    """WANT to ``node``: one slice, of the contribution of ``name`` or of the mean, from the first gap on."""
    asked = exchange.asked.get(node)
    if asked is None or exchange.heard.get(node, asked - 1) >= asked:
        exchange.asked = {**exchange.asked, node: state.now}
    assembly = exchange.partial.get((index, kind, name if kind == "contribution" else ""))
    header = JobFrame(
        job=state.job,
        incarnation=state.incarnation,
        kind="want",
        name=kind,
        round=exchange.seal.round,
        attempt=exchange.seal.attempt,
        slice=index,
        offset=first_gap(assembly.received) if assembly else 0,
        ticket=exchange.passed.get((node, kind, index), 0),
    )
    effects.append(SendChunk(node, header))


def on_sent(state: MemberState, frame: Frame, effects: list[Effect]) -> None:
    """Answer to a WANT: all that ``frame.sender`` ever sent of this slice has come or is lost. Ask for what is lost."""
    header, exchange = frame.header, state.exchange
    if exchange is None or (header.round, header.attempt) != (exchange.seal.round, exchange.seal.attempt):
        return
    incarnation, _ = exchange.senders.get(frame.sender, (-1, 0.0))
    known = header.name in ("contribution", "mean") and 0 <= header.slice < len(exchange.seal.slices)
    if incarnation != header.incarnation or not known:
        state.dropped += 1
        return
    exchange = state.exchange = hear(state, exchange, frame.sender)
    key = (frame.sender, header.name, header.slice)
    if header.ticket <= exchange.passed.get(key, 0):
        return
    exchange.passed = {**exchange.passed, key: header.ticket}
    for index, name, kind in missing(state, exchange):
        if (index, kind) == (header.slice, header.name) and (kind == "mean" or name == frame.sender):
            _ask(state, exchange, index, frame.sender, name, kind, effects)


# ---- what is missing -----------------------------------------------------------------------------------------


def missing(state: MemberState, exchange: Exchange) -> list[tuple[int, str, str]]:
    """(slice, node that should send it, ``contribution`` or ``mean``) of everything that has not come."""
    missing = []
    for index, piece in enumerate(exchange.seal.slices):
        if index in exchange.means:
            continue
        if piece.owner != state.node or exchange.sources:
            missing.append((index, piece.owner, "mean"))
        if piece.owner == state.node:
            for name, (_, weight) in exchange.senders.items():
                if weight > 0 and (index, name) not in exchange.contributions:
                    missing.append((index, name, "contribution"))
    return missing


def stalled(state: MemberState, exchange: Exchange) -> Stalled:
    """Whom this node waits for, for the coordinator."""
    waiting_for = {name for _, name, _ in missing(state, exchange) if name != state.node}
    return Stalled(
        job=state.job,
        round=exchange.seal.round,
        attempt=exchange.seal.attempt,
        waiting_for=sorted(waiting_for),
        not_finite=list(exchange.broken),
        fragment=exchange.seal.fragment,
    )


# ---- answering -----------------------------------------------------------------------------------------------


def on_want(state: MemberState, frame: Frame, effects: list[Effect]) -> None:
    """Answer a WANT from its offset on, with SENT when all of that is on its way, and when this node is still to make
    it; what this node has not is not answered."""
    header = frame.header
    data = _served(state, frame)
    if header.offset < 0 or header.ticket < 0 or (data is None and not _will_make(state, header)):
        state.dropped += 1
        return
    if header.name == "mean" and header.round - 1 > state.serving.get(frame.sender, header.round):
        state.serving = {**state.serving, frame.sender: header.round - 1}  # it has those of before
    key = (header.round, header.attempt)
    handed = state.handed.get((*key, frame.sender, header.name, header.slice), 0)
    if data is not None and handed <= header.ticket:
        send_slice(state, frame.sender, header.name, header.slice, data, effects, header.offset, key)
        return
    sent = JobFrame(
        job=state.job,
        incarnation=state.incarnation,
        kind="sent",
        name=header.name,
        round=header.round,
        attempt=header.attempt,
        slice=header.slice,
        ticket=handed,
    )
    effects.append(SendChunk(frame.sender, sent))


def _served(state: MemberState, frame: Frame) -> Buffer | None:
    """All bytes of what is wanted; None when this node has not got it."""
    header, exchange = frame.header, state.exchange
    key = (header.round, header.attempt)
    if exchange is not None and key == (exchange.seal.round, exchange.seal.attempt):
        slices = exchange.seal.slices
        if header.name == "mean":
            return exchange.means.get(header.slice)
        if (
            0 <= header.slice < len(slices)
            and exchange.senders.get(state.node, (0, 0.0))[1] > 0
            and state.contribution is not None
            and slices[header.slice].owner == frame.sender
        ):
            return my_bytes(state, header.slice)
    elif header.name == "mean":
        for kept in state.kept:
            if key == (kept.round, kept.attempt) and 0 <= header.slice < len(kept.slices):
                return kept.slices[header.slice]
    return None


def _will_make(state: MemberState, header: JobFrame) -> bool:
    """Whether ``header`` asks for a mean that this node owns, and still waits for contributions to."""
    exchange = state.exchange
    if exchange is None or header.name != "mean" or state.catching:
        return False
    seal = exchange.seal
    same = (header.round, header.attempt) == (seal.round, seal.attempt)
    return same and 0 <= header.slice < len(seal.slices) and seal.slices[header.slice].owner == state.node
