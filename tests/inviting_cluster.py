"""A cluster that invites machines, as its coordinator does: a code, a reception and an advert, without kernels."""

from typing import Any, Self

import zmq

from notebook_cluster.discovery import ClusterAdvertiser
from notebook_cluster.link import InboundListener
from notebook_cluster.pairing import PairingHost, Partner
from notebook_cluster.protocol import PROTOCOL_VERSION
from notebook_cluster.protocol.pairing import Here
from notebook_cluster.security import Gate, OpenCode, new_identity


class InvitingCluster:
    """Cluster ``name`` with ``code`` open. Use as ``async with``."""

    def __init__(self, name: str, code: str, owner: str = "anna@laptop") -> None:
        self.name, self.code, self.owner = name, code, owner
        self.identity = new_identity()
        self.paired: list[Partner] = []
        self.arrived: list[str] = []
        self._context: zmq.Context[Any] = zmq.Context()

    async def __aenter__(self) -> Self:
        self._gate = Gate(self._context)
        self._reception = InboundListener(
            self._context,
            "tcp://127.0.0.1:0",
            self.identity,
            authorise=lambda key: next((partner.name for partner in self.paired if partner.key == key), None),
            on_arrival=lambda key, address: self.arrived.append(key),
            gate=self._gate,
        )
        port = self._reception.start()
        self._host = PairingHost(
            self._context,
            "tcp://127.0.0.1:0",
            gate=self._gate,
            here=lambda: Here(
                protocol=PROTOCOL_VERSION,
                role="cluster",
                name=self.name,
                owner=self.owner,
                key=self.identity.public_key,
                port=port,
            ),
            on_paired=self._on_paired,
            on_attempt=lambda line: None,
        )
        self.pairing_port = self._host.open(OpenCode(self.code, single_use=False))
        self.advertiser = ClusterAdvertiser(
            self.name, self.owner, self.identity.public_key, port, self.pairing_port, hosts=("127.0.0.1",)
        )
        self.advertiser.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.advertiser.close()
        self._host.close()
        self._reception.close()
        self._gate.close()
        self._context.destroy(linger=0)

    def _on_paired(self, partner: Partner) -> None:
        self.paired.append(partner)
