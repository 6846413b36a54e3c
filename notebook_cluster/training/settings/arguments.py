"""Checks of what people pass to a sync object: each error names the value and the way out."""

import math
import operator
import re
import reprlib
from dataclasses import dataclass
from typing import Any

from notebook_cluster.codecs import CODEC_NAMES, SPARSE_NAMES, get_codec
from notebook_cluster.codecs.dct import MOST
from notebook_cluster.protocol.names import check_name
from notebook_cluster.protocol.runs import LEAST_PATIENCE, PATIENCE
from notebook_cluster.rounds.numerics.bits import float_bits
from notebook_cluster.rounds.numerics.momentum import BFLOAT16, FLOAT32, NOT_KEPT, check_momentum_dtype
from notebook_cluster.rounds.numerics.outer import Descent
from notebook_cluster.training.settings.schedule import Seconds

DEFAULT_GRACE = 5.0
"""Seconds that the rest has once a quorum is at the boundary."""
MEMORY, DISK = "memory", "disk"
"""Where the state of rounds is."""

Settings = dict[str, str | int | float | bool | None]
"""As a checkpoint's manifest has them."""

ALLREDUCE, SERVER = "allreduce", "server"
"""Whose optimiser makes the steps of data-parallel training: each node's own, or that of one node for all."""


MOST_KEPT = 1024
"""Elements of each chunk of 4096: of more of them a codec of four bits for each element sends all in as few bytes."""

_KEEPS = re.compile(rf"({'|'.join(SPARSE_NAMES)})([^a-z0-9]+)(.*)")
"""A codec that keeps some elements, with how many of them, as people may write it."""


@dataclass(frozen=True)
class Strategy:
    """The validated settings of a sync object."""

    strategy: str
    every: int | Seconds
    name: str
    outer_lr: float | None
    """None: by the number of members, decided at each round."""
    outer_momentum: float
    nesterov: bool
    codec: str
    quorum: int | float | None = None
    """None: a round waits for every node; else for so many, or for this share of them."""
    grace: float | None = None
    """Seconds that the others have from then on."""
    fragments: int = 1
    overlap: int = 0
    """Steps that training goes on between sending and receiving."""
    mix: float | None = None
    """The share that the local parameters keep when they receive; None: they keep the work since they sent."""
    over_senders: bool = False
    """Each coordinate is averaged over the nodes that sent it, not over all."""
    beta: float = 1.0
    """How much of the error feedback is sent again; with ``descent`` the momentum's decay."""
    gradients: bool = False
    """Rounds carry gradients, one for each step of the optimiser."""
    mode: str = ""
    """Where rounds carry gradients: ALLREDUCE or SERVER; else empty."""
    scale_lr: bool = False
    exact_every: int = 0
    """In rounds whose number it divides parameters are sent, in float32; 0: never."""
    descent: Descent | None = None
    """Rounds carry momenta, and this is made of their mean: there is no other optimiser."""
    patience: float = PATIENCE
    """Seconds that others wait for a node which makes no progress."""
    freeze_a: bool = False
    """The first factor of every LoRA is not trained."""
    check_frozen: bool = True
    """Nodes whose frozen parameters differ are refused."""
    momentum_dtype: str = FLOAT32
    """How the outer momentum is kept; where ``outer_momentum`` is 0 for good, not at all."""
    state: str = MEMORY
    """Where theta, momentum and error feedback are: in MEMORY or on DISK."""

    def __post_init__(self) -> None:
        check_every(self.every)
        check_name(self.name, "job")
        lr, momentum = self.outer_lr, self.outer_momentum
        if lr is not None and not self.gradients and not (_is_number(lr) and math.isfinite(lr) and lr > 0):
            raise ValueError(f"outer_lr={lr!r}: use a number above 0, or None to choose it by the number of nodes")
        if not (_is_number(momentum) and 0 <= momentum < 1):
            raise ValueError(f"outer_momentum={momentum!r}: use a number from 0 to below 1 (DiLoCo: 0.9)")
        if not isinstance(self.nesterov, bool):
            raise ValueError(f"nesterov={self.nesterov!r}: use True or False")
        if self.momentum_dtype != NOT_KEPT or self.strategy == "DiLoCo":
            check_momentum_dtype(self.momentum_dtype)
        check_state(self.state)
        for what in ("freeze_a", "check_frozen"):
            if not isinstance(getattr(self, what), bool):
                raise ValueError(f"{what}={getattr(self, what)!r}: use True or False")
        if self.over_senders:
            check_sparse(lr, self.beta)
        elif self.descent is None:
            object.__setattr__(self, "codec", check_codec(self.codec))
        check_quorum(self.quorum, self.grace)
        check_patience(self.patience)
        check_streaming(self.every, self.fragments, self.overlap, self.mix)

    @property
    def overshoots(self) -> str:
        """A line on what momentum does to a codec that keeps most of the work back; empty: nothing to say."""
        if not self.outer_momentum or self.codec.partition("-")[0] not in SPARSE_NAMES:
            return ""
        return (
            f"codec={self.codec!r} keeps most of a round's work back, and outer_momentum={self.outer_momentum:g} "
            "multiplies it when it comes: rounds may overshoot. Use outer_momentum=0 with outer_lr=1, or nc.SparseLoCo"
        )

    @property
    def period(self) -> str:
        """``every`` as people read it and as nodes compare it."""
        text = str(self.every) if isinstance(self.every, Seconds) else f"{self.every} steps"
        text += f", parameters every {self.exact_every - 1}" if self.exact_every else ""
        text += f", decay {self.beta:g}{self.descent}" if self.descent is not None else ""
        text += f", momentum in {self.momentum_dtype}" if self.momentum_dtype == BFLOAT16 else ""
        return text + (", lr by nodes" if self.scale_lr else "")

    @property
    def every_step(self) -> bool:
        """Each step of the optimiser is a round."""
        return self.gradients or self.descent is not None

    @property
    def grace_seconds(self) -> float:
        return DEFAULT_GRACE if self.grace is None else float(self.grace)

    @property
    def lr_bits(self) -> int | None:
        return None if self.outer_lr is None else float_bits(self.outer_lr)

    @property
    def momentum_bits(self) -> int:
        return float_bits(self.outer_momentum)

    def as_settings(self) -> Settings:
        """For a checkpoint's manifest."""
        return {
            "strategy": self.strategy, "every": self.period, "codec": self.codec,
            "outer_lr": self.outer_lr, "outer_momentum": self.outer_momentum, "nesterov": self.nesterov,
            "fragments": self.fragments, "overlap": self.overlap, "mix": self.mix,
        } | ({"mode": self.mode} if self.mode else {})  # fmt: skip


def check_every(every: object) -> int | Seconds:
    """``every`` as a whole number of steps, or as it is.

    Raises:
        ValueError: not a whole number from 1, nor Seconds.
    """
    if isinstance(every, Seconds):
        return every
    try:
        steps = operator.index(every)  # type: ignore[arg-type]
    except TypeError:
        steps = 0
    if isinstance(every, bool) or steps < 1:
        got = f"every={every!r}"
        if hasattr(every, "param_groups") or hasattr(every, "apply_gradients"):
            got = f"every= got {type(every).__name__}, which goes to optimizer="
        raise ValueError(f"{got}: use a whole number of steps from 1, for example every=100, or every=nc.Seconds(30)")
    return steps


def check_steps(name: str, value: Any) -> int:
    """``value`` of argument ``name`` as a whole number of steps.

    Raises:
        ValueError: not a whole number from 1.
    """
    if not _is_whole(value, 1):
        raise ValueError(f"{name}={value!r}: use a whole number of steps from 1")
    return int(value)


def check_mode(mode: Any) -> str:
    """Whose optimiser makes the steps of data-parallel training.

    Raises:
        ValueError: neither ALLREDUCE nor SERVER.
    """
    if mode not in (ALLREDUCE, SERVER):
        raise ValueError(f"mode={mode!r}: use {ALLREDUCE!r} or {SERVER!r}")
    return str(mode)


def check_codec(codec: Any) -> str:
    """The name of a codec that people may choose, one name for each.

    Raises:
        ValueError: there is none of this name, or it keeps another number of elements than it can.
    """
    written = _KEEPS.fullmatch(codec) if isinstance(codec, str) else None
    if written is None:
        if codec not in CODEC_NAMES:
            names = ", ".join(map(repr, CODEC_NAMES))
            raise ValueError(f"codec={codec!r}: use one of {names}; 'topk-256' sends 256 of each 4096 numbers, not 64")
        return str(codec)
    base, separator, number = written.groups()
    if separator == "-" and number.isdecimal() and _is_kept(int(number)):
        return get_codec(f"{base}-{int(number)}").name
    raise ValueError(
        f"codec={codec!r}: say how many of each 4096 numbers are sent, a multiple of 8 from 8 to {MOST_KEPT}, for "
        f"example {f'{base}-{_nearest_kept(number)}'!r}"
    )


def _nearest_kept(number: str) -> int:
    """What somebody may have meant who wrote a share, or another number."""
    try:
        value = float(number)
    except ValueError:
        return 256
    wanted = value * 4096 if 0 < value < 1 else value
    return int(min(max(8 * round(wanted / 8), 8), MOST_KEPT)) if math.isfinite(wanted) else 256


def check_quorum(quorum: Any, grace: Any) -> None:
    """Raises:
    ValueError: ``quorum`` is neither a number of nodes nor a share of them, or ``grace`` no time.
    """
    if quorum is not None:
        whole = isinstance(quorum, int) and not isinstance(quorum, bool) and quorum >= 1
        share = isinstance(quorum, float) and 0 < quorum <= 1
        if not (whole or share):
            raise ValueError(
                f"quorum={quorum!r}: use a number of nodes from 1, a share such as 0.75, or None to wait for all"
            )
    if grace is None:
        return
    if quorum is None:
        raise ValueError(f"grace={grace!r} has no meaning while a round waits for all: set quorum= as well")
    if not (_is_number(grace) and math.isfinite(grace) and grace >= 0):
        raise ValueError(f"grace={grace!r}: use a number of seconds from 0, for example grace=5")


def check_patience(patience: Any) -> None:
    """Raises:
    ValueError: ``patience`` is no time, or so short that a node which is well would be left out.
    """
    if not (_is_number(patience) and math.isfinite(patience) and patience >= LEAST_PATIENCE):
        raise ValueError(
            f"patience={patience!r}: use a number of seconds from {LEAST_PATIENCE:g}, for example patience=30; a node "
            "says once a second that it lives"
        )


def check_kept(k: Any) -> int:
    """How many elements of each chunk are sent.

    Raises:
        ValueError: not a multiple of 8 from 8 to 1024.
    """
    if not (_is_whole(k, 8) and _is_kept(k)):
        raise ValueError(f"k={k!r}: use a multiple of 8 from 8 to {MOST_KEPT}, the elements sent of each 4096")
    return int(k)


def _is_kept(k: int) -> bool:
    return k % 8 == 0 and 8 <= k <= MOST_KEPT


def check_coefficients(k: Any) -> int:
    """How many coefficients of each chunk's transform are sent.

    Raises:
        ValueError: not a multiple of 8 from 8 to 128.
    """
    if not (_is_whole(k, 8) and k % 8 == 0 and k <= MOST):
        raise ValueError(f"k={k!r}: use a multiple of 8 from 8 to {MOST}, the coefficients sent of 4096 (DeMo: 32)")
    return int(k)


def check_descent(lr: Any, decay: Any, sign: Any, weight_decay: Any) -> Descent:
    """What DeMo makes of the mean.

    Raises:
        ValueError: ``lr`` is not above 0, ``decay`` no share below 1, ``sign`` not True or False, or ``weight_decay``
        below 0 or so large that a step would turn the signs of the parameters.
    """
    if not (_is_number(lr) and 1e-30 <= lr <= 1e30):
        raise ValueError(f"lr={lr!r}: use a number above 0, for example lr=4e-4")
    if not (_is_number(decay) and 0 <= decay < 1):
        raise ValueError(f"decay={decay!r}: use a number from 0 to below 1, of the momentum (DeMo: 0.999)")
    if not isinstance(sign, bool):
        raise ValueError(f"sign={sign!r}: use True for steps of equal size, or False for the mean momentum itself")
    if not (_is_number(weight_decay) and math.isfinite(weight_decay) and weight_decay >= 0 and lr * weight_decay < 1):
        raise ValueError(f"weight_decay={weight_decay!r}: with lr={lr:g} use a number from 0 to below {1 / lr:g}")
    return Descent(sign, float(weight_decay))


def check_sparse(lr: Any, beta: Any) -> None:
    """Raises:
    ValueError: ``beta`` is no share, or ``lr`` is left to the number of nodes.
    """
    if lr is None:
        raise ValueError("outer_lr=None: SparseLoCo needs a number, 1.0 in the paper")
    if not (_is_number(beta) and 0 <= beta <= 1):
        raise ValueError(f"beta={beta!r}: use a number from 0 to 1 (the paper: 0.95)")


def check_streaming(every: int | Seconds, fragments: Any, overlap: Any, mix: Any) -> None:
    """Raises:
    ValueError: the fragments do not fit into ``every`` steps, or the overlap between two of them.
    """
    if not _is_whole(fragments, 1):
        raise ValueError(f"fragments={fragments!r}: use a whole number from 1")
    if not _is_whole(overlap, 0):
        raise ValueError(f"overlap={overlap!r}: use a whole number of steps from 0 (the paper: at most 5)")
    if mix is not None and not (_is_number(mix) and 0 <= mix < 1):
        raise ValueError(f"mix={mix!r}: use a number from 0 to below 1 (the paper: 0.5), or leave it out")
    if isinstance(every, Seconds):
        return
    if fragments > every:
        raise ValueError(f"fragments={fragments}: one is sent at a time, so every={every} steps bear {every} at most")
    between = every // fragments
    if overlap > between:
        raise ValueError(
            f"overlap={overlap}: with every={every} and fragments={fragments} one is sent every {between} steps, "
            f"and only one may be under way: use overlap={between} or less"
        )


def check_samples(samples: Any) -> float:
    """How many examples a step used.

    Raises:
        ValueError: negative, not finite or not a number.
    """
    try:
        count = float(samples)
    except (TypeError, ValueError, RuntimeError):
        kind = f"a {type(samples).__name__}" if hasattr(samples, "shape") else reprlib.repr(samples)
        raise ValueError(f"samples={kind}: pass the number of examples in the batch, for example len(x)") from None
    if not (math.isfinite(count) and count >= 0):
        raise ValueError(f"samples={samples!r}: pass the number of examples in the batch, for example len(x)")
    return count


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_state(state: Any) -> str:
    """MEMORY or DISK; else ValueError."""
    if state not in (MEMORY, DISK):
        raise ValueError(f"state={state!r}: use {MEMORY!r} or {DISK!r}")
    return str(state)
