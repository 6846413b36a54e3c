"""What is said when sharing starts: how to add this machine, who may run code on it, and how that ends."""

import getpass
import sys
import time
from collections.abc import Iterator

from notebook_cluster.agent import FOLLOWS_ALL, AgentReady, AgentSettings
from notebook_cluster.security import fingerprint, trusted_coordinators

_QR_BORDER = 2
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def introduce(ready: AgentReady, settings: AgentSettings, *, picture: bool) -> None:
    """Print everything. On a terminal the code is bold and, with ``picture``, drawn as QR where there is room."""
    terminal = sys.stdout.isatty()
    print("\n".join(how_to_add(ready, settings, bold=terminal)), flush=True)
    if terminal and picture and ready.code:
        print()
        draw_qr(add_line(ready.host, ready.pairing_port, ready.code))
    print("\n".join(["", *_who(settings), "", *_how_to_stop(settings)]), flush=True)


def add_line(host: str, port: int, code: str) -> str:
    """What is typed in a notebook to add this machine."""
    return f"%cluster add {host}:{port} --code {code}"


def draw_qr(content: str) -> None:
    """``content`` as a QR picture on the terminal, if it has room for it."""
    import shutil

    import segno

    size = shutil.get_terminal_size()
    picture = segno.make(content, error="l", micro=False)
    width, _ = picture.symbol_size(border=_QR_BORDER)
    if width <= size.columns and width / 2 < size.lines:
        picture.terminal(out=sys.stdout, border=_QR_BORDER, compact=True)
        sys.stdout.flush()


def how_to_add(ready: AgentReady, settings: AgentSettings, *, bold: bool) -> Iterator[str]:
    """Lines: name, address and code of this machine, and what to type where."""
    from notebook_cluster.discovery import IN_GROUP

    where = f"{ready.host}:{ready.pairing_port if ready.code else ready.port}"
    where_heard = f"announced on the local network (mDNS){IN_GROUP}"
    yield f"This machine is shared as {ready.name!r}, port {ready.port}, and {where_heard}."
    if settings.dial:
        yield f"It goes to the cluster at {settings.dial} by itself, and opens no code of its own."
        return
    if not ready.code:
        yield f"No code is open: only who is trusted already can add it, as {ready.name} or {where}."
        return
    yield ""
    yield f"    code     {_BOLD + ready.code + _PLAIN if bold else ready.code}"
    yield f"    address  {where}"
    yield ""
    yield _validity(settings)
    yield "In a notebook on this network:"
    yield f"    %cluster add {ready.name} --code {ready.code}"
    yield f"or, where {ready.name} is not found by its name:"
    yield f"    {add_line(ready.host, ready.pairing_port, ready.code)}"


def _validity(settings: AgentSettings) -> str:
    if not settings.code:
        return "The code is good for one person, once; then another one is shown here."
    end = time.strftime("%H:%M", time.localtime(time.time() + 60 * settings.code_minutes))
    return f"The code is good for any number of people, until {end} ({settings.code_minutes:g} minutes)."


def _who(settings: AgentSettings) -> Iterator[str]:
    user = getpass.getuser()
    yield "Who may run code here:"
    if settings.dial:
        yield f"  - the owner of the cluster at {settings.dial}"
    elif settings.pairing:
        yield "  - whoever was told the code and pairs with it: from then on, without a code"
    for entry in trusted_coordinators(settings.directory).entries():
        since = time.strftime("%Y-%m-%d", time.localtime(entry.since))
        yield f"  - {entry.owner}, paired on {since} (key {fingerprint(entry.key)})"
    yield f"  - user {user!r} on this machine"
    yield (
        f"Their code runs as user {user!r}: it can read, change and delete every file that {user!r} can, use the "
        "network and start programs. Give the code only to people whom you would let type here."
    )
    if settings.limits.owners == 1:
        yield "One owner at a time: while somebody has nodes here, nobody else gets any (see --owners)."
    else:
        yield (
            f"Up to {settings.limits.owners} owners at a time: all their nodes run as user {user!r}, so they can read "
            "each other's files and run code in each other's kernels. Allow it only for people who trust each other."
        )
    limits = settings.limits.lines()
    yield f"Limits: {'; '.join(limits)}." if limits else "Limits: none (see notebook-cluster share --help)."
    yield f"Their code starts in a folder of its own under {settings.directory / 'work'}."


def _how_to_stop(settings: AgentSettings) -> Iterator[str]:
    yield "Stop with Ctrl-C: that ends every kernel that was started here, and what it has started."
    if not FOLLOWS_ALL:
        yield "(This system cannot follow a program that leaves its environment behind as well: that one would go on.)"
    typical = settings.directory.parent.name == "agents"
    option = "" if typical else f" --data-dir {settings.directory}"
    yield f"Take trust back: notebook-cluster trust list{option}, then notebook-cluster trust remove OWNER{option}"
    yield f"Logs: {settings.directory}"
