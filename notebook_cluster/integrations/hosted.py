"""What the callbacks do alike: a sync object that is made, stepped, looked at and finished by hooks of a library.

In the order of a training: :meth:`HostedSync.begin` compares what the nodes have brought and makes the sync object;
:meth:`~HostedSync.step` after each step of the optimizer; :meth:`~HostedSync.show_global` before the library evaluates
or saves, so that it sees the global parameters, and :meth:`~HostedSync.hide_global` before it trains on;
:meth:`~HostedSync.finish` when its loop is over.
"""

import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import xxhash

from notebook_cluster.integrations.same_data import digest_of
from notebook_cluster.node.namespace import api
from notebook_cluster.protocol.decisions import SHOULD_STOP
from notebook_cluster.training.runtime import current_runtime
from notebook_cluster.training.settings.arguments import check_every

if TYPE_CHECKING:
    from notebook_cluster.node.runtime.decisions import LoopPlace
    from notebook_cluster.training import Round, Seconds
    from notebook_cluster.training.checkpointing.resuming import Momentum
    from notebook_cluster.training.strategies.diloco import LocalSteps

DIVIDED = "divided"
"""In place of a digest: the data was divided between the nodes by this package."""


class HostedSync:
    """``divide``: the line of code that divides data in this library, for errors."""

    def __init__(
        self,
        every: "int | Seconds",
        strategy: "type[LocalSteps] | None",
        settings: dict[str, Any],
        check_data: bool,
        divide: str,
    ) -> None:
        self._strategy, self._every, self._settings = hosted_strategy(strategy, every, settings), every, settings
        self._check_data, self._divide = check_data, divide
        self.sync: LocalSteps | None = None
        self._shown: AbstractContextManager[None] | None = None
        self._finished = False
        self._place: LoopPlace | None = None
        self.left_alone = False
        """This node came while the cell ran, and the others have ended their loops meanwhile."""
        self.stopping = False
        """A node has stopped early, and so do all."""

    def begin(self, model: Any, optimizer: Any, data: Any, steps: int, momentum: "Momentum | None") -> None:
        """``data``: what this node trains on, or DIVIDED. ``steps``: those that a checkpoint has brought, and
        ``momentum`` the outer momentum that it has.

        Raises:
            ValueError: the nodes have the same data, or go on from unlike steps.
            Others: as the strategy.
        """
        self.hide_global()
        self.leave_loop()
        runtime = current_runtime()
        if not (runtime.replaying() or _has_joined()):
            self._compare(data, steps)
        runtime.at_cell_end(lambda status: self.hide_global())  # before the sync object's own end
        start: dict[str, Any] = {"resume": momentum} if momentum else {"fresh": True}
        if self._settings.keys() & {"resume", "fresh"}:
            start = {}
        self._finished = self.left_alone = self.stopping = False
        self.sync = self._strategy(model, self._every, optimizer=optimizer, **start, **self._settings)
        node = api.this_node()
        self._place = node.decisions.enter_loop(whole=True) if node is not None else None

    def step(self, samples: float, loss: Any = None) -> "Round | None":
        """After a step of the optimizer; ``samples``: the examples that went into it."""
        assert self.sync is not None
        done = self.sync.step(loss=loss, samples=samples)
        self.left_alone = done is not None and done.members == (current_runtime().name,) and _has_joined()
        self.stopping = done is not None and _stop_together(False)
        return done

    def show_global(self) -> None:
        """From now on the model holds the global parameters, and ``nc.report`` speaks of them."""
        if self._shown is None and self.sync is not None and not current_runtime().replaying():
            shown = self.sync.global_model()
            shown.__enter__()
            self._shown = shown

    def hide_global(self) -> None:
        """The model holds again what this node has trained."""
        shown, self._shown = self._shown, None
        if shown is not None:
            shown.__exit__(None, None, None)

    @property
    def shows_global(self) -> bool:
        return self._shown is not None

    def finish(self, early: bool = False) -> None:
        """Exchange what is left and wait for the other nodes, once: then the model holds the global parameters.
        ``early``: something has stopped the loop here."""
        self.hide_global()
        if self.sync is None or self._finished:
            return
        self._finished = True
        if early and not (self.stopping or self.left_alone or current_runtime().replaying()):
            name = current_runtime().name
            print(f"{name!r} stops early; the others stop after their next round, too, and then all have one model")
            _stop_together(True)
        self.leave_loop()
        self.sync.finish()

    def leave_loop(self) -> None:
        """The library's loop is over, or was left by an error."""
        if self._place is not None:
            self._place.leave()

    def momentum_for(
        self, model: Any, saved_with: str | None, momentum: "Momentum | None", where: str
    ) -> "Momentum | None":
        """The ``momentum`` of a checkpoint, if ``model`` holds the parameters that it was saved with (their
        :func:`fingerprint`; None: there is none); else a line says that it begins anew."""
        from notebook_cluster.training import DiLoCo

        if self._strategy is not DiLoCo or not self._settings.get("outer_momentum", 1):
            return None
        if saved_with is not None and saved_with == fingerprint(model):
            return momentum
        why = "is not there" if saved_with is None else "belongs to other parameters"
        warnings.warn(f"the outer momentum begins anew: {where} {why}", stacklevel=2)
        return None

    def report(self, numbers: dict[str, Any]) -> None:
        """Show what of ``numbers`` is a number, of the global model where it is shown."""
        taken = ("waiting", "of_run", "step", "samples_per_s")
        plain: dict[str, Any] = {
            name: value for name, value in numbers.items() if isinstance(value, int | float) and name not in taken
        }
        if plain:
            api.report(**plain)

    def _compare(self, data: Any, steps: int) -> None:
        """All nodes of the cell say what they bring, and all raise the same error."""
        divided = isinstance(data, str) and data == DIVIDED
        mine = [current_runtime().name, DIVIDED if divided else digest_of(data), steps]
        rows = api.all_gather(mine)
        if len({row[2] for row in rows}) > 1:
            said = ", ".join(f"{name!r} from step {step}" for name, _, step in rows)
            raise ValueError(
                f"the nodes go on from unlike checkpoints, {said}: resume from the same step on all of them"
            )
        if not self._check_data or len(rows) == 1:
            return
        if unknown := [name for name, digest, _ in rows if digest is None]:
            raise ValueError(
                f"it cannot be seen whether {', '.join(map(repr, unknown))} has other data than the other nodes, as "
                f"it has no length: pass {self._divide}, or check_data=False if each node has its own"
            )
        same: dict[str, list[str]] = {}
        for name, digest, _ in rows:
            same.setdefault(digest, []).append(repr(name))
        for digest, names in same.items():
            if digest != DIVIDED and len(names) > 1:
                raise ValueError(
                    f"{' and '.join(names)} were given the same data, so each would train on all of it: pass "
                    f"{self._divide}, or check_data=False if that is meant"
                )


class HostedCallback:
    """What the callbacks of both libraries are made with."""

    divide: str
    """As :class:`HostedSync` says."""

    def __init__(
        self,
        every: "int | Seconds",
        *,
        strategy: "type[LocalSteps] | None" = None,
        check_data: bool = True,
        **settings: Any,
    ) -> None:
        self._hosted = HostedSync(every, strategy, settings, check_data, self.divide)

    @property
    def sync(self) -> "LocalSteps | None":
        return self._hosted.sync


def hosted_strategy(
    strategy: "type[LocalSteps] | None", every: "int | Seconds", settings: dict[str, Any]
) -> "Callable[..., LocalSteps]":
    """The class of the sync object.

    Raises:
        TypeError: it steps in place of the optimizer, or does not know a setting.
        ValueError: ``every`` is no number of steps.
    """
    from notebook_cluster.training import DiLoCo
    from notebook_cluster.training.strategies.diloco import LocalSteps

    made: Any = DiLoCo if strategy is None else strategy
    if not (isinstance(made, type) and issubclass(made, LocalSteps)):
        name = made.__name__ if isinstance(made, type) else repr(made)
        raise TypeError(
            f"strategy={name}: use nc.DiLoCo, nc.LocalSGD or nc.SparseLoCo, with which the loop's own optimizer steps"
        )
    known = [name for name in inspect.signature(made).parameters if name not in ("model", "every", "optimizer")]
    for name in settings:
        if name not in known:
            raise TypeError(f"{name}= is no setting of {made.__name__}: it has {', '.join(known)}")
    check_every(every)
    return cast("Callable[..., LocalSteps]", made)


def own_optimizer(optimizer: Any) -> Any:
    """The optimizer inside of accelerate's and Lightning's wrappers."""
    while hasattr(optimizer, "optimizer") and hasattr(optimizer.optimizer, "param_groups"):
        optimizer = optimizer.optimizer
    return optimizer


def fingerprint(model: Any) -> str:
    """A hash of the values of all parameters that are trained."""
    import torch

    seen = xxhash.xxh3_128()
    for parameter in model.parameters():
        if parameter.requires_grad:
            seen.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return seen.hexdigest()


def _stop_together(wanted: bool) -> bool:
    """Whether all nodes stop, because one ``wanted`` to: nc.should_stop, the same call in all versions of a library."""
    runtime = api.node_runtime(SHOULD_STOP)
    if runtime.replaying():
        return wanted
    return runtime.decisions.ask(SHOULD_STOP, "SyncCallback", by="any", flag=wanted).stop


def _has_joined() -> bool:
    node = api.this_node()
    info = node.cell_info() if node is not None else None
    return info is not None and info.joined
