"""The pure channel: exactly once, in order, bounded, over a network that loses, doubles, swaps and breaks."""

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_cluster.link import channel as channel_module
from notebook_cluster.link.channel import Channel, Segment
from notebook_cluster.protocol import ProtocolError

LIMITS = {"outbox_bytes": 1000, "message_bytes": 1 << 22}


def deliver(channel: Channel, items: list[Segment]) -> list[list[bytes]]:
    """Give ``items`` to ``channel`` and process what becomes complete."""
    messages = []
    for item in items:
        for sequence, frames in channel.inbox.accept(item):
            messages.append(frames)
            channel.inbox.processed(sequence)
    return messages


def test_messages_arrive_as_they_were_sent() -> None:
    sender, receiver = Channel(**LIMITS), Channel(**LIMITS)
    assert deliver(receiver, sender.send([b"a", b"", b"c"])) == [[b"a", b"", b"c"]]
    assert receiver.inbox.received == 1


@pytest.mark.parametrize(
    ("message", "frames"),
    [([b"struct", b"", b"buffer" * 100], 1), ([b""] * 3, 1), ([b"struct", b"buffer"], 2), ([bytes(8000)] * 3, 3)],
)
def test_small_buffers_travel_in_one_frame_and_arrive_as_they_were(message: list[bytes], frames: int) -> None:
    sender, receiver = Channel(**LIMITS), Channel(**LIMITS)
    (item,) = sender.send(message)
    assert len(item.frames) == frames
    assert deliver(receiver, [item]) == [message]
    assert receiver.inbox.malformed == 0


def test_a_large_message_travels_in_pieces_and_arrives_whole() -> None:
    sender, receiver = Channel(**LIMITS), Channel(**LIMITS)
    message = [b"header", bytes(range(256)) * 4000, b"", b"tail" * 100_000]
    items = sender.send(message)
    assert len(items) > 4
    assert max(item.size for item in items) <= channel_module.PIECE_BYTES
    assert deliver(receiver, items[:-1]) == []
    assert receiver.inbox.received == 0
    assert deliver(receiver, items[-1:]) == [message]
    assert receiver.inbox.received == sender.outbox.last


def test_a_message_over_the_limit_is_refused_by_the_sender() -> None:
    with pytest.raises(ValueError, match=r"5\.0 MB in 1 parts is over the link's limit of 4 MB"):
        Channel(**LIMITS).send([bytes(5_000_000)])


def test_a_gap_is_asked_for_once_in_a_while() -> None:
    sender, receiver = Channel(**LIMITS), Channel(**LIMITS)
    items = [sender.send([bytes([number])])[0] for number in range(5)]
    assert deliver(receiver, [items[0], items[3]]) == [[b"\x00"]]
    assert receiver.inbox.gap(10.0) == (2, 3)
    assert receiver.inbox.gap(10.1) is None
    assert receiver.inbox.gap(10.3) == (2, 3)
    assert deliver(receiver, sender.outbox.between(2, 3)) == [[b"\x01"], [b"\x02"], [b"\x03"]]
    assert receiver.inbox.gap(11.0) is None
    receiver.inbox.announce(5)
    assert receiver.inbox.gap(11.0) == (5, 5)


def test_duplicates_are_counted_and_ignored() -> None:
    sender, receiver = Channel(**LIMITS), Channel(**LIMITS)
    items = sender.send([b"once"])
    assert deliver(receiver, items + items) == [[b"once"]]
    assert receiver.inbox.duplicates == 1


def test_what_is_processed_while_holding_is_acknowledged_later() -> None:
    sender, receiver = Channel(**LIMITS), Channel(**LIMITS)
    deliver(receiver, sender.send([b"a"]))
    receiver.inbox.hold(True)
    deliver(receiver, [*sender.send([b"b"]), *sender.send([b"c"])])
    assert (receiver.inbox.received, receiver.inbox.held) == (1, 3)
    sender.acknowledge(receiver.inbox.received)
    assert len(sender.outbox) == 2
    receiver.inbox.hold(False)
    assert receiver.inbox.received == 3


def test_an_acknowledgement_of_what_was_never_sent_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="message 1 is acknowledged but only 0 were sent"):
        Channel(**LIMITS).acknowledge(1)


def test_a_full_outbox_leaves_out_only_what_is_droppable() -> None:
    sender = Channel(**LIMITS)
    assert sender.send([bytes(900)], droppable=True)
    assert sender.send([bytes(200)], droppable=True) == []
    assert sender.send([bytes(10)], droppable=True) == []
    assert sender.send([bytes(5000)])
    assert sender.dropped == 2


def test_the_marker_comes_before_the_next_message_that_is_taken() -> None:
    sender, receiver = Channel(**LIMITS), Channel(**LIMITS)
    wire: list[Segment] = []
    sender.on_shortened = lambda count: wire.extend(sender.send([b"%d left out" % count]))
    wire += sender.send([bytes(900)], droppable=True)
    for _ in range(3):
        wire += sender.send([bytes(200)], droppable=True)
    reply = sender.send([b"reply"])
    assert [message[0] for message in deliver(receiver, wire + reply)][1:] == [b"3 left out", b"reply"]


def test_the_marker_comes_when_half_of_the_outbox_is_free_again() -> None:
    sender = Channel(**LIMITS)
    counts: list[int] = []
    sender.on_shortened = counts.append
    for _ in range(10):
        sender.send([bytes(200)], droppable=True)
    sender.acknowledge(2)
    assert counts == []
    sender.acknowledge(3)
    assert counts == [5]
    assert sender.send([bytes(200)], droppable=True)


def test_what_arrives_too_early_is_bounded() -> None:
    receiver = Channel(**LIMITS)
    for sequence in range(2, 5000):
        receiver.inbox.accept(Segment(sequence, (b"x",)))
    assert len(receiver.inbox._ahead) == channel_module._MAX_AHEAD


@pytest.mark.parametrize(
    "items",
    [
        [Segment(1, (b"abc",), sizes=(1 << 40,), pieces_left=1, piece=True)],
        [Segment(1, (b"abc",), sizes=(2,), pieces_left=0, piece=True)],
        [Segment(1, (b"abc",), sizes=(4,), pieces_left=0, piece=True)],
        [Segment(1, (b"abc",), sizes=(-3, 6), pieces_left=0, piece=True)],
        [Segment(1, (b"abc",), pieces_left=0, piece=True)],
        [Segment(1, (b"abc", b"d"), sizes=(3,), pieces_left=0, piece=True)],
    ],
)
def test_pieces_that_do_not_fit_are_dropped_and_counted(items: list[Segment]) -> None:
    receiver = Channel(**LIMITS)
    assert deliver(receiver, items) == []
    assert receiver.inbox.malformed == 1
    assert deliver(receiver, [Segment(2, (b"next",))]) == [[b"next"]]


class Network:
    """Two channels and a network between them that misbehaves as ``random`` decides."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ends = [Channel(outbox_bytes=1 << 30, message_bytes=1 << 22) for _ in range(2)]
        self.sent: list[list[list[bytes]]] = [[], []]
        self.arrived: list[list[list[bytes]]] = [[], []]
        self.wire: list[tuple[int, Segment]] = []
        self.now = 0.0

    def step(self) -> None:
        end = self.random.randrange(2)
        match self.random.choices(["send", "carry", "acknowledge", "ask", "reconnect"], [4, 8, 2, 2, 0.3])[0]:
            case "send":
                length = self.random.choice([0, 3, 3, 3, 300_000])
                message = [b"%d" % len(self.sent[end]), bytes(length)]
                self.sent[end].append(message)
                self.wire += [(1 - end, item) for item in self.ends[end].send(message)]
            case "carry":
                self.carry()
            case "acknowledge":
                self.ends[1 - end].acknowledge(self.ends[end].inbox.received)
            case "ask":
                self.now += 0.3
                self.ends[end].inbox.announce(self.ends[1 - end].outbox.last)
                gap = self.ends[end].inbox.gap(self.now)
                if gap is not None:
                    self.wire += [(end, item) for item in self.ends[1 - end].outbox.between(*gap)]
            case "reconnect":
                self.reconnect()

    def carry(self) -> None:
        if self.wire:
            index = self.random.randrange(min(len(self.wire), 5))
            to, item = self.wire[index]
            fate = self.random.random()
            if fate > 0.1:
                del self.wire[index]
            if fate < 0.8:
                self.arrived[to] += deliver(self.ends[to], [item])

    def reconnect(self) -> None:
        self.wire.clear()
        for end in range(2):
            other = self.ends[1 - end]
            other.acknowledge(self.ends[end].inbox.received)
            self.wire += [
                (end, item) for item in other.outbox.between(self.ends[end].inbox.held + 1, other.outbox.last)
            ]

    def settle(self) -> None:
        """No more loss: everything arrives after one reconnect."""
        self.reconnect()
        queue = deque(self.wire)
        while queue:
            to, item = queue.popleft()
            self.arrived[to] += deliver(self.ends[to], [item])


@settings(max_examples=150, deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_everything_arrives_once_and_in_order(seed: int) -> None:
    network = Network(seed)
    for _ in range(200):
        network.step()
        for end in range(2):
            assert network.arrived[1 - end] == network.sent[end][: len(network.arrived[1 - end])]
    network.settle()
    assert network.arrived[1] == network.sent[0]
    assert network.arrived[0] == network.sent[1]
    for end in range(2):
        network.ends[end].acknowledge(network.ends[1 - end].inbox.received)
        assert len(network.ends[end].outbox) == 0
        assert network.ends[end].outbox.size == 0
