"""Numbers that no node of ours says: a registration with them is refused before anything is decided by it, because
what was once decided is decided again at every look, and read again from the log at every start."""

import math

from notebook_cluster.protocol.rounds import OuterChange, Register

MOST = 1 << 53
"""Of anything that is counted."""
_MOST_BITS = 1 << 32

_COUNTS = ("parameters", "buffers", "blocks", "round", "resume_round", "overlap")
_SECONDS = ("quorum", "grace", "patience", "mix")


def impossible(register: Register) -> str:
    """``grace=nan``: the first such number; empty: there is none."""
    for name in _COUNTS:
        value = getattr(register, name)
        if value is not None and not -MOST < value < MOST:
            return f"{name}={value}"
    for name in _SECONDS:
        value = getattr(register, name)
        if value is not None and not (math.isfinite(value) and abs(value) < MOST):
            return f"{name}={value}"
    if not has_bits(OuterChange(lr_bits=register.lr_bits, momentum_bits=register.momentum_bits)):
        return f"outer settings {register.lr_bits}, {register.momentum_bits}"
    listed = register.fragment_blocks
    if register.fragments < 1 or (len(listed) != register.fragments if listed else register.fragments >= MOST):
        return f"fragments={register.fragments}"
    return next((f"fragment_blocks={blocks}" for blocks in listed if not 0 <= blocks < MOST), "")


def has_bits(outer: OuterChange) -> bool:
    """Both are the bits of a float32."""
    return all(0 <= bits < _MOST_BITS for bits in (outer.lr_bits or 0, outer.momentum_bits))
