"""Clusters whose coordinator runs on a peer, as far as is known on this machine."""

from pathlib import Path

import msgspec

from notebook_cluster.client.connection import ClusterError
from notebook_cluster.protocol.names import is_name
from notebook_cluster.security import runtime_directory

HEAD_FILE = "head.json"
"""In a cluster's folder, written by its window: from where it is led."""


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


def window_options(runtime: Path, head: str, code: str) -> dict[str, str]:
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
    return {"--head": head or before, "--code": code}
