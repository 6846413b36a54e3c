"""How a window is asked to run, and the files by which views find it."""

import os
from pathlib import Path

import msgspec

from notebook_cluster.coordinator.view_server import ViewServer
from notebook_cluster.peering.candidates import Candidate
from notebook_cluster.protocol import PROTOCOL_VERSION, VERSION
from notebook_cluster.protocol.heads import HeadState
from notebook_cluster.protocol.views import ConnectionFile
from notebook_cluster.security import write_private

HEAD_FILE = "head.json"
"""In the cluster's folder, from its start to its end: from where it is led."""


class WindowSettings(msgspec.Struct):
    """``lease``: seconds without any view after which the window ends; the cluster goes on. ``head_lease``: seconds
    without any view and without a running cell after which the cluster ends. ``code``: pairs with the head."""

    cluster: str
    head: str
    directory: str
    runtime: Path
    lease: float = 600.0
    head_lease: float = 86400.0
    agent_lease: float = 600.0
    fresh: bool = False
    only_look: bool = False
    code: str = ""
    known: str = ""
    progress: int = -1


class HeadNote(msgspec.Struct):
    """From where a cluster is led. ``token``: of the hand over with which it goes there."""

    head: str
    key: str = ""
    address: str = ""
    token: str = ""


def write_note(runtime: Path, head: Candidate, token: str = "") -> None:
    """For a window after this one. OSError: it cannot be written."""
    note = HeadNote(head.name, head.key, head.address, token)
    write_private(runtime / HEAD_FILE, msgspec.json.encode(note))


def read_note(runtime: Path) -> HeadNote | None:
    """What a window before this one has noted; None: none, or nothing that can be read."""
    try:
        return msgspec.json.decode((runtime / HEAD_FILE).read_bytes(), type=HeadNote)
    except (OSError, msgspec.DecodeError):
        return None


def write_files(settings: WindowSettings, views: ViewServer, address: str, head: Candidate, state: HeadState) -> None:
    """What a view needs to dial ``views`` at ``address``, and a window after this one to find the head.

    Raises:
        OSError: they cannot be written.
    """
    write_note(settings.runtime, head)
    connection = ConnectionFile(
        cluster=settings.cluster, address=address, server_key=views.socket.server.public_key,
        view_public_key=views.socket.view_identity.public_key, view_secret_key=views.socket.view_identity.secret_key,
        pid=os.getpid(), epoch=state.epoch, protocol=PROTOCOL_VERSION, version=VERSION,
        run_log=str(settings.runtime / "run.journal"), head=head.name, ran=state.found,
    )  # fmt: skip
    write_private(settings.runtime / "connection.json", msgspec.json.encode(connection))
