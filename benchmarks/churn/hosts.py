"""The network of the churn: a desk, peers that share, and the process on the desk that uses the cluster."""

import concurrent.futures
import contextlib
import itertools
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from benchmarks.churn.desk import NAME
from benchmarks.churn.recording import Progress
from tests.full_disk import SmallDisk
from tests.hosts import Share
from tests.namespaces import Network

ROOT = Path(__file__).parents[2]
CODE = "tiger-lamp-42"
DISK_BYTES = 48 << 20
LOCAL = "local"
PRIVATE_AGENT = "notebook_cluster.agent --private"

CLOCKS = '''
"""The clock on the wall of this host: that of the machine, moved by the seconds in a file."""
import mmap, os, struct, time

if "CHURN_CLOCK" in os.environ:
    with open(os.environ["CHURN_CLOCK"], "rb") as file:
        moved = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    seconds, read = time.time, struct.Struct("<d").unpack_from
    nanoseconds = time.time_ns
    time.time = lambda: seconds() + read(moved)[0]
    time.time_ns = lambda: nanoseconds() + int(read(moved)[0] * 1e9)
'''


class DeskClient:
    """Asks the process on the desk; every question is answered by a future."""

    def __init__(self, process: "subprocess.Popen[Any]") -> None:
        self.process = process
        self._numbers = itertools.count(1)
        self._open: dict[int, concurrent.futures.Future[Any]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, what: str, *arguments: Any) -> "concurrent.futures.Future[Any]":
        """The answer; RuntimeError: there is an error instead."""
        number, future = next(self._numbers), concurrent.futures.Future[Any]()
        self._open[number] = future
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"id": number, "do": what, "with": arguments}).encode() + b"\n")
        self.process.stdin.flush()
        return future

    def _read(self) -> None:
        for line in self.process.stdout or ():
            answer = json.loads(line)
            future = self._open.pop(answer["id"])
            if answer["error"]:
                future.set_exception(RuntimeError(answer["error"]))
            else:
                future.set_result(answer["value"])
        for future in self._open.values():
            future.set_exception(RuntimeError("the process on the desk has ended"))


class Hosts:
    """The network, with a running cluster on it. Use as a context."""

    def __init__(self, peers: int) -> None:
        self.peers = [f"peer-{number}" for number in range(1, peers + 1)]
        self.network = Network("desk", *self.peers)
        self.shares: dict[str, Share] = {}
        self.environments: dict[str, dict[str, str]] = {}
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.network)
            root = self.network.root
            self.folder = root / "churn"
            (self.folder / "progress").mkdir(parents=True)
            (root / "site").mkdir()
            (root / "site" / "sitecustomize.py").write_text(CLOCKS)
            self.environments = {name: self._environment(name) for name in ("desk", *self.peers)}
            runtime = self.network["desk"].folder / "run" / "notebook_cluster"
            self.disk = stack.enter_context(mounted(runtime / "clusters"))
            for name in self.peers:
                self.share(name, "--code", CODE)
            self.desk = DeskClient(self._start_desk())
            self.desk.ask("start", CODE, self.peers).result(120)
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def _environment(self, name: str) -> dict[str, str]:
        clock = self.network.root / f"clock-{name}"
        clock.write_bytes(struct.pack("<d", 0.0))
        path = [str(self.network.root / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, path)), "CHURN_CLOCK": str(clock)}

    def _start_desk(self) -> "subprocess.Popen[Any]":
        desk = self.network["desk"]
        (desk.folder / "work").mkdir()
        with open(self.folder / "desk.log", "ab") as log:
            return desk.popen(
                [sys.executable, "-m", "benchmarks.churn.desk"], self.environments["desk"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=desk.folder / "work",
            )  # fmt: skip

    @property
    def runtime(self) -> Path:
        """The cluster's folder on the desk."""
        return self.network["desk"].folder / "run" / "notebook_cluster" / "clusters" / NAME

    @property
    def nodes(self) -> list[str]:
        """One on each host."""
        return [LOCAL, *self.peers]

    def share(self, name: str, *options: str) -> None:
        """Start the peer's agent."""
        self.shares[name] = Share(self.network[name], *options, environment=self.environments[name])

    def move_clock(self, name: str, seconds: float) -> None:
        """From now on the host's clock is so much ahead of the machine's."""
        with open(self.environments[name]["CHURN_CLOCK"], "r+b") as file:
            file.write(struct.pack("<d", seconds))

    def progress(self, node: str) -> Progress:
        """How far the node says it is."""
        return Progress.read(self.folder / "progress" / node)

    def coordinator(self) -> int:
        """Its process id, as its connection file says."""
        return int(json.loads((self.runtime / "connection.json").read_bytes())["pid"])

    def head(self, peer: str) -> int:
        """The process id of the coordinator that runs on the peer. ProcessLookupError: none does."""
        words = ("notebook_cluster.coordinator", f"--head={peer}")
        found = [pid for pid, line in self.processes().items() if all(word in line for word in words)]
        if not found:
            raise ProcessLookupError(f"{peer} leads nothing now")
        return found[0]

    def agent(self, node: str) -> int:
        """The process id of the agent that runs the node; of the desk's own one it may be another after a while.

        Raises:
            ProcessLookupError: the desk has none now.
        """
        if node != LOCAL:
            return self.shares[node].process.pid
        found = [pid for pid, line in self.processes().items() if PRIVATE_AGENT in line]
        if not found:
            raise ProcessLookupError("the desk has no agent now")
        return found[0]

    def processes(self) -> dict[int, str]:
        """Everything that runs on the hosts: process id -> command line."""
        found = {}
        for host in self.network.hosts.values():
            listed = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True)
            for pid in map(int, listed.stdout.split()):
                with contextlib.suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                    found[pid] = line.decode(errors="replace").strip()
        return found


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[SmallDisk]:
    """``folder`` is a small disk of its own."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    options = f"size={DISK_BYTES},mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
