"""Several hosts on one machine: network namespaces on a bridge, with firewalls, broken cables and a capture.

Every host has an address, a host name and Jupyter folders of its own, so two hosts do not take each other for the same
user. Needs root, ``ip`` and ``nft``: see :func:`missing`.
"""

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.capture import Capture
from tests.command import end_programs
from tests.conftest import MARK, wait_until

_PREFIX = "nbt"
_numbers = itertools.count(1)

_SET_UP = """
add table bridge lan
add chain bridge lan forward { type filter hook forward priority 0; }
"""
_HOST_FIREWALL = """
add table inet fw
add chain inet fw input { type filter hook input priority 0; }
add rule inet fw input iif lo accept
add rule inet fw input ct state established,related accept
"""


def _command(*words: str, stdin: str | None = None) -> str:
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@functools.cache
def missing() -> str:
    """Why there can be no hosts here, or an empty text."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "nft", "unshare"):
        if shutil.which(program) is None:
            return f"network namespaces need the program {program!r}"
    return _try_hosts() and _try_hosts()  # what fails once on a busy machine may work


def needed(timeout: float | None = None) -> list[Any]:
    """The marks of tests that have hosts."""
    import pytest

    why = missing()
    limits = [] if timeout is None else [pytest.mark.timeout(timeout)]
    return [pytest.mark.namespaces, pytest.mark.skipif(bool(why), reason=why or "everything is there"), *limits]


def _try_hosts() -> str:
    try:
        with Network("a", "b") as network:
            network.block("a", "b")
            network["a"].firewall_inbound()
            # Namespaces may be allowed where changing a host name is not.
            network["a"].run(["true"])
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces do not work here: {error}"
    return ""


class Host:
    """One namespace: ``eth0`` on the bridge, ``address``, folders under ``folder``."""

    def __init__(self, network: "Network", name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.namespace = network.namespace(name)
        self.folder = network.root / name
        self._network = network
        self._firewalled = False
        self.processes: list[subprocess.Popen[Any]] = []
        self.environment = {
            "HOME": str(self.folder),
            "JUPYTER_DATA_DIR": str(self.folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(self.folder / "run"),
            "JUPYTER_CONFIG_DIR": str(self.folder / "config"),
            "IPYTHONDIR": str(self.folder / "ipython"),
            MARK: network.mark,
        }
        for path in self.environment.values():
            if path.startswith("/"):
                Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)

    def full_environment(self, environment: Mapping[str, str] | None = None) -> dict[str, str]:
        """This process's environment without what tells of its user's Jupyter, with the host's own."""
        common = {key: value for key, value in os.environ.items() if not key.startswith(("JUPYTER", "JPY_", "XDG_"))}
        return {**common, **self.environment, **(environment or {})}

    def inside(self, command: Sequence[str]) -> list[str]:
        """``command`` as it has to be started from outside. It keeps the process id: all of these only exec."""
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*enter, "sh", "-c", 'hostname "$0" && exec "$@"', self.name, *command]

    def run(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, *, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run ``command`` to its end, output captured, standard input empty."""
        return subprocess.run(
            self.inside(command), env=self.full_environment(environment), cwd=self.folder, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def popen(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start ``command``; it is ended with the network. Its session is its own."""
        options = {"stdin": subprocess.DEVNULL, "cwd": self.folder, "start_new_session": True} | options
        process = subprocess.Popen(self.inside(command), env=self.full_environment(environment), **options)
        self.processes.append(process)
        return process

    # ---- what may happen to a host ---------------------------------------------------------------------------

    def link_down(self) -> None:
        """Pull the cable: the carrier is gone, the address stays."""
        _command("ip", "-n", self._network.lan, "link", "set", self.port, "down")

    def link_up(self) -> None:
        _command("ip", "-n", self._network.lan, "link", "set", self.port, "up")

    @property
    def port(self) -> str:
        """Name of the bridge's end of the cable."""
        return f"p-{self.name}"

    def firewall_inbound(self, *, multicast: bool = False) -> None:
        """Nobody can connect to this host (silently dropped); what it connects to itself works. ``multicast``: mDNS
        is not let in either."""
        self._add_rules("add rule inet fw input meta l4proto tcp ct state new drop")
        if multicast:
            self._add_rules("add rule inet fw input udp dport 5353 drop")

    def block_port(self, port: int) -> None:
        """Nobody can connect to ``port`` of this host."""
        self._add_rules(f"add rule inet fw input tcp dport {port} ct state new drop")

    def block_multicast(self) -> None:
        """The access point passes no mDNS from or to this host."""
        for direction in ("iifname", "oifname"):
            self._network.add_rules(f'add rule bridge lan forward {direction} "{self.port}" udp dport 5353 drop')

    def open_firewall(self) -> None:
        """Take every rule of this host away."""
        if self._firewalled:
            _command("ip", "netns", "exec", self.namespace, "nft", "delete", "table", "inet", "fw")
            self._firewalled = False

    def _add_rules(self, rules: str) -> None:
        if not self._firewalled:
            self._firewalled, rules = True, _HOST_FIREWALL + rules
        _command("ip", "netns", "exec", self.namespace, "nft", "-f", "-", stdin=rules + "\n")


class Network:
    """A bridge in a namespace of its own and a host for each of ``names`` (at most 12 characters each).

    Use as ``with Network("desk", "mini") as network``; afterwards nothing of it is left, whatever happened inside.
    """

    def __init__(self, *names: str) -> None:
        for name in names:
            if not re.fullmatch(r"[a-z][a-z0-9-]{0,11}", name) or name == "lan":
                raise ValueError(f"host name {name!r}: use 1 to 12 small letters and digits, and not 'lan'")
        self._names = names
        self._tag = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self.mark = f"{self._tag}-{time.time_ns()}"
        self.lan = self.namespace("lan")
        self.hosts: dict[str, Host] = {}

    def namespace(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __enter__(self) -> Self:
        _sweep()
        self.root = Path(tempfile.mkdtemp(prefix="nbt-", dir="/tmp"))
        try:
            _command("ip", "netns", "add", self.lan)
            _command("ip", "-n", self.lan, "link", "add", "br0", "type", "bridge")
            _command("ip", "-n", self.lan, "link", "set", "br0", "up")
            self.add_rules(_SET_UP)
            for number, name in enumerate(self._names, 1):
                self._add_host(name, f"10.77.0.{number}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _add_host(self, name: str, address: str) -> None:
        host = self.hosts[name] = Host(self, name, address)
        _command("ip", "netns", "add", host.namespace)
        ip = ("ip", "-n", host.namespace)
        _command(*ip, "link", "add", "eth0", "type", "veth", "peer", "name", host.port, "netns", self.lan)
        _command("ip", "-n", self.lan, "link", "set", host.port, "master", "br0", "up")
        _command(*ip, "link", "set", "lo", "up")
        _command(*ip, "address", "add", f"{address}/24", "dev", "eth0")
        _command(*ip, "link", "set", "eth0", "up")

    def add_rules(self, rules: str) -> None:
        """nft rules of the bridge."""
        _command("ip", "netns", "exec", self.lan, "nft", "-f", "-", stdin=rules + "\n")

    def block(self, one: str, other: str) -> None:
        """These two cannot reach each other, neither way; everybody else can reach both."""
        for source, target in ((one, other), (other, one)):
            addresses = f"ip saddr {self[source].address} ip daddr {self[target].address}"
            self.add_rules(f"add rule bridge lan forward {addresses} drop")

    def open(self) -> None:
        """Nobody is blocked any more."""
        self.add_rules("flush chain bridge lan forward")

    @contextlib.contextmanager
    def capture(self, path: Path) -> Iterator[Capture]:
        """Everything that crosses the bridge while the block runs goes into ``path``."""
        capture = Capture(self.lan, path)
        try:
            yield capture
        finally:
            capture.close()

    def close(self) -> None:
        """End every process in the hosts, then remove them. May be called again."""
        for host in self.hosts.values():
            end_programs(*host.processes, seconds=5)
        for namespace in (*(host.namespace for host in self.hosts.values()), self.lan):
            _remove(namespace)
        shutil.rmtree(self.root, ignore_errors=True)


def _remove(namespace: str) -> None:
    """Kill what still runs in ``namespace`` (processes that others started there) and delete it."""

    def is_empty() -> bool:
        pids = [int(pid) for pid in _command("ip", "netns", "pids", namespace).split()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    if not Path("/run/netns", namespace).exists():
        return
    wait_until(is_empty, 60, f"the end of the processes in {namespace}")
    _command("ip", "netns", "delete", namespace)


def _sweep() -> None:
    """Remove the networks of test processes that were killed before they could."""
    for path in Path("/run/netns").glob(f"{_PREFIX}-*"):
        owner = re.match(rf"{_PREFIX}-(\d+)-", path.name)
        if owner is not None and not Path("/proc", owner[1]).exists():
            _remove(path.name)
