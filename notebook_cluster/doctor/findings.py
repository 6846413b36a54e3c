"""What the doctor says, from what was measured: pure functions, each the lines of one subject.

Texts that peers said about themselves (names of interfaces, reasons) go into ``text`` only. A ``fix`` is copied into a
shell or a cell: it is built from names that were checked, from addresses that parse, and from what this machine says.
"""

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from notebook_cluster.protocol.clock import duration
from notebook_cluster.protocol.peer import Diagnosis
from notebook_cluster.protocol.state import PeerView
from notebook_cluster.protocol.views import Finding

Level = Literal["ok", "info", "warning", "error"]
CLOCK_LIMIT_S = 5.0
_LOOK_ALIKE_S = 2.0
"""Peers whose clocks differ by less than this go alike: then it is this machine's clock that is wrong."""


@dataclass(frozen=True)
class Examined:
    """One peer of the cluster as it was found."""

    name: str
    diagnosis: Diagnosis
    here: bool = False
    """It is the notebook's machine."""
    machine: str = ""
    hosts: tuple[str, ...] = ()
    """IPv4 addresses, not loopback."""
    nodes: tuple[str, ...] = ()
    offset: float | None = None
    """Its wall clock minus this machine's, seconds."""
    round_trip: float | None = None
    jitter: float | None = None
    bytes_per_s: float | None = None
    """What its link carries, both directions together."""
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def system(self) -> str:
        """``Linux``, ``macOS`` or ``Windows``: the first word of its platform."""
        return self.diagnosis.facts.get("platform", "").partition("-")[0]


def say(subject: str, level: Level, text: str, fix: str = "", table: Sequence[Sequence[str]] = ()) -> Finding:
    """A Finding."""
    return Finding(subject=subject, level=level, text=text, fix=fix, table=[list(row) for row in table])


def interfaces(peers: Sequence[Examined]) -> list[Finding]:
    """Who is connected to what."""
    findings = []
    for peer in peers:
        addresses = [address for _, address in peer.diagnosis.interfaces]
        if not addresses:
            text = f"{peer.name} has no network but itself: no other machine can reach it"
            findings.append(say("interfaces", "warning", text, "connect it to the network of the other machines"))
        elif all(address.startswith("169.254.") for address in addresses):
            text = f"{peer.name} gave itself the address {addresses[0]}: no router answered"
            findings.append(
                say("interfaces", "warning", text, "connect it to the network again, or restart the router")
            )
    rows = [[peer.name, name, address] for peer in peers for name, address in peer.diagnosis.interfaces]
    if rows:
        connected = [peer.name for peer in peers if peer.diagnosis.interfaces]
        text = f"{listed(connected)} {'is' if len(connected) == 1 else 'are'} on a network"
        findings.append(say("interfaces", "ok", text, table=[["peer", "interface", "address"], *rows]))
    return findings


def twin_interfaces(own: Iterable[tuple[str, str, str]]) -> list[Finding]:
    """``own``: (interface, address, netmask) of this machine. Two in one network: traffic takes either."""
    networks: dict[str, list[str]] = {}
    for name, address, mask in own:
        try:
            network = ipaddress.IPv4Network(f"{address}/{mask}", strict=False)
        except ValueError:
            continue  # an interface without a netmask
        if network.prefixlen < 31 and name not in networks.setdefault(str(network), []):
            networks[str(network)].append(name)
    return [
        say(
            "interfaces", "info",
            f"{' and '.join(names)} of this machine are both in {network}: traffic may go over the slower one",
            "switch Wi-Fi off while the cable is in",
        )
        for network, names in networks.items() if len(names) > 1
    ]  # fmt: skip


def multicast(peers: Sequence[Examined]) -> list[Finding]:
    """Where mDNS is blocked on the machine itself."""
    blocked = [peer for peer in peers if peer.diagnosis.multicast]
    findings = [
        say(
            "multicast",
            "warning",
            f"{peer.name} cannot use mDNS: {peer.diagnosis.multicast}",
            on(peer.name, allow_mdns(peer.system)),
        )
        for peer in blocked
    ]
    working = [peer.name for peer in peers if not peer.diagnosis.multicast and peer.diagnosis.interfaces]
    if working:
        findings.append(say("multicast", "ok", f"mDNS works on {listed(working)}"))
    return findings


def unheard(names: Iterable[tuple[str, str, bool]]) -> list[Finding]:
    """``names``: (peer, address, is in a network of this machine) of peers that are connected and were not heard over
    mDNS, though both machines can use it."""
    findings = []
    for name, address, neighbour in names:
        if neighbour:
            text = (
                f"{name} is known by its address {address} but not heard over mDNS: multicast does not pass between it "
                "and this machine (guest Wi-Fi, client isolation, or an access point that filters it)"
            )
            findings.append(say("multicast", "warning", text, f"add peers by address: %cluster add {address}"))
        else:
            text = f"{name} at {address} is on another network, where mDNS does not reach"
            findings.append(say("multicast", "info", text, f"add it by address: %cluster add {address}"))
    return findings


def allow_mdns(system: str) -> str:
    """How a firewall is told to let mDNS pass."""
    match system:
        case "macOS":
            return "System Settings, Network, Firewall, Options: allow incoming connections for Python"
        case "Windows":
            return "netsh advfirewall firewall add rule name=mDNS dir=in action=allow protocol=UDP localport=5353"
        case _:
            return "sudo ufw allow 5353/udp   # or: sudo firewall-cmd --add-service=mdns"


def allow_tcp(system: str, port: int | None, sources: Iterable[str] = ()) -> str:
    """How a firewall is told to take TCP connections on ``port`` (None: any) from ``sources`` (IPv4 addresses)."""
    known = [source for source in sources if is_ipv4(source)]
    where = str(port) if port is not None else "any"
    match system:
        case "macOS":
            return "System Settings, Network, Firewall, Options: allow incoming connections for Python"
        case "Windows":
            rule = "netsh advfirewall firewall add rule name=notebook-cluster dir=in action=allow protocol=TCP"
            return f"{rule} localport={where}" + (f" remoteip={','.join(known)}" if known else "")
        case _ if port is not None:
            return f"sudo ufw allow {port}/tcp   # or: sudo firewall-cmd --add-port={port}/tcp"
        case _:
            return (
                "\n".join(f"sudo ufw allow proto tcp from {source}" for source in known)
                or "sudo ufw allow proto tcp from any"
            )


def on(machine: str, command: str) -> str:
    """``command`` below a comment that names the machine to type it on."""
    return f"# on {machine}\n{command}"


def is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def same_names(found: Iterable[tuple[str, str, str]]) -> list[Finding]:
    """``found``: (name, address, fingerprint of the key) of every peer that is heard or in the cluster."""
    by_name: dict[str, dict[str, str]] = {}
    for name, address, fingerprint in found:
        by_name.setdefault(name, {})[fingerprint] = address
    findings = []
    for name, places in sorted(by_name.items()):
        if len(places) > 1:
            which = " and ".join(f"{address} (key {key})" for key, address in sorted(places.items()))
            text = f"{len(places)} peers are called {name!r}: {which}; '%cluster add {name}' cannot tell them apart"
            findings.append(say("names", "warning", text, f"notebook-cluster share --name {name}-2"))
    if not findings and by_name:
        findings.append(say("names", "ok", f"{len(by_name)} peers, each with a name of its own"))
    return findings


def strangers(peers: Iterable[PeerView]) -> list[Finding]:
    """Peers that were found and cannot be added yet."""
    findings = []
    for peer in peers:
        if peer.condition != "untrusted":
            continue
        if peer.pairing:
            fix = f"%cluster add {peer.name} --code CODE   # the code that stands on its screen"
        else:
            fix = on(peer.name, f"notebook-cluster share --name {peer.name}   # prints a code for %cluster add")
        text = f"{peer.name} at {peer.address} is found but not trusted: {peer.reason or 'its key is not known here'}"
        findings.append(say("trust", "info", text, fix))
    return findings


def clocks(peers: Sequence[Examined]) -> list[Finding]:
    """Clocks that are wrong, by more than 5 s."""
    known = [(peer, peer.offset) for peer in peers if peer.offset is not None and not peer.here]
    wrong = [(peer, offset) for peer, offset in known if abs(offset) > CLOCK_LIMIT_S]
    if not wrong:
        if not known:
            return []
        most = max(abs(offset) for _, offset in known)
        whose = listed([peer.name for peer, _ in known])
        return [say("clock", "ok", f"{whose} and this machine: clocks agree within {duration(most)}")]
    offsets = [offset for _, offset in wrong]
    if len(wrong) > 1 and len(wrong) == len(known) and max(offsets) - min(offsets) < _LOOK_ALIKE_S:
        own = next((peer.system for peer in peers if peer.here), "")
        text = f"this machine's clock is {_shift(-offsets[0])} those of {listed([peer.name for peer, _ in wrong])}"
        return [say("clock", "warning", text, set_clock(own))]
    return [
        say(
            "clock",
            "warning",
            f"{peer.name}'s clock is {_shift(offset)} this machine's",
            on(peer.name, set_clock(peer.system)),
        )
        for peer, offset in wrong
    ]


def offset(theirs: float, sent: float, received: float) -> float:
    """Their wall clock minus ours, when an answer that says ``theirs`` to a question of ``sent`` came at ``received``
    (our wall clock, seconds): the answer is taken to be made half the way between."""
    return theirs - (sent + (received - sent) / 2)


def set_clock(system: str) -> str:
    match system:
        case "macOS":
            return "sudo sntp -sS time.apple.com"
        case "Windows":
            return "w32tm /resync"
        case _:
            return "sudo timedatectl set-ntp true"


def programs(peers: Sequence[Examined]) -> list[Finding]:
    """Where a program may outlive the node that has started it."""
    found = [peer.name for peer in peers if peer.system not in ("", "Linux")]
    if not found:
        return []
    text = (
        f"on {listed(found)} a program that a node starts, and that leaves session and environment behind, goes on "
        "after the node: only Linux lets an agent know such programs"
    )
    return [say("programs", "info", text, "look there for what nodes have left running")]


def frames(peers: Sequence[Examined]) -> list[Finding]:
    """Frames that were dropped, by cause."""
    dropped = {peer.name: +Counter(peer.dropped) for peer in peers}
    return [
        say(
            "frames", "info",
            f"{sum(counts.values())} frames from {name} were dropped: "
            + ", ".join(f"{count} {cause}" for cause, count in sorted(counts.items())),
            "a few after a break of the network are usual; more mean that somebody else sends to its port",
        )
        for name, counts in dropped.items() if counts
    ]  # fmt: skip


def _shift(seconds: float) -> str:
    return f"{duration(abs(seconds))} {'ahead of' if seconds > 0 else 'behind'}"


def listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``; of at least one name."""
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]
