"""For ``benchmarks.fuzz``: attacks on the ports of a coordinator."""

import contextlib
import itertools
from typing import Any

import msgspec

from benchmarks.fuzz_clients import PATIENCE, Attack, Hang, structs_of
from notebook_cluster.link import frames as f
from notebook_cluster.protocol import PROTOCOL_VERSION, ProtocolError, decode, encode, peer, views
from notebook_cluster.security import Identity, new_identity
from tests.frames_mutator import Frames
from tests.raw_link import RawClient


class ReceptionAttack(Attack):
    """An agent that was let in dials in and sends nonsense over its link; another one arrives and is greeted."""

    name = "reception"

    def __init__(self, port: int, key: str, start: int) -> None:
        super().__init__(port, 1 << 20, start)
        self._endpoint, self._key = f"tcp://127.0.0.1:{port}", key
        self._bad, self._good = new_identity(), new_identity()
        self.keys = [self._bad.public_key, self._good.public_key]
        self._bodies = structs_of(peer.FromAgent, start)
        self._headers = structs_of(f.AnyHeader, start)
        self._link: RawClient | None = None
        self._greeting: f.Hello | None = None
        self._sequence = 0
        self._received = 0
        """The last message of the coordinator that came: what nobody acknowledges it keeps, bounded."""

    def hear(self, frames: Frames) -> None:
        hello = self._greeting
        with contextlib.suppress(ProtocolError):
            header: Any = decode(frames[0], f.AnyHeader)
            if hello is not None and isinstance(header, f.Data) and header.epoch == hello.epoch:
                self._received = max(self._received, header.sequence)

    def _arrive(self) -> RawClient:
        """Dial in anew, and welcome the coordinator's session."""
        if self._link is not None:
            self._link.close()
        self._link = self.client()
        self._greeting = hello = _greeted(self._link)
        if hello is None:
            raise Hang("reception: an agent that was let in is not greeted")
        self._sequence = hello.received
        self._link.send([encode(f.Welcome(
            hello.cluster, hello.epoch, hello.session, self._received, self._received, hello.received + 1, False
        ))])  # fmt: skip
        return self._link

    def message(self) -> Frames:
        """Any header, for the most part of the session that is on, so that its numbers are looked at."""
        hello, header = self._greeting, self.random.choice(self._headers)
        if hello is not None and self.random.random() < 0.9:
            header = msgspec.structs.replace(header, cluster=hello.cluster, epoch=hello.epoch, session=hello.session)
        body = [encode(self.random.choice(self._bodies))] if isinstance(header, f.Data) else []
        return [encode(header), *body]

    def bad_message(self) -> Frames:
        """Half of them have a good header with the next number: a message that is missing holds up those after it."""
        hello = self._greeting
        if hello is None or self.random.random() < 0.5:
            return super().bad_message()
        self._sequence += 1
        header = encode(f.Data(hello.cluster, hello.epoch, hello.session, self._sequence, 0))
        return [header, *(self.mutator.mutate([encode(self.random.choice(self._bodies))]) or [b""])]

    def client(self) -> RawClient:
        return RawClient(self._endpoint, self._key, self._bad)

    def run(self, count: int) -> None:
        self.attack(self._arrive(), count)

    def check(self) -> None:
        with RawClient(self._endpoint, self._key, self._good) as honest:
            if _greeted(honest) is None:
                raise Hang("reception: no Hello for an honest agent that dialled in")

    def close(self) -> None:
        if self._link is not None:
            self._link.close()


def _greeted(client: RawClient) -> f.Hello | None:
    """Say that an agent is there, and wait for the coordinator's Hello."""
    if client.event(PATIENCE) != "HANDSHAKE_SUCCEEDED":
        return None
    client.send([encode(f.Arrival(PROTOCOL_VERSION))])
    while (frames := client.receive(PATIENCE)) is not None:
        header: Any = None
        try:
            header = decode(frames[0], f.AnyHeader)
        except ProtocolError:
            continue
        if isinstance(header, f.Hello):
            return header
    return None


class ViewsAttack(Attack):
    """A program that has the views' key sends nonsense; another one asks whether the coordinator is there."""

    name = "views"

    def __init__(self, address: str, key: str, identity: Identity, start: int) -> None:
        super().__init__(int(address.rpartition(":")[2]), 1 << 20, start)
        self._address, self._key, self._identity = address, key, identity
        self._requests = structs_of(views.AnyRequest, start)
        self._numbers = itertools.count(1)
        self._link = self.client()

    def message(self) -> Frames:
        body: Any = self.random.choice(self._requests)
        return [encode(views.Request(id=self.random.choice((0, 1, -1, 1 << 62)), body=body))]

    def client(self) -> RawClient:
        return RawClient(self._address, self._key, self._identity)

    def run(self, count: int) -> None:
        self.attack(self._link, count)

    def check(self) -> None:
        number = next(self._numbers)
        with self.client() as honest:
            honest.event(PATIENCE)
            honest.send([encode(views.Request(id=number, body=views.Ping()))])
            while (frames := honest.receive(PATIENCE)) is not None:
                reply = decode(frames[0], views.Reply | views.AnyEvent)
                if isinstance(reply, views.Reply) and reply.id == number:
                    return
        raise Hang("views: an honest view's question was not answered")

    def close(self) -> None:
        self._link.close()
