"""Which coordinators may use this agent, and going to those that cannot come here.

Those of the same user on this machine may, those that were paired, and, for one cluster of theirs, a head that they
grant.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from notebook_cluster.agent.events import SharingEvent, Tell
from notebook_cluster.agent.settings import LaunchedAs
from notebook_cluster.agent.sharing.grants import Grants, HeldGrant
from notebook_cluster.link import DialOut, Listener
from notebook_cluster.link.tcp import host_port
from notebook_cluster.pairing import NobodyThere, PairingError, ask, enlist, pair
from notebook_cluster.security import Trusted, TrustStore, own_key, owner, same_user_keys, trusted_coordinators

_ENLIST_AGAIN_S = 1.0


class Coordinators:
    """The keys that come in; ``directory`` is the agent's data folder.

    :meth:`authorise` may be called from any thread.
    """

    def __init__(self, directory: Path, *, head_key: str = "") -> None:
        """``head_key``: of the head that the window which started this agent has, or empty."""
        self.store: TrustStore = trusted_coordinators(directory)
        self.grants = Grants(directory, self.is_owner)
        self._head_key = head_key
        self._followed = {head_key} - {""}
        """This and those of before: the sessions that they have are the owner's."""
        self._here = owner()
        self._lock = threading.Lock()
        self._let_in: dict[str, Trusted] = {}
        """Key -> entry of those that came in, or could have, since the last look."""
        self._let_in = self._paired()
        self._launch: LaunchedAs | None = None

    def trust_launch(self, launch: LaunchedAs) -> None:
        """Let in the coordinator that had this agent started, until this process ends."""
        self._launch = launch

    def authorise(self, key: str) -> str | None:
        """A name for people, or None for a key that must stay out."""
        trusted = self.store.find(key) or self._granted(key)
        if trusted is not None:
            # Also one that is removed before anybody looks.
            with self._lock:
                self._let_in[key] = trusted
            return trusted.owner
        if self._launch is not None and self._launch.key.server_key == key:
            return self._launch.key.owner
        if key and key == self._head_key:
            return self._here
        return same_user_keys("coordinator").get(key)

    def objection(self, key: str, cluster: str) -> str:
        """Why a coordinator with ``key``, which was let in, has no cluster of that name here; or empty."""
        if self.store.find(key) is not None or (held := self.grants.find(key)) is None or held.cluster == cluster:
            return ""
        return f"{held.head} is granted as the head of cluster {held.cluster}, not of {cluster}"

    def owner(self, key: str) -> str:
        """``user@machine`` of a key that was let in."""
        trusted = self.store.find(key) or self._granted(key)
        if trusted is None and self._launch is not None:
            return self._launch.key.owner
        return trusted.owner if trusted is not None else self._here

    def owner_id(self, key: str) -> str:
        """What all clusters of one owner have in common: the key that was paired, or empty for this user's own, which
        may be paired as well."""
        key = self.owner_key(key)
        own = self.is_own(key) or key in same_user_keys("coordinator")
        return "" if own else key

    def owner_key(self, key: str) -> str:
        """The key of the owner whose coordinator has ``key``: another one only of a head."""
        if key in self._followed:
            return own_key()
        held = None if self.store.find(key) is not None else self.grants.find(key)
        return held.owner_key if held is not None else key

    def is_own(self, key: str) -> bool:
        """Whether it came in as this user's, without pairing."""
        return self.store.find(self.owner_key(key)) is None

    def succeeds(self, key: str, before: str) -> bool:
        """Both are coordinators of one owner: of the two, the one that began later leads."""
        return self.owner_key(key) == self.owner_key(before)

    def follow(self, key: str) -> None:
        """The owner whose private agent this is has a head with this ``key`` now; empty: none."""
        self._head_key = key
        self._followed |= {key} - {""}

    def is_head(self, key: str) -> bool:
        """It comes in under a grant alone, and grants nothing itself."""
        return self.store.find(key) is None and (key == self._head_key or self.grants.find(key) is not None)

    def take_removed(self) -> list[tuple[Trusted, str]]:
        """Those that are trusted no more since the last call, and why."""
        with self._lock:
            before, self._let_in = self._let_in, {}
            now = self._paired()
            self._let_in |= now
        gone = [entry for key, entry in before.items() if key not in now]
        if not gone:
            return []
        # Who was paired may be this user as well.
        same_user = same_user_keys("coordinator")
        owners = {self._here, *(entry.owner for entry in now.values())}
        return [(entry, self._why_gone(entry, owners)) for entry in gone if entry.key not in same_user]

    @staticmethod
    def _why_gone(entry: Trusted, owners: set[str]) -> str:
        """A head may go while its owner stays."""
        if entry.owner in owners:
            return f"the head of cluster {entry.name} is granted no more by {entry.owner}"
        return f"trust in {entry.owner} was removed"

    def is_owner(self, key: str) -> bool:
        """Somebody who was paired, or this user, whose coordinators need not run now."""
        return self.store.find(key) is not None or key == own_key() or key in same_user_keys("coordinator")

    def _granted(self, key: str) -> Trusted | None:
        held = self.grants.find(key)
        return self._as_trusted(held) if held is not None else None

    def _as_trusted(self, held: HeldGrant) -> Trusted:
        known = self.store.find(held.owner_key)
        return Trusted(held.cluster, held.key, known.owner if known is not None else self._here)

    def _paired(self) -> dict[str, Trusted]:
        granted = {held.key: self._as_trusted(held) for held in self.grants.in_force()}
        return granted | {entry.key: entry for entry in self.store.entries()}


class Dialling:
    """The clusters to which one agent goes.

    Args:
        name: of the agent; ``key``: its public key.
        store: the coordinators that it trusts, with the address of each one's reception.
        listener: has the connections.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        key: str,
        store: TrustStore,
        listener: Listener,
        tell: Tell,
    ) -> None:
        self._context = context
        self._name = name
        self._key = key
        self._store = store
        self._listener = listener
        self._tell = tell
        self._made: dict[str, DialOut] = {}

    async def join(self, address: str, code: str = "") -> Trusted:
        """Go to the cluster at ``address`` ("HOST:PORT" of its pairing, or without a code also of its reception), and
        keep the connection; returns whose it is.

        Raises:
            PairingError: it cannot be reached, the code is wrong, or it is not known and there is no code.
            ValueError: it has another key than before, or ``address`` is none.
        """
        trusted = await self._pair(address, code) if code else await self._known(address)
        if trusted.address not in self._made:
            self._made[trusted.address] = self._listener.dial_out(
                trusted.address,
                trusted.key,
                lambda condition, reason: self._changed(trusted, condition, reason),
            )
        return trusted

    async def enlist(self, addresses: Sequence[str], launch: LaunchedAs, patience: float) -> None:
        """Go to the cluster of ``launch`` at the first of ``addresses`` that answers, and keep the connection. For
        ``patience`` seconds it need not be there: its coordinator may be starting again.

        Raises:
            PairingError: the launch is over, its place is taken, or nobody answered in time.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                address = await self._first_to_enlist_at(addresses, launch)
                break
            except NobodyThere as error:
                if time.monotonic() > deadline:
                    raise PairingError(f"{error}, for {patience:g} s now") from None
                self._tell(SharingEvent("dial", f"{error}: tried again", cluster=launch.key.cluster))
            await asyncio.sleep(_ENLIST_AGAIN_S)
        trusted = Trusted(launch.key.cluster, launch.key.server_key, launch.key.owner, address)
        self._made[address] = self._listener.dial_out(
            address, trusted.key, lambda condition, reason: self._changed(trusted, condition, reason)
        )

    async def _first_to_enlist_at(self, addresses: Sequence[str], launch: LaunchedAs) -> str:
        """All are tried at once: this machine may not reach some of them, and says so late."""

        async def attempt(address: str) -> str:
            await enlist(
                self._context, address, launch.key, self._name, place=launch.place, start=launch.start, key=self._key
            )
            return address

        attempts = [asyncio.ensure_future(attempt(address)) for address in addresses]
        trouble: list[str] = []
        try:
            for finished in asyncio.as_completed(attempts):
                try:
                    return await finished
                except NobodyThere as error:
                    trouble.append(str(error))
        finally:
            for task in attempts:
                task.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
        raise NobodyThere("; ".join(sorted(trouble)))

    def forget(self, key: str) -> None:
        """``key`` is trusted no more, and the listener has ended its connections."""
        self._made = {address: made for address, made in self._made.items() if made.server_key != key}

    async def _pair(self, address: str, code: str) -> Trusted:
        partner = await pair(
            self._context, address, code, identity_key=self._key, role="peer", name=self._name, owner=owner()
        )
        trusted = Trusted(
            name=partner.name,
            key=partner.key,
            owner=partner.owner,
            address=host_port(partner.host, partner.port),
            since=time.time(),
        )
        self._store.add(trusted)
        self._tell(
            SharingEvent(
                "paired",
                f"paired with cluster {partner.name} of {partner.owner} at {address}: they may run code "
                "here from now on",
                owner=partner.owner,
                cluster=partner.name,
            )
        )
        return trusted

    async def _known(self, address: str) -> Trusted:
        """The cluster at ``address`` that was paired before, at the address where it can be dialled."""
        entries = [entry for entry in self._store.entries() if entry.address]
        for entry in entries:
            if entry.address == address:
                return entry
        host = address.rpartition(":")[0]
        try:
            here = await ask(self._context, address)
        except PairingError as error:
            # Its invitation may be over and the cluster still there.
            same_host = [entry for entry in entries if entry.address.rpartition(":")[0] == host]
            if len(same_host) == 1:
                return same_host[0]
            raise PairingError(
                f"no cluster at {address} is known here ({error}): give the code that '%cluster invite' shows there "
                "with --code"
            ) from None
        # A claim so far, but the link accepts nobody but the holder of the pinned key.
        known = self._store.find(here.key)
        if known is None:
            raise PairingError(
                f"cluster {here.name} of {here.owner} at {address} is not known here: give the code that '%cluster "
                "invite' shows there with --code"
            )
        self._store.set_address(known.key, f"{host}:{here.port}")
        return self._store.find(known.key) or known

    def _changed(self, trusted: Trusted, condition: str, reason: str) -> None:
        self._tell(
            SharingEvent(
                "dial",
                f"{trusted.owner} at {trusted.address}: {condition}{f', {reason}' if reason else ''}",
                owner=trusted.owner,
                cluster=trusted.name,
            )
        )
