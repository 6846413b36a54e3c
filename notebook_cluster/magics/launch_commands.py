"""``%cluster grow`` and ``shrink``, and the options of ``%cluster start`` that mean an engine and its hosts."""

from typing import Any

from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.parsing import Invocation
from notebook_cluster.magics.session import NotebookSession
from notebook_cluster.protocol.launches import LAUNCH_OPTIONS


def launch_options(call: Invocation) -> dict[str, Any]:
    """What was typed of an engine and its hosts, as the client takes it. UsageError where the engine is missing."""
    typed = {name: call.options[name] for name in LAUNCH_OPTIONS if name in call.options}
    if typed and "on" not in typed:
        needs = (
            f"%cluster {call.command.name} --{next(iter(typed)).replace('_', '-')} is for hosts that an engine starts"
        )
        raise UsageError(f"{needs}: name it with --on slurm, or --on ssh:HOST,HOST")
    return typed


def grow(session: NotebookSession, call: Invocation) -> None:
    cluster, options = session.require(), launch_options(call)
    if not options:
        raise UsageError("%cluster grow: name the engine with --on slurm, or --on ssh:HOST,HOST")
    cluster.grow(**options, on_progress=lambda text: print(text, flush=True))


def shrink(session: NotebookSession, call: Invocation) -> None:
    given = session.require().shrink(int(call.argument))
    print(f"given back: {', '.join(given)}", flush=True)
