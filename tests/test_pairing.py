"""Pairing over real sockets: what people meet. Attacks are in test_pairing_attacks.py."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from notebook_cluster import security
from notebook_cluster.pairing import PairingError, PairingHost, ask
from notebook_cluster.protocol import PROTOCOL_VERSION
from tests.in_loop import in_loop, until
from tests.pairing_guests import CODE, WRONG, Host, hosting


@in_loop
async def test_the_right_code_pairs_and_each_side_learns_the_others_key() -> None:
    async with hosting() as host:
        address = host.open()
        key = security.new_identity().public_key
        partner = await host.pair(address, identity_key=key)
        assert (partner.role, partner.name, partner.owner, partner.key) == ("peer", "mini", "ann@mini", host.key)
        assert (partner.host, partner.port) == ("127.0.0.1", 4711)
        [guest] = host.paired
        assert (guest.role, guest.name, guest.owner, guest.key) == ("cluster", "desk", "bob@desk", key)
        assert guest.host == "127.0.0.1"


@in_loop
async def test_who_is_there_is_answered_without_a_code() -> None:
    async with hosting(device="NVIDIA RTX 4090") as host:
        assert await ask(host.guests, host.open()) == host.here
        assert host.host.checked == 0


@pytest.mark.parametrize("typed", ["Tiger Lamp 42", " tiger_lamp-42 ", "tigerlamp42", "TIGER\u2013LAMP\u201342"])
@in_loop
async def test_a_code_may_be_typed_in_many_ways(typed: str) -> None:
    async with hosting() as host:
        assert (await host.pair(host.open(), typed)).name == "mini"


@in_loop
async def test_a_single_use_code_closes_with_its_use() -> None:
    async with hosting() as host:
        address = host.open(single_use=True)
        await host.pair(address)
        assert (host.closed, host.host.is_open, host.host.code) == (["it was used"], False, None)
        with pytest.raises(PairingError, match="no code is open there"):
            await host.pair(address)
        assert len(host.paired) == 1


@in_loop
async def test_a_port_that_is_closed_is_said_to_be_and_what_to_look_at() -> None:
    async with hosting() as host:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        for asked in (host.pair(address), ask(host.guests, address)):
            with pytest.raises(PairingError) as caught:
                await asked
            said = str(caught.value)
            assert said.startswith(f"cannot pair with {address}: nothing listens there (connection refused): run ")
            assert all(words in said for words in ("notebook-cluster share", "%cluster invite", "firewall", "no code"))


@in_loop
async def test_a_code_closes_when_its_time_is_over() -> None:
    async with hosting() as host:
        address = host.open(valid_s=0.5)
        await until(lambda: host.closed, "end of the code")
        assert host.closed == ["its time is over"]
        with pytest.raises(PairingError, match="no code is open there"):
            await host.pair(address)


@in_loop
async def test_a_wrong_code_says_how_many_tries_are_left() -> None:
    async with hosting() as host:
        address = host.open()
        for left in (19, 18):
            with pytest.raises(PairingError, match=f"'{WRONG}' is wrong at mini: {left} tries left") as caught:
                await host.pair(address, WRONG)
            assert caught.value.tries_left == left
        assert (await host.pair(address)).name == "mini"
        with pytest.raises(PairingError, match="17 tries left"):  # a right one costs nothing
            await host.pair(address, WRONG)
        assert host.host.attempts == {"wrong": 3, "right": 1}


@in_loop
async def test_a_typo_that_cannot_be_a_code_costs_no_try() -> None:
    async with hosting() as host:
        with pytest.raises(PairingError, match="use 6 to 64"):
            await host.pair(host.open(), "tig")
        assert host.host.checked == 0


@in_loop
async def test_every_attempt_is_logged_and_no_code_is() -> None:
    async with hosting() as host:
        address = host.open()
        with pytest.raises(PairingError):
            await host.pair(address, WRONG)
        await host.pair(address)
        wrong, right = host.lines
        assert wrong == "127.0.0.1: cluster 'desk' of 'bob@desk': wrong code: 19 tries left before it is dead"
        assert right.startswith("127.0.0.1: cluster 'desk' of 'bob@desk': right code, key ")
        assert not any("lamp" in line for line in host.lines)


@in_loop
async def test_a_whole_class_pairs_at_once_with_one_code() -> None:
    """More at the same time than may try from one address at the same time: they take turns."""
    async with hosting() as host:
        address = host.open()
        names = [f"student{number}" for number in range(15)]
        await asyncio.gather(*(host.pair(address, name=name, timeout=60) for name in names))
        assert sorted(guest.name for guest in host.paired) == sorted(names)
        assert host.host.attempts["wrong"] == 0


@in_loop
async def test_a_code_that_is_opened_again_has_the_same_port() -> None:
    async with hosting() as host:
        address = host.open(single_use=True)
        await host.pair(address)
        assert host.open("canoe-piano-77", single_use=True) == address
        assert (await host.pair(address, "canoe-piano-77")).name == "mini"


@in_loop
async def test_another_code_takes_the_place_of_the_open_one() -> None:
    async with hosting() as host:
        address = host.open()
        assert host.open("canoe-piano-77") == address
        with pytest.raises(PairingError, match="is wrong at mini"):
            await host.pair(address)
        assert (await host.pair(address, "canoe-piano-77")).name == "mini"


@in_loop
async def test_a_refusal_of_the_host_reaches_the_guest_and_uses_nothing_up() -> None:
    async with hosting() as host:
        host.refuse = lambda partner: f"{partner.owner!r} is known with another key"
        address = host.open(single_use=True)
        with pytest.raises(PairingError, match="mini refuses: 'bob@desk' is known with another key") as caught:
            await host.pair(address)
        assert caught.value.tries_left is None
        host.refuse = lambda partner: None
        assert (await host.pair(address)).name == "mini"


@in_loop
async def test_a_host_that_cannot_keep_the_key_says_so() -> None:
    async with hosting() as host:

        def disk_full(partner: object) -> str | None:
            raise OSError(28, "No space left on device")

        host.refuse = disk_full
        with pytest.raises(PairingError, match=r"mini could not keep the key.*No space left"):
            await host.pair(host.open())


@in_loop
async def test_two_versions_are_both_named() -> None:
    async with hosting(protocol=PROTOCOL_VERSION + 7) as host:
        with pytest.raises(PairingError, match=f"protocol {PROTOCOL_VERSION + 7}, this machine {PROTOCOL_VERSION}"):
            await host.pair(host.open())
        assert host.host.checked == 0


@in_loop
async def test_two_peers_do_not_pair() -> None:
    async with hosting() as host:
        with pytest.raises(PairingError, match=r"mini at .* is a peer as well"):
            await host.pair(host.open(), role="peer")


@in_loop
async def test_another_key_than_the_advertised_one_is_refused_before_the_code_is_used() -> None:
    async with hosting() as host:
        expected = security.new_identity().public_key
        with pytest.raises(PairingError, match="somebody may pretend to be it") as caught:
            await host.pair(host.open(), expect_key=expected)
        assert security.fingerprint(expected) in str(caught.value)
        assert security.fingerprint(host.key) in str(caught.value)
        assert host.host.checked == 0


# ---- nobody there --------------------------------------------------------------------------------------------


@asynccontextmanager
async def program(answer: bytes | None) -> AsyncIterator[str]:
    """The address of a program that is no pairing host: says ``answer``, or with None nothing at all."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is not None:
            writer.write(answer)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n"])
@in_loop
async def test_another_program_at_the_port_is_told_apart(answer: bytes | None) -> None:
    async with hosting() as host, program(answer) as address:
        with pytest.raises(PairingError, match="does not answer as a machine that pairs"):
            await host.pair(address, timeout=1.5)


@pytest.mark.parametrize("address", ["mini", "mini:", ":4711", "mini:port", "mini:70000", "mini:0"])
@in_loop
async def test_an_address_that_is_none_is_named(address: str) -> None:
    async with hosting() as host:
        with pytest.raises(PairingError, match="is no address: write it as HOST:PORT"):
            await host.pair(address)


@in_loop
async def test_a_name_that_nobody_has_is_said() -> None:
    async with hosting() as host:
        with pytest.raises(PairingError, match=r"cannot pair with nobody\.invalid:4711"):
            await host.pair("nobody.invalid:4711", timeout=5)


@in_loop
async def test_without_a_zap_handler_nobody_comes_in() -> None:
    async with hosting() as host:
        address = host.open()
        host.gate.close()
        with pytest.raises(PairingError, match="cannot pair with"):
            await host.pair(address, timeout=1.5)
        assert (host.host.checked, host.paired) == (0, [])


@in_loop
async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with hosting(endpoint=f"tcp://127.0.0.1:{port}") as host:
            with pytest.raises(OSError, match=f"port {port} is taken by another program: choose another one"):
                host.open()
            assert not host.host.is_open


@in_loop
async def test_a_host_alone_in_its_context_brings_its_own_zap_handler() -> None:
    async with hosting() as host:
        host.gate.close()
        alone = Host()
        alone.gate.close()
        pairing = PairingHost(
            alone.guests,
            "tcp://127.0.0.1:0",
            gate=None,
            here=lambda: alone.here,
            on_paired=lambda partner: None,
            on_attempt=alone.lines.append,
        )
        for _ in range(2):
            port = pairing.open(security.OpenCode(CODE, True))
            await host.pair(f"127.0.0.1:{port}")
            assert not pairing.is_open
        pairing.close()
        alone.close()
