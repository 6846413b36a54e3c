"""The limits of a link without sockets: headers, numbers, ranges, echoes, and the log of what is dropped."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_cluster.link import channel as channel_module
from notebook_cluster.link.channel import Channel, Segment
from notebook_cluster.link.conversation import RoundTrip
from notebook_cluster.link.frames import (
    MAX_FRAMES,
    AnyHeader,
    Drops,
)
from notebook_cluster.protocol import ProtocolError, decode

HUGE = (1 << 62) - 1
numbers = st.sampled_from([0, 1, 2, 3, 5, 64, 1 << 20, 1 << 40, HUGE, 1 << 62]) | st.integers(0, 8)
any_numbers = numbers | st.sampled_from([-1, -(1 << 62), (1 << 62) + 1, (1 << 64) - 1])

items = st.builds(
    Segment,
    any_numbers,
    st.lists(st.sampled_from([b"", b"x", bytes(100), bytes(2000)]), min_size=1, max_size=4).map(tuple),
    st.lists(numbers, max_size=4).map(tuple),
    numbers,
    st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(items, max_size=60))
def test_no_item_breaks_the_inbox_or_makes_it_grow(arrivals: list[Segment]) -> None:
    channel = Channel(outbox_bytes=1000, message_bytes=10_000)
    for item in arrivals:
        for sequence, frames in channel.inbox.accept(item):
            channel.inbox.processed(sequence)
            assert sum(map(len, frames)) <= 10_000
        assert len(channel.inbox._parts) <= 10_000
        assert channel.inbox._ahead_bytes == sum(held.cost for held in channel.inbox._ahead.values())
    channel.inbox.gap(0.0)


@settings(max_examples=100, deadline=None)
@given(any_numbers, any_numbers, any_numbers)
def test_any_range_may_be_asked_for_and_any_number_acknowledged(first: int, last: int, ack: int) -> None:
    channel = Channel(outbox_bytes=1000, message_bytes=10_000)
    sent = [channel.send([b"%d" % number])[0] for number in range(5)]
    assert channel.outbox.between(first, last) == [item for item in sent if first <= item.sequence <= last]
    try:
        channel.acknowledge(ack)
    except ProtocolError:
        assert ack > 5


def test_many_empty_frames_that_came_too_early_are_bounded_by_what_they_cost() -> None:
    channel = Channel(outbox_bytes=1000, message_bytes=10_000)
    for sequence in range(2, 1000):
        channel.inbox.accept(Segment(sequence, (b"",) * MAX_FRAMES))
    assert len(channel.inbox._ahead) < 70
    assert channel.inbox._ahead_bytes <= channel_module._MAX_AHEAD_BYTES


@pytest.mark.parametrize(
    "header",
    [
        ("data", "c", 1, 1, -1, 0),
        ("data", "c", 1, 1, 1, 0, [-5, 5], 0, True),
        ("data", "c", 1, 1, 1, 0, [1 << 63], 0, True),
        ("data", "c", 1, 1, 1, 0, [1] * (MAX_FRAMES + 1), 0, True),
        ("resend", "c", 1, 1, 1, 1 << 63),
        ("ack", "c" * 2000, 1, 1, 1),
        ("nonsense", "c", 1, 1, 1),
        ("ack", "c", 1),
    ],
)
def test_a_header_out_of_bounds_is_never_made(header: tuple[object, ...]) -> None:
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(header), AnyHeader)


@pytest.mark.parametrize(
    "data", [b"\x94\xa3ack\xa1\xff\x01\x01", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91" * 9999]
)
def test_text_that_is_none_and_lengths_that_lie_are_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data, AnyHeader)


def test_the_log_of_what_is_dropped_does_not_grow_with_it(caplog: pytest.LogCaptureFixture) -> None:
    drops = Drops()
    for number in range(1000):
        drops.note("garbage", "dropped %d", number)
    assert drops == {"garbage": 1000}
    assert len(caplog.records) == 10
    assert caplog.messages[-1] == "dropped 511 (512 of this kind so far)"


def test_round_trip_and_jitter_are_smoothed_as_in_rfc_6298() -> None:
    times = RoundTrip()
    assert (times.mean, times.deviation) == (None, None)
    times.measured(0.1)
    assert (times.mean, times.deviation) == (0.1, 0.05)
    times.measured(0.2)
    assert times.deviation == pytest.approx(0.75 * 0.05 + 0.25 * 0.1)
    assert times.mean == pytest.approx(0.875 * 0.1 + 0.125 * 0.2)


@pytest.mark.parametrize("echo", [0.0, -5.0, 9.0, math.nan, math.inf])
def test_an_echo_of_a_time_that_was_not_sent_is_no_measurement(echo: float) -> None:
    times = RoundTrip()
    times.sent(10.0)
    times.returned(echo, 11.0)
    assert times.mean is None
    times.returned(10.0, 11.0)
    times.returned(10.0, 99.0)
    assert times.mean == 1.0
