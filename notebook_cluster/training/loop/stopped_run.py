"""What a training loop that a Stop has ended goes on with when its cell is run again, bit for bit.

theta and its momentum are held by the job, the same on all nodes. The rest is this node's alone and is kept in memory,
as it was between two steps: its own model with the work that no round has counted, the error feedback, the state of the
optimizers and of what was registered as ``extra=``, the random generators that libraries share, and where the loops
over data are.

A cell that is run again may say other settings than before, a lower learning rate for example: what it makes otherwise
than it made it the first time counts, and people are told so.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from notebook_cluster.processors import free_memory
from notebook_cluster.training.background.job import Job
from notebook_cluster.training.checkpointing.registered import (
    bytes_of,
    copied,
    put_random_states,
    random_states,
    settings_in,
    state_access,
    with_edits,
)
from notebook_cluster.training.loop.progress import TrainingProgress
from notebook_cluster.training.loop.replica import Replica
from notebook_cluster.training.models import mlx_optimizer
from notebook_cluster.training.runtime import Runtime
from notebook_cluster.training.settings.schedule import Schedule


@dataclass
class StoppedRun:
    """What one node keeps.

    Attributes:
        schema: hash of the model's layout.
        model: values as the model's adapter gives them; None: there was no memory for them.
        work: what of it is counted in no round, see :meth:`.Replica.kept_work`.
        work_of: what counts it: the class of the replica, and into how many fragments it is cut.
        since_boundary: steps since the last boundary.
        is_open: the round that this node contributed to was not over.
        objects: name -> (a reference to it, its state).
        settings: name -> its settings as the cell had made it.
    """

    schema: str
    round: int
    state_hash: str
    step: int
    samples: float
    model: Any
    work: Any
    work_of: tuple[type, int]
    since_boundary: int
    is_open: bool
    objects: dict[str, tuple[Callable[[], Any], Any]]
    settings: dict[str, Any]
    random: dict[str, Any]
    positions: Any


@dataclass(frozen=True)
class LostSteps:
    """A Stop came in the middle of a step: nothing was kept, and the work of so many steps before it is in no round."""

    steps: int

    @property
    def line(self) -> str:
        steps = "1 step since then is" if self.steps == 1 else f"{self.steps} steps since then are"
        return f"the Stop came in the middle of a step: {steps} lost" if self.steps else ""


class RegisteredObjects:
    """The optimizers and the ``extra=`` of one sync object, by name: ``optimizer``, ``optimizer 2`` ...

    Raises:
        TypeError: a name of ``extra`` is that of an optimizer.
    """

    def __init__(self, optimizers: Sequence[Any], extra: Mapping[str, Any]) -> None:
        self.optimizers = list(optimizers)
        named = {"optimizer" if not n else f"optimizer {n + 1}": one for n, one in enumerate(optimizers)}
        for name in sorted(named.keys() & extra.keys()):
            raise TypeError(f"extra={{{name!r}: ...}}: an optimizer has this name: use another one")
        self.by_name = named | dict(extra)
        self._settings = {name: self._settings_of(name) for name in self.by_name}
        self._put: dict[str, Any] = {}
        """The states that :meth:`go_on` has put."""
        self._groups: dict[str, Any] = {}
        """The settings that it has put into optimizers that have their states."""

    def add(self, name: str, thing: Any) -> None:
        """Register one more, which has its state already."""
        self.by_name[name] = thing
        self._settings[name] = {}

    @property
    def optimizer(self) -> Any:
        """The first optimizer, or None."""
        return self.optimizers[0] if self.optimizers else None

    @property
    def beside(self) -> dict[str, Any]:
        """All but the first optimizer."""
        return {name: thing for name, thing in self.by_name.items() if name != "optimizer"}

    def _settings_of(self, name: str) -> Any:
        thing = self.by_name[name]
        if hasattr(thing, "param_groups") and hasattr(thing, "state_dict"):
            return (
                {"param_groups": settings_in(thing.state_dict()["param_groups"], arrays=True)}
                if thing.param_groups
                else {}
            )
        access = state_access(name, thing)
        if access.generator or callable(getattr(thing, "parameters", None)):  # a position, or values
            return {}
        return settings_in(access.read(), arrays=mlx_optimizer.is_mlx_optimizer(thing))

    def bytes(self) -> int:
        """What their states take."""
        return sum(bytes_of(state_access(name, thing).read()) for name, thing in self.by_name.items())

    def keep(self) -> tuple[dict[str, tuple[Callable[[], Any], Any]], dict[str, Any]]:
        """Their states, copied, and their settings as the cell had made them."""
        states = {
            name: (_reference(thing), copied(state_access(name, thing).read())) for name, thing in self.by_name.items()
        }
        return states, self._settings

    def _put_groups(self, name: str, optimizer: Any, state: Any, stopped: StoppedRun) -> list[str]:
        """The settings of the groups of an optimizer that has its state still: a scheduler that this cell has made has
        written to them."""
        now = optimizer.state_dict()["param_groups"]
        then, here = stopped.settings[name].get("param_groups", []), self._settings[name].get("param_groups", [])
        groups, names = with_edits(state["param_groups"], then, here, now)
        self._groups[name] = groups
        _put_groups(optimizer, groups)
        return names

    def put_again(self) -> None:
        """The states that :meth:`go_on` has put, once more, whatever was done to them since."""
        for name, state in self._put.items():
            state_access(name, self.by_name[name]).put(state)
        for name, groups in self._groups.items():
            _put_groups(self.by_name[name], groups)
        self.forget()

    def forget(self) -> None:
        self._put.clear()
        self._groups.clear()

    def go_on(self, stopped: StoppedRun, without_optimizer: bool = False) -> tuple[list[str], list[str], list[str]]:
        """Put the states back. A thing that was not made anew is as it was.

        Returns:
            Names that go on, settings that this cell makes otherwise, and lines about what does not fit.
        """
        going, edited, warnings = list[str](), list[str](), list[str]()
        self.forget()
        for name, thing in self.by_name.items():
            if without_optimizer and name == "optimizer":
                continue
            if name not in stopped.objects:
                warnings.append(f"{name} was not registered when the Stop came: it begins anew")
                continue
            reference, state = stopped.objects[name]
            going.append(name)
            if reference() is thing:
                if hasattr(thing, "param_groups"):
                    edited += [f"{name} {_last(one)}" for one in self._put_groups(name, thing, state, stopped)]
                continue
            access = state_access(name, thing)
            try:
                if not access.generator:
                    now = access.read()
                    state, names = with_edits(state, stopped.settings[name], self._settings[name], now)
                    edited += [f"{name} {_last(one)}" for one in dict.fromkeys(names)]
                access.put(copied(state))
                self._put[name] = state
            except Exception as error:  # each library raises its own
                going.remove(name)
                warnings.append(f"{name} is not as it was when the Stop came ({error}): it begins anew")
        lost = {name for name in stopped.objects if name not in self.by_name and not name.startswith("ema ")}
        warnings += [f"{name} is not registered any more: what it held is left" for name in sorted(lost)]
        return going, list(dict.fromkeys(edited)), warnings


@dataclass
class GoneOn:
    """What came of a :class:`StoppedRun`, for people."""

    names: list[str]
    edited: list[str]
    warnings: list[str]
    loops: int
    """Over ``nc.shard``, which go on too; all but the last are over."""


class RunKeeper:
    """Keeps the run of one sync object when a Stop ends its cell, and lets the next one go on with it. Main thread."""

    def __init__(
        self, runtime: Runtime, job: Job, replica: Replica, progress: TrainingProgress, schedule: Schedule
    ) -> None:
        self._runtime, self._job, self._replica = runtime, job, replica
        self._progress, self._schedule = progress, schedule
        self._random: dict[str, Any] | None = None
        self._left: dict[str, Any] = {}

    def keep(self, objects: RegisteredObjects, *, is_open: bool) -> None:
        """Between two steps, or in a wait for the others; ``is_open``: a round has this node's work and is not over."""
        replica, parameters = self._replica, self._replica.parameters
        if not replica.started:
            return
        room = free_memory() > 2 * (4 * parameters.layout.size + objects.bytes())
        states, settings = objects.keep() if room else ({}, {})
        self._job.stopped = StoppedRun(
            schema=parameters.layout.hash("float32"),
            round=replica.round,
            state_hash=replica.state_hash,
            step=self._progress.step,
            samples=self._progress.all_samples,
            model=parameters.whole_snapshot() if room else None,
            work=replica.kept_work() if room else None,
            work_of=_work_of(replica),
            since_boundary=self._schedule.since_boundary(is_open),
            is_open=is_open,
            objects=states,
            settings=settings,
            random=random_states(),
            positions=self._runtime.data.positions(),
        )

    def go_on(self, stopped: StoppedRun, objects: RegisteredObjects, *, same: bool) -> GoneOn | None:
        """After the job is on. None: the state is not the one that the run was stopped on, so it does not go on.
        ``same``: by the same sync object, which has all but the generators and the data."""
        replica, parameters = self._replica, self._replica.parameters
        there = (replica.round, replica.state_hash)
        counted = stopped.is_open and self._job.applied == (stopped.round + 1, True) and there[0] == stopped.round + 1
        if parameters.layout.hash("float32") != stopped.schema or not self.goes_with(stopped):
            return None
        if not counted and there != (stopped.round, stopped.state_hash):
            return None
        if counted and (replica.fragments.gradients or replica.fragments.count > 1):
            return None
        if same:
            self._random, data = stopped.random, self._runtime.data
            loops = data.loops_going_on()
            changed = "the cell is another than the one that was stopped: its loops over nc.shard began anew"
            return GoneOn(list(stopped.objects), [], [changed] if stopped.positions and not loops else [], loops)
        warnings = list[str]()
        if not counted and stopped.model is not None:
            replica.go_on(lambda: parameters.restore_whole(stopped.model), stopped.work)
            self._schedule.steps = stopped.since_boundary
        elif counted and replica.fragments.codec.lossy:
            warnings.append("the round that was open when the Stop came is over: the error feedback begins anew")
        elif not counted:
            warnings.append(
                "there was no memory to keep this node's model and optimizers: its work since the last round is lost"
            )
        if stopped.model is None:
            return GoneOn([], [], warnings, 0)
        self._left = {name: state for name, (_, state) in stopped.objects.items() if name not in objects.by_name}
        names, edited, more = objects.go_on(stopped, replica.fragments.central_optimizer)
        self._random = stopped.random
        self._progress.step, self._progress.all_samples = stopped.step, stopped.samples
        put_random_states(stopped.random)
        self._runtime.data.go_on(stopped.positions)
        return GoneOn(names, edited, [*warnings, *more], len(stopped.positions or ()))

    def goes_with(self, stopped: StoppedRun) -> bool:
        """Whether work of ``stopped`` can go on: another strategy counts it otherwise, and so do other fragments."""
        return stopped.work_of == _work_of(self._replica)

    def left_of(self, name: str) -> Any:
        """The state of what was registered later than the sync object was made, under the same name now; None: none."""
        return self._left.pop(name, None)

    def put_again(self, objects: RegisteredObjects) -> None:
        """Once more what :meth:`go_on` put, but for the model, which only training changes."""
        objects.put_again()
        if self._random is not None:
            put_random_states(self._random)
        self._random = None

    def forget(self, objects: RegisteredObjects) -> None:
        """Training has gone on: nothing is put again."""
        objects.forget()
        self._random = None


def _work_of(replica: Replica) -> tuple[type, int]:
    return type(replica), replica.fragments.count


def _put_groups(optimizer: Any, groups: Any) -> None:
    for group, settings in zip(optimizer.param_groups, groups, strict=False):
        group.update({key: value for key, value in settings.items() if key != "params"})


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _reference(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: None
