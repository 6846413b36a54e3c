"""The side of a shared agent that faces other people: codes, whom it trusts, the announcement, going to clusters."""

import zmq

from notebook_cluster.agent.devices import Devices
from notebook_cluster.agent.events import Tell
from notebook_cluster.agent.settings import AgentSettings
from notebook_cluster.agent.sharing.announcing import Announcer
from notebook_cluster.agent.sharing.codes import Codes
from notebook_cluster.agent.sharing.coordinators import Coordinators
from notebook_cluster.agent.sharing.dialling import Dialling
from notebook_cluster.link import Listener
from notebook_cluster.protocol import PROTOCOL_VERSION
from notebook_cluster.protocol.pairing import Here
from notebook_cluster.security import Gate, Identity, Trusted, owner


class Sharing:
    """From :meth:`start` to :meth:`close`.

    Args:
        coordinators: whom the agent trusts; ``listener`` asks the same.
        port: where ``listener`` listens.
        gate: the ZAP handler of ``context``.
    """

    def __init__(
        self,
        settings: AgentSettings,
        identity: Identity,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        coordinators: Coordinators,
        listener: Listener,
        port: int,
        gate: Gate,
        devices: Devices,
        tell: Tell,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._devices = devices
        self._port = port
        store = coordinators.store
        self.announcer = Announcer(settings.name, identity.public_key, port, devices.summary, tell)
        self.codes = Codes(
            settings, store, context, gate, here=self._here, tell=tell, on_port=self.announcer.set_pairing_port
        )
        self._dialling = Dialling(context, settings.name, identity.public_key, store, listener, tell)

    async def start(self) -> None:
        """Open the first code, or go to the cluster that was asked for.

        Raises:
            OSError: the pairing port is taken.
            ValueError: the code is unusable.
            PairingError: the cluster cannot be joined.
        """
        if self._settings.dial:
            await self.join(self._settings.dial, self._settings.code)
        elif self._settings.pairing:
            self.codes.start()

    async def join(self, address: str, code: str = "") -> Trusted:
        """See :meth:`.dialling.Dialling.join`."""
        return await self._dialling.join(address, code)

    def forget(self, key: str) -> None:
        """``key`` is trusted no more."""
        self._dialling.forget(key)

    async def close(self) -> None:
        """Take the code and the announcement back."""
        self.codes.close()
        await self.announcer.close()

    def _here(self) -> Here:
        return Here(
            protocol=PROTOCOL_VERSION,
            role="peer",
            name=self._settings.name,
            owner=owner(),
            key=self._identity.public_key,
            port=self._port,
            device=self._devices.summary(),
        )
