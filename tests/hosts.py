"""What people do on the hosts of a test network: share a machine, type cells into a notebook, look at what was kept."""

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from notebook_cluster.coordinator.cells.cell_files import CellFiles
from notebook_cluster.journal.reading import read_rounds
from notebook_cluster.journal.records import CommitRecord
from notebook_cluster.journal.store import journal_path
from tests.command import COMMAND
from tests.conftest import wait_until
from tests.ipc_kernels import start_kernel
from tests.namespaces import Host, Network
from tests.notebook_kernel import NotebookKernel

CLUSTER = "lesson"
CODE = "tiger-lamp-42"


class Share:
    """``notebook-cluster share --name NAME`` on ``host``."""

    def __init__(
        self,
        host: Host,
        *options: str,
        name: str = "",
        environment: dict[str, str] | None = None,
        ready: str = "shared as",
    ) -> None:
        self.host = host
        self.name = name or host.name
        self._path = host.folder / f"share-{self.name}.txt"
        with self._path.open("wb") as output:
            self.process: subprocess.Popen[bytes] = host.popen(
                [COMMAND, "share", "--name", self.name, *options],
                environment, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        wait_until(lambda: ready in self.output() or self.process.poll() is not None, 60, lambda: self.output())
        assert self.process.poll() is None, self.output()

    def output(self) -> str:
        return self._path.read_text(errors="replace")

    def port(self) -> int:
        """Of its link, as it printed it."""
        found = re.search(r"shared as '[^']+', port (\d+)", self.output())
        assert found is not None, self.output()
        return int(found[1])

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


ANSWER = """
import json, sys, traceback
from notebook_cluster.client import Cluster
for line in sys.stdin:
    name, expression = json.loads(line)
    try:
        with Cluster.attach(name, kind="client", live=False) as cluster:
            answer = {"value": eval(expression)}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    print(json.dumps(answer), flush=True)
"""


class Beside:
    """A process beside the notebook, which may be busy, that attaches to its cluster for each question."""

    def __init__(self, host: Host) -> None:
        self.process = host.popen(
            [sys.executable, "-c", ANSWER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def value(self, expression: str) -> Any:
        """A JSON value; ``cluster`` is the client."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([CLUSTER, expression]) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def close(self) -> None:
        self.process.communicate(timeout=30)


class HostNotebook(NotebookKernel):
    """A notebook's kernel on ``host``, used from here: over ipc sockets, which no namespace hides."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._beside: Beside | None = None
        folder = host.folder / "work"
        folder.mkdir(exist_ok=True)
        place = host.folder / "k"
        place.mkdir(mode=0o700, exist_ok=True)
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        environment = host.full_environment({"JPY_SESSION_NAME": str(folder / f"{CLUSTER}.ipynb")})
        self.manager, self.client = start_kernel(
            place / "kernel", host.inside(command), env=environment, cwd=str(folder)
        )
        self.works("%load_ext notebook_cluster")

    @property
    def cluster_folder(self) -> Path:
        return self.host.folder / "run" / "notebook_cluster" / "clusters" / CLUSTER

    @property
    def log(self) -> str:
        return (self.cluster_folder / "coordinator.log").read_text(errors="replace")

    def value(self, expression: str) -> Any:
        """A JSON value, computed beside the notebook; ``cluster`` is a client of its cluster."""
        if self._beside is None:
            self._beside = Beside(self.host)
        return self._beside.value(expression)

    def close(self) -> None:
        if self._beside is not None:
            self._beside.close()
        super().close()

    def nodes(self) -> dict[str, str]:
        """Name -> condition."""
        return dict(self.value("[(row.name, row.condition) for row in cluster.state().nodes]"))

    def events(self) -> list[str]:
        """The event list, oldest first."""
        return list(self.value("[row.text for row in cluster.state().events]"))

    def wait_for_nodes(self, names: set[str], timeout: float = 90) -> None:
        """Until exactly these nodes are there and well."""
        wait_until(
            lambda: self.nodes() == dict.fromkeys(names, "ok"),
            timeout,
            lambda: f"{names}: {self.nodes()} {self.events()}",
        )

    # ---- what the cluster keeps on disk ----------------------------------------------------------------------

    def printed(self, node: str) -> str:
        """Everything that ``node`` printed in all cells, as the coordinator took it in."""
        lines = [
            line
            for index in sorted((self.cluster_folder / "cells").glob("*.jsonl"))
            for line in CellFiles(index).read()
            if line.output.node == node and line.output.kind == "stream"
        ]
        return "".join(line.output.content["text"] for line in lines)

    def commits(self) -> list[list[str]]:
        """Whose work each committed round has, in order."""
        records = [noted.record for noted in read_rounds(journal_path(self.cluster_folder))]
        return [sorted(record.commit.members) for record in records if isinstance(record, CommitRecord)]


@contextlib.contextmanager
def notebook_on(host: Host) -> Iterator[HostNotebook]:
    """A notebook whose cluster is stopped at the end."""
    notebook = HostNotebook(host)
    try:
        yield notebook
    finally:
        if (notebook.cluster_folder / "connection.json").exists():
            # Not from the notebook: a test that failed may have left a cell running there.
            host.run([COMMAND, "stop", CLUSTER])
        notebook.close()


def numbers(text: str, word: str) -> list[int]:
    """Every N of the lines ``word N``, in the order in which they are in ``text``."""
    return [int(number) for number in re.findall(rf"^{word} (\d+)$", text, re.MULTILINE)]


@contextlib.contextmanager
def desk_and_two_that_share() -> Iterator[Network]:
    """``desk``, and ``mini`` and ``book`` that share themselves with CODE."""
    with Network("desk", "mini", "book") as network:
        for name in ("mini", "book"):
            Share(network[name], "--code", CODE)
        yield network
