"""Clusters whose coordinator runs on a peer, as far as is known on this machine."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

from notebook_cluster.client.connection import ClusterError, Connection, is_alive
from notebook_cluster.client.stream import wait
from notebook_cluster.protocol.names import is_name
from notebook_cluster.protocol.views import ConnectionFile
from notebook_cluster.security import runtime_directory, write_private

HEAD_FILE, AGENT_FILE = "head.json", "agent.json"
"""In a cluster's folder, written by its window: from where it is led, and the agent of this machine."""


def led_from(runtime: Path) -> str:
    """The peer from where the cluster with this folder is led, as far as is known here; empty: from this machine."""
    try:
        return str(msgspec.json.decode((runtime / HEAD_FILE).read_bytes())["head"])
    except FileNotFoundError:
        return ""
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise ClusterError(f"{runtime / HEAD_FILE} is not readable ({error}): delete it to start anew") from None


def is_led_elsewhere(name: str) -> bool:
    """The cluster ``name`` of this user was led from a peer when it was last looked at from here."""
    return bool(is_name(name) and led_from(runtime_directory() / "clusters" / name))


def same_head(led: str, asked: str) -> bool:
    """``asked`` (a name or HOST:PORT) may mean the peer ``led``."""
    return bool(led) and (asked == led or ":" in asked)


def close_window(file: ConnectionFile) -> None:
    """End the window whose connection file this is, when its head cannot be reached; the cluster goes on, if it is.

    Raises:
        ClusterError: the head can be reached, so the cluster runs.
    """
    connection = Connection(file, "client", live=False)
    try:
        wait(connection.attached)
    except ClusterError:
        os.kill(file.pid, signal.SIGTERM)
        connection.wait_closed()
        return
    finally:
        connection.close()
    raise ClusterError(
        f"cluster {file.cluster!r} runs, led from {file.head}: %cluster attach {file.cluster} goes on with it"
    )


@contextlib.contextmanager
def given_up(name: str) -> Iterator[None]:
    """Forget from where the cluster ``name`` was led, unless what follows fails."""
    path = runtime_directory() / "clusters" / name / HEAD_FILE
    note = path.read_bytes() if path.exists() else None
    path.unlink(missing_ok=True)
    try:
        yield
    except BaseException:
        if note is not None:
            write_private(path, note)
        raise


def agent_of_window(name: str) -> tuple[str, str] | None:
    """Address and key of the agent that a window of cluster ``name`` has started here, if that still runs."""
    try:
        agent = msgspec.json.decode((runtime_directory() / "clusters" / name / AGENT_FILE).read_bytes())
        address, key, pid = f"tcp://127.0.0.1:{int(agent['port'])}", str(agent["public_key"]), int(agent["pid"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None
    return (address, key) if is_alive(pid) else None


def window_options(runtime: Path, head: str) -> dict[str, str]:
    """For a window to the cluster with this folder that is, or shall be, led from ``head``; empty: from where it was
    before.

    Raises:
        ClusterError: it is led from another peer.
    """
    before = led_from(runtime)
    if before and head and not same_head(before, head):
        raise ClusterError(
            f"cluster {runtime.name!r} is led from {before}: %cluster attach {runtime.name}, or %cluster stop "
            f"{runtime.name} before it is led from {head}"
        )
    return {"--head": head or before}
