"""The settings of a job as people read them: in a report, in a comparison of runs, in a tracker's configuration."""

from notebook_cluster.protocol.runs import Register
from notebook_cluster.rounds.numerics.bits import bits_float


def described_settings(told: Register) -> dict[str, str]:
    """Name as in the constructor -> value; what the strategy has no use for, and what nobody chose, is left out."""
    shown = {"strategy": told.strategy, "codec": told.codec, "every": told.every, "parameters": str(told.parameters)}
    optional = {
        **_outer(told),
        "mode": told.mode,
        "fragments": told.fragments if told.fragments > 1 else "",
        "overlap": told.overlap or "",
        "mix": "" if told.mix is None else f"{told.mix:g}",
        "quorum": "" if told.quorum is None else told.quorum,
        "grace": "" if told.quorum is None else f"{told.grace:g} s",
        "framework": told.framework,
    }
    return shown | {name: str(value) for name, value in optional.items() if value != ""}


def _outer(told: Register) -> dict[str, str]:
    rate = "by the number of nodes" if told.lr_bits is None else f"{bits_float(told.lr_bits):g}"
    if told.every_step:  # the optimiser of the nodes makes the step, or (DeMo) there is one in place of it
        return {} if told.mode or not told.lr_bits else {"lr": rate}
    outer = {"outer_lr": rate, "outer_momentum": f"{bits_float(told.momentum_bits):g}"}
    return outer | ({"nesterov": "yes" if told.nesterov else "no"} if told.momentum_bits else {})
