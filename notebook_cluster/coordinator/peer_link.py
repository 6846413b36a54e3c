"""One peer of a cluster: the link to its agent and how it is."""

import asyncio
import math
import time

from notebook_cluster.link import Dialer
from notebook_cluster.protocol import peer as p
from notebook_cluster.protocol.state import PeerCondition

PAIRED_GRACE = 8.0
"""Seconds after a pairing in which a refusal is not believed: the agent may not have looked at its list yet."""


class PeerLink:
    """It stays when the agent is dialled anew (restarted there, or found elsewhere)."""

    def __init__(self, name: str, dialer: Dialer) -> None:
        self.name = name
        self.dialer = dialer
        self.info: p.PeerInfo | None = None
        self.portable = False
        self.condition: PeerCondition = "connecting"
        self.reason = ""
        self.slept: float | None = None
        """Seconds of its last sleep."""
        self.ready = asyncio.Event()
        """Its agent has described itself."""
        self.refused = asyncio.Event()
        self.released = asyncio.Event()
        self._paired = -math.inf
        self._heard = time.monotonic()

    def paired(self) -> None:
        """It trusts this cluster from now on."""
        self._paired = time.monotonic()
        self.refused.clear()

    def heard(self) -> None:
        """Something came from it."""
        self._heard = time.monotonic()

    def become(self, condition: PeerCondition, reason: str) -> None:
        """What the link's own condition is now."""
        self.condition, self.reason = condition, reason
        if condition == "connected":
            self.refused.clear()
            self.heard()
        elif condition == "refused":
            # Its agent has ended what this cluster had there, and describes itself anew when it lets us in again.
            self.ready.clear()
            if time.monotonic() - self._paired > PAIRED_GRACE:
                self.refused.set()

    @property
    def is_open(self) -> bool:
        """Messages go to and fro, or did a moment ago."""
        return self.condition in ("connected", "suspect")

    @property
    def asleep(self) -> bool:
        """A portable machine of which nothing is heard, without its having closed the connection."""
        return self.condition == "lost" and self.portable and self.dialer.silent

    @property
    def shown(self) -> PeerCondition:
        """The condition for people."""
        return "asleep" if self.asleep else self.condition

    @property
    def why(self) -> str:
        """The reason for people."""
        if not self.asleep:
            return self.reason
        silent = duration(time.monotonic() - self._heard)
        return f"{self.name} fell silent {silent} ago: asleep or out of Wi-Fi; rounds go on without it"


def duration(seconds: float) -> str:
    """``40 s``, ``62 min`` or ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
