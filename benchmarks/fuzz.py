"""Does anything that comes over the network crash, stop or bloat a peer?

Sends bad frames to the link, mesh and pairing ports of peers, and to the reception and the views' port of a
coordinator. All of them are real and in a process of their own, and let the attackers' keys in, so that the frames
reach what reads them. After each batch an honest client on each port must be answered.

One JSON line: ``frames`` sent, ``seconds``, ``crashes`` (the process ended), ``hangs`` (an honest client was not
answered), ``growth_mb`` (resident memory after the warm-up compared to the end) and ``dropped`` frames by port.
"""

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from benchmarks.common import private_folders
from benchmarks.fuzz_clients import Attack, Hang, LinkAttack, MeshAttack, PairingAttack, save
from benchmarks.fuzz_coordinator import ReceptionAttack, ViewsAttack
from notebook_cluster.security import Identity

BATCH = {"link": 1000, "mesh": 1000, "pairing": 280, "reception": 500, "views": 500}
FRAMES_A_BATCH = sum(BATCH.values()) + 2 * len(BATCH)
"""And on each port one that is too large and one that is no ZeroMQ."""
WARM_UP = 0.2
"""Part of the frames after which the memory is looked at for the first time."""
_START_TIMEOUT = 60.0


class Crash(Exception):
    """The servers' process has ended."""


class Servers:
    """The process under attack and one Attack for each of its ports."""

    def __init__(self, folder: Path, start: int) -> None:
        folder.mkdir(mode=0o700)
        self.log = folder / "log.txt"
        self._errors = (folder / "errors.txt").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fuzz_servers", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        self.attacks: list[Attack] = []
        try:
            self._begin(start)
        except (Hang, Crash) as error:
            self.close()
            text = (folder / "errors.txt").read_text(errors="replace")
            raise SystemExit(f"the servers did not start: {error}\n{text}") from None

    def _begin(self, start: int) -> None:
        ready = self._answer(_START_TIMEOUT)
        self.mesh = MeshAttack(ready["mesh_port"], ready["mesh_key"], start)
        self.attacks = [
            LinkAttack(ready["link_port"], ready["link_key"], start),
            self.mesh,
            PairingAttack(ready["pairing_port"], start),
            reception := ReceptionAttack(ready["reception_port"], ready["reception_key"], start),
            ViewsAttack(ready["views_address"], ready["views_key"], Identity(*ready["views_identity"]), start),
        ]
        self.command("agents", reception.keys)
        self.command("roster", [msgspec.to_builtins(row) for row in self.mesh.roster])
        # The honest cluster is there from the beginning: a private agent ends when the last one is released.
        self._check()

    def command(self, *words: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(words).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise Crash from None
        return self._answer(20.0)

    def _answer(self, timeout: float) -> dict[str, Any]:
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], timeout)[0]:
            raise Hang(f"the process did not answer a command within {timeout:g} s")
        line = output.readline()
        if not line:
            raise Crash
        answer: dict[str, Any] = json.loads(line)
        return answer

    def batch(self) -> None:
        """A batch to each port, then honest clients. Raises Crash or Hang."""
        for attack in self.attacks:
            attack.run(BATCH[attack.name])
            attack.oversized()
        self._check()
        self.command("next")
        self.mesh.cell += 1

    def _check(self) -> None:
        for attack in self.attacks:
            try:
                attack.check()
            except zmq.Again:
                raise Hang(f"{attack.name}: the server takes nothing from an honest client") from None

    def memory(self) -> float:
        """Resident megabytes once what was sent is dealt with."""
        for _ in range(20):
            before = self.command("counts")
            time.sleep(0.25)
            if self.command("counts") == before:
                break
        return psutil.Process(self._process.pid).memory_info().rss / 1e6

    def dropped(self) -> dict[str, Any]:
        counts: dict[str, Any] = self.command("counts")["dropped"]
        return counts

    def has_ended(self) -> bool:
        try:
            return self._process.wait(0.5) is not None
        except subprocess.TimeoutExpired:
            return False

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for attack in self.attacks:
            attack.close()
        self._errors.close()


def attack(frames: int, start: int) -> dict[str, Any]:
    """The figures of one run."""
    crashes = hangs = sent = 0
    growth, began = 0.0, time.monotonic()
    with private_folders() as folder:
        servers = Servers(folder / "s0", start)
        servers.mesh.fill()
        base: float | None = None
        while sent < frames:
            sent += FRAMES_A_BATCH
            try:
                servers.batch()
            except (Hang, Crash) as trouble:
                ended = servers.has_ended()
                crashes, hangs = crashes + ended, hangs + (not ended)
                _keep(servers, trouble)
                servers.close()
                servers, base = Servers(folder / f"s{sent}", start + sent), None
            if base is None and sent >= WARM_UP * frames:
                base = servers.memory()
        if base is not None:
            growth = max(servers.memory() - base, 0.0)
        dropped = servers.dropped()
        servers.close()
    return {
        "benchmark": "fuzz", "frames": sent, "seconds": round(time.monotonic() - began, 1), "crashes": crashes,
        "hangs": hangs, "growth_mb": round(growth, 2), "dropped": dropped,
    }  # fmt: skip


def _keep(servers: Servers, trouble: Exception) -> None:
    """Say where the frames are that did it."""
    folder = Path(tempfile.mkdtemp(prefix="nb-fuzz-"))
    for one in servers.attacks:
        save(one.sent, folder / f"{one.name}.msgpack")
    (folder / "log.txt").write_bytes(servers.log.read_bytes()[-100_000:] if servers.log.exists() else b"")
    print(f"{trouble or type(trouble).__name__}: the last frames and the log are in {folder}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description="bad frames to every port")
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--start", type=int, default=1, help="another number makes other frames (%(default)s)")
    arguments = parser.parse_args()
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    print(json.dumps(attack(arguments.frames, arguments.start)))


if __name__ == "__main__":
    main()
