"""What all clusters on one peer share: devices and who uses them, limits, folders, the watchdog."""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from notebook_cluster.agent.devices import Devices
from notebook_cluster.agent.events import Tell
from notebook_cluster.agent.kernels.programs import Programs
from notebook_cluster.agent.kernels.watchdog import Watchdog
from notebook_cluster.agent.leases import DeviceLeases
from notebook_cluster.agent.machine import machine_id
from notebook_cluster.agent.sharing.admission import Admission, Refusal
from notebook_cluster.processors import NodeCount
from notebook_cluster.protocol.peer import Device
from notebook_cluster.security import runtime_directory


@dataclass
class Resources:
    """Of one agent. ``peer``: its name."""

    peer: str
    devices: Devices
    watchdog: Watchdog
    sockets: Path
    """The agent's 0700 socket folder."""
    directory: Path
    """The agent's data folder."""
    leases_changed: Callable[[], None]
    admission: Admission
    tell: Tell
    leases: DeviceLeases = field(default_factory=lambda: DeviceLeases(runtime_directory() / "leases", machine_id()))
    node_count: NodeCount = field(default_factory=lambda: NodeCount(runtime_directory() / "nodes", machine_id()))
    programs: Programs = field(default_factory=Programs)
    devices_known: asyncio.Event = field(default_factory=asyncio.Event)
    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    """For the kernels' sockets: one I/O thread less in the way of the link."""

    def __post_init__(self) -> None:
        self.programs.own(self.watchdog.pid)

    def close(self) -> None:
        """End what is left, give everything back; call when no kernel runs."""
        self.programs.end_orphans()
        self.watchdog.close()
        self.leases.close()
        self.node_count.close()
        # Kernels that had to be killed leave sockets behind.
        shutil.rmtree(self.sockets, ignore_errors=True)
        self.context.destroy(linger=0)

    def shared_devices(self) -> list[Device]:
        """Those that nodes may use, with the memory that they may."""
        return [self.admission.limited(device) for device in self.devices.found if self.admission.permits(device)]

    def choose_device(self, wanted: str, cluster: str) -> str:
        """``wanted``, or without a wish the best that is free; leased for ``cluster`` unless it is the processor.

        Raises:
            Refusal: there is no such device, it is not shared, or another cluster uses it.
        """
        shared = [device.id for device in self.shared_devices()]
        if wanted and wanted not in shared:
            if wanted in [device.id for device in self.devices.found]:
                raise Refusal(
                    f"{self.peer} does not share {wanted}, only {', '.join(shared) or 'nothing'}: use one of those, or "
                    "ask its owner for other --devices"
                )
            raise Refusal(f"{self.peer} has no device {wanted[:80]!r}: it has {', '.join(shared)}")
        if wanted == "cpu":
            return wanted
        accelerators = [device.id for device in self.devices.accelerators() if device.id in shared]
        for device in [wanted] if wanted else accelerators:
            holder = self.leases.take(device, cluster)
            if holder is None:
                self.leases_changed()
                return device
            if wanted:
                raise Refusal(
                    f"{device} of {self.peer} is used by {holder}: remove that node there, or use device 'cpu'"
                )
        if "cpu" not in shared:
            raise Refusal(
                f"{self.peer} shares only {', '.join(shared) or 'devices that it does not have'}, none of them free: "
                "remove a node there, or ask its owner for other --devices"
            )
        return "cpu"
