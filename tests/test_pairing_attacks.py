"""What strangers may try at a pairing port, over real sockets, and that people can pair all the same."""

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from notebook_cluster import security
from notebook_cluster.pairing import PairingError
from notebook_cluster.pairing import host as pairing_host
from notebook_cluster.pairing import port as pairing_port
from notebook_cluster.protocol import PROTOCOL_VERSION, Message, decode, encode
from notebook_cluster.protocol.pairing import Accepted, Begin, Challenge, Denied, FromGuest, Here, Prove, Who
from notebook_cluster.security.codes import PAIRING_IDENTITY
from notebook_cluster.sockets import Pump
from tests.in_loop import in_loop, until
from tests.pairing_guests import CODE, WRONG, Host, RawGuest, hosting

# ---- guessing ------------------------------------------------------------------------------------------------


@in_loop
async def test_brute_force_at_full_speed_reaches_the_check_five_times(capsys: pytest.CaptureFixture[str]) -> None:
    async with hosting() as host:
        address = host.open()
        guests = [RawGuest(host.guests, address) for _ in range(6)]

        async def guess(guest: RawGuest, number: int) -> list[Denied]:
            return [await guest.attempt(f"tiger-lamp-{number * 100 + count}") for count in range(100, 150)]

        answers = await asyncio.gather(*(guess(guest, number) for number, guest in enumerate(guests)))
        for guest in guests:
            guest.close()
        checked = [answer for row in answers for answer in row if answer.tries_left is not None]
        assert sum(map(len, answers)) == 300
        assert host.host.checked == len(checked) == 5
        with capsys.disabled():
            print(f"\n300 codes tried from one address: {host.host.checked} reached the check")
        assert host.host.attempts["refused"] == 295
        # The flood is a few lines in the log, not 300.
        assert len(host.lines) < 20
        host.host.close()
        assert "more attempts refused" in host.lines[-1]
        assert host.paired == []


@in_loop
async def test_twenty_wrong_codes_from_many_addresses_end_the_code() -> None:
    async with hosting() as host:
        address = host.open()
        guests = [RawGuest(host.guests, address, f"127.0.0.{number}") for number in range(2, 6)]
        answers = [await guest.attempt(WRONG) for guest in guests for _ in range(5)]
        assert [answer.tries_left for answer in answers] == list(range(19, -1, -1))
        assert "the code is dead" in answers[-1].reason
        assert host.closed == ["20 wrong codes were tried"]
        for guest in guests:
            guest.close()
        with pytest.raises(PairingError, match="no code is open there"):
            await host.pair(address)
        assert host.host.checked == 20


@in_loop
async def test_attempts_that_run_at_the_same_time_count() -> None:
    async with hosting() as host:
        address = host.open()
        guests = [RawGuest(host.guests, address) for _ in range(12)]
        answers = []
        for guest in guests:
            answers.append(await guest.ask(guest.begin(WRONG, host.here)[1]))
        assert [type(answer) for answer in answers] == [Challenge] * 5 + [Denied] * 7
        assert host.host.checked == 5
        for guest in guests:
            guest.close()


@in_loop
async def test_an_attempt_without_an_end_is_wrong_and_its_proof_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing_host, "ATTEMPT_SECONDS", 0.2)
    async with hosting() as host:
        guest = RawGuest(host.guests, host.open())
        exchange, begin = guest.begin(CODE, host.here)
        challenge = await guest.ask(begin)
        await until(lambda: host.host.attempts["wrong"], "end of the attempt")
        answer = await guest.ask(guest.prove(exchange, challenge, host.here, begin))
        assert isinstance(answer, Denied)
        assert "this attempt is over" in answer.reason
        assert host.paired == []
        assert host.host.code is not None
        assert host.host.code.tries_left == 19
        guest.close()


@in_loop
async def test_whoever_guesses_does_not_keep_others_out() -> None:
    async with hosting() as host:
        address = host.open()
        eve = RawGuest(host.guests, address, "127.0.0.2")
        for _ in range(10):
            await eve.attempt(WRONG)
        assert (await host.pair(address)).name == "mini"
        eve.close()


@in_loop
async def test_points_that_are_none_are_counted_and_denied() -> None:
    """Zero, a point of low order, one off the curve: nothing is computed with them."""
    async with hosting() as host:
        guest = RawGuest(host.guests, host.open())
        for point in (b"\1" + bytes(31), bytes(32), b"\2" + bytes(31)):
            answer = await guest.ask(guest.begin(CODE, host.here, message=b"A" + point)[1])
            assert isinstance(answer, Denied)
            assert "not a SPAKE2 message" in answer.reason
        assert host.host.checked == 3
        guest.close()


# ---- recordings and somebody in between ------------------------------------------------------------------------


@in_loop
async def test_a_recorded_pairing_replayed_is_refused() -> None:
    async with hosting() as host:
        address = host.open()
        guest = RawGuest(host.guests, address)
        exchange, begin = guest.begin(CODE, host.here)
        prove = guest.prove(exchange, await guest.ask(begin), host.here, begin)
        assert isinstance(await guest.ask(prove), Accepted)

        thief = RawGuest(host.guests, address)
        assert "attempt is over" in (await thief.ask(prove)).reason
        challenge = await thief.ask(begin)
        assert isinstance(challenge, Challenge)
        # The old proof for the new attempt: the host's part of the secret is another one.
        assert (await thief.ask(Prove(attempt=challenge.attempt, proof=prove.proof))).tries_left == 19
        # On the connection it was recorded on, too.
        assert "attempt is over" in (await guest.ask(prove)).reason
        assert len(host.paired) == 1
        assert host.host.dropped["stale"] == 2
        guest.close()
        thief.close()


@in_loop
async def test_an_attempt_belongs_to_the_connection_that_began_it() -> None:
    async with hosting() as host:
        address = host.open()
        guest, thief = RawGuest(host.guests, address), RawGuest(host.guests, address)
        exchange, begin = guest.begin(CODE, host.here)
        prove = guest.prove(exchange, await guest.ask(begin), host.here, begin)
        assert "attempt is over" in (await thief.ask(prove)).reason
        assert isinstance(await guest.ask(prove), Accepted)
        guest.close()
        thief.close()


class Between:
    """Somebody between guest and host who can read and change all: the pair of pairing sockets is public."""

    def __init__(self, host: Host, address: str, change: Callable[[Message], Message | None]) -> None:
        self._change = change
        self._towards_host = RawGuest(host.guests, address)
        self._gate = security.Gate(host.guests)
        self._gate.allow("between", lambda key: key)
        router = host.guests.socket(zmq.ROUTER)
        security.serve(router, PAIRING_IDENTITY, "between")
        port = router.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"127.0.0.1:{port}"
        self._pump = Pump(router, self._from_guest)
        self._guest = b""
        self._task = asyncio.ensure_future(self._from_host())

    def _from_guest(self, frames: list[bytes]) -> None:
        self._guest = frames[0]
        message = self._change(decode(frames[1], FromGuest))
        if message is not None:
            self._towards_host.send(message)

    async def _from_host(self) -> None:
        while True:
            message = self._change(await self._towards_host.receive())
            if message is not None:
                self._pump.send([self._guest, encode(message)])

    def close(self) -> None:
        self._task.cancel()
        self._pump.close()
        self._towards_host.close()
        self._gate.close()


async def paired_through(host: Host, change: Callable[[Message], Message | None]) -> None:
    """Pair with the right code, with somebody between who changes messages."""
    between = Between(host, host.open(), change)
    try:
        await host.pair(between.address)
    finally:
        between.close()


@in_loop
async def test_somebody_between_who_changes_nothing_gains_nothing() -> None:
    """The keys that were pinned are those of the two ends."""
    async with hosting() as host:
        await paired_through(host, lambda message: message)
        assert len(host.paired) == 1


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Begin, {"key": security.new_identity().public_key}),
        (Begin, {"name": "school"}),
        (Begin, {"owner": "eve@eve"}),
        (Here, {"key": security.new_identity().public_key}),
        (Here, {"port": 4712}),
        (Here, {"name": "maxi"}),
    ],
)
@in_loop
async def test_nothing_that_somebody_between_changes_is_pinned(kind: type[Message], change: dict[str, object]) -> None:
    async with hosting() as host:
        with pytest.raises(PairingError, match="is wrong at"):
            await paired_through(
                host,
                lambda message: msgspec.structs.replace(message, **change) if type(message) is kind else message,
            )
        assert host.paired == []
        assert host.host.attempts["wrong"] == 1


@in_loop
async def test_somebody_who_pretends_to_have_the_code_is_told_apart() -> None:
    async with hosting() as host:

        def pretend(message: Message) -> Message:
            if isinstance(message, Denied):
                return Accepted(attempt=bytes(16), proof=os.urandom(32))
            return msgspec.structs.replace(message, key=key) if isinstance(message, Here) else message

        key = security.new_identity().public_key
        with pytest.raises(PairingError, match="does not know the code: somebody between it and this machine"):
            await paired_through(host, pretend)


@in_loop
async def test_a_known_owner_with_another_key_is_refused_on_both_sides(tmp_path: Path) -> None:
    async with hosting() as host:
        store = security.trusted_coordinators(tmp_path)

        def pin(partner: pairing_host.Partner) -> str | None:
            try:
                store.add(security.Trusted(partner.name, partner.key, partner.owner))
            except security.KeyChanged as error:
                return str(error)
            return None

        host.refuse = pin
        address = host.open()
        await host.pair(address)
        [known] = store.entries()
        with pytest.raises(PairingError, match=r"'bob@desk' is known with key .* trust remove bob@desk"):
            await host.pair(address)
        assert store.entries() == [known]
        assert any("refused, 'bob@desk' is known with key" in line for line in host.lines)


# ---- garbage -------------------------------------------------------------------------------------------------


def frames_of_garbage() -> list[list[bytes]]:
    """Random bytes, nothing, truncated and changed messages, several parts."""
    chance = random.Random(5)
    begin = encode(Begin(role="cluster", name="desk", owner="a@b", key="k" * 40, message=b"A" * 33))
    frames = [[chance.randbytes(chance.randrange(1, 300))] for _ in range(60)]
    frames += [[begin[:length]] for length in range(0, len(begin), 9)]
    frames += [[begin, begin], [begin] * 50, [b""] * 100, [b"\x91" * 4000], [bytes(4000)]]
    return frames


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "../x"},
        {"name": "<b>x</b>"},
        {"name": ""},
        {"owner": ""},
        {"owner": "a" * 101},
        {"owner": "a\nb"},
        {"owner": "a\u202eb"},
        {"key": "short"},
        {"key": "\0" * 40},
        {"message": b"A"},
        {"message": b"B" + bytes(32)},
        {"message": b"A" + bytes(33)},
    ],
)
@in_loop
async def test_a_guest_with_an_absurd_description_is_dropped_uncounted(fields: dict[str, object]) -> None:
    async with hosting() as host:
        guest = RawGuest(host.guests, host.open())
        guest.send(guest.begin(CODE, host.here, **fields)[1])
        await until(lambda: host.host.dropped["garbage"] == 1, "drop")
        assert host.host.checked == 0
        guest.close()


@in_loop
async def test_garbage_is_dropped_and_counted_and_people_pair_afterwards() -> None:
    async with hosting() as host:
        address = host.open()
        guest = RawGuest(host.guests, address)
        frames = frames_of_garbage()
        for message in frames:
            guest.send(*message)
        await until(lambda: host.host.dropped["garbage"] == len(frames), "all drops")
        assert host.host.checked == 0
        # It still answers whoever sent all that, and anybody else.
        assert await guest.ask(Who(protocol=PROTOCOL_VERSION)) == host.here
        assert (await host.pair(address)).name == "mini"
        guest.close()


@in_loop
async def test_a_frame_over_the_limit_ends_its_connection_only() -> None:
    async with hosting() as host:
        address = host.open()
        guest = RawGuest(host.guests, address)
        await guest.ask(Who(protocol=PROTOCOL_VERSION))
        guest.send(bytes(4097))
        await until(lambda: len(host.host._port._clients) == 0, "end of the connection")
        assert host.host.dropped == {}
        assert (await host.pair(address)).name == "mini"
        guest.close()


@in_loop
async def test_who_sends_without_end_is_cut() -> None:
    """libzmq keeps all parts of a message until the last one came: no limit of its own ends that."""
    async with hosting() as host:
        address = host.open()
        guest = RawGuest(host.guests, address)
        await guest.ask(Who(protocol=PROTOCOL_VERSION))
        guest.send(*[bytes(4000)] * 2000)
        await until(lambda: host.host.dropped["too much"], "cut")
        assert (await host.pair(address)).name == "mini"
        guest.close()


@in_loop
async def test_connections_of_one_source_are_bounded_and_others_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing_port, "MAX_OF_ONE_SOURCE", 4)
    async with hosting() as host:
        address = host.open()
        crowd = [await asyncio.open_connection(*address.split(":"), local_addr=("127.0.0.2", 0)) for _ in range(20)]
        await until(lambda: host.host.dropped["too many"] == 16, "cuts")
        assert len(host.host._port._clients) == 4
        assert (await host.pair(address)).name == "mini"
        for _, writer in crowd:
            writer.close()


@in_loop
async def test_who_stays_without_a_word_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing_port, "MAX_SECONDS", 0.2)
    async with hosting() as host:
        reader, writer = await asyncio.open_connection(*host.open().split(":"))
        await until(lambda: host.host.dropped["too long"], "cut")
        await reader.read()
        writer.close()
