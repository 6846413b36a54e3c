"""``%cluster grow`` and ``shrink``, and the options of ``%cluster start`` that mean an engine and its hosts."""

from collections.abc import Sequence
from typing import Any

from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.parsing import Invocation
from notebook_cluster.magics.session import NotebookSession
from notebook_cluster.protocol.launches import LAUNCH_OPTIONS


def launch_options(call: Invocation) -> dict[str, Any]:
    """What was typed of an engine and its hosts, as the client takes it. UsageError where the engine is missing."""
    typed = {name: call.options[name] for name in LAUNCH_OPTIONS if name in call.options}
    if any(name in call.options for name in ("fake", "slow", "kill")):
        if typed:
            raise UsageError(f"--fake plays machines on this one: leave --{next(iter(typed)).replace('_', '-')} out")
        return {"on": f"fake:{_played(call.options)}"}
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


PLAYED = (
    "mini", "desk", "air", "attic", "lab", "tower", "studio", "couch", "kitchen", "garage", "garden", "library",
    "bridge", "harbour", "cellar", "roof",
)  # fmt: skip
"""What machines of ``--fake`` are called, in order."""


def _played(options: dict[str, Any]) -> str:
    """The machines as ``--on fake:`` takes them: ``mini,desk*4,air@60``."""
    if "fake" not in options:
        raise UsageError("--slow and --kill are for machines of --fake N: say how many")
    names = PLAYED[: options["fake"]]
    slow = _of_each("slow", "=", options, names)
    dies = {name: seconds.removesuffix("s") for name, seconds in _of_each("kill", "@", options, names).items()}
    return ",".join(
        name + (f"*{slow[name]}" if name in slow else "") + (f"@{dies[name]}" if name in dies else "") for name in names
    )


def _of_each(option: str, sign: str, options: dict[str, Any], names: Sequence[str]) -> dict[str, str]:
    found = dict(word.partition(sign)[::2] for word in options.get(option, ()))
    for name, value in found.items():
        if name not in names:
            raise UsageError(f"--{option} {name}{sign}{value}: the machines are {', '.join(names)}")
        if not value.removesuffix("s").replace(".", "", 1).isdecimal():
            example = f"--{option} {name}{sign}{'4' if sign == '=' else '60s'}"
            raise UsageError(f"--{option} {name}{sign}{value}: write {example}")
    return found
