"""What a node says when it registers a sync object, and what people are told that it goes on with.

Parameters and what belongs to rounds are held by the nodes, or come from a checkpoint. What the cell itself makes, its
optimizer, scheduler and data, begins anew when the cell is run again, unless it was made elsewhere.
"""

import contextlib
import platform
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from notebook_cluster.protocol.kept import TakenState
from notebook_cluster.protocol.runs import FrozenRow, Register
from notebook_cluster.rounds.numerics.fragments import Fragments, tiles_of
from notebook_cluster.rounds.numerics.vectors import TensorLayout
from notebook_cluster.training.background.job import Job
from notebook_cluster.training.checkpointing.registered import check_extra
from notebook_cluster.training.checkpointing.resuming import Start
from notebook_cluster.training.loop.round_client import TrainingError
from notebook_cluster.training.loop.stopped_run import RegisteredObjects
from notebook_cluster.training.models import check_optimizer, check_trains, shared_parameter
from notebook_cluster.training.models.frozen import frozen_name, frozen_rows, unread
from notebook_cluster.training.models.parameters import Parameters
from notebook_cluster.training.runtime import Runtime
from notebook_cluster.training.settings.arguments import SERVER, Settings, Strategy


def registration(
    strategy: Strategy,
    parameters: Parameters,
    fragments: Fragments,
    run: tuple[int, int],
    start: Start,
    resume: str,
    fresh: bool,
    warn: Callable[[str], None],
    *,
    taken: bool,
) -> Register:
    """What a node says when it makes a sync object and would begin from ``start``; ``run``: the cell, and which of its
    sync objects it is. ``warn`` is told of frozen parameters that nobody can compare, or that were others in ``start``.
    ``taken``: ``resume`` is what the cluster took over, nobody asked for it here.

    Raises:
        ValueError: the model is not as it was when the sync object was made; names the parameter.
    """
    parameters.check()
    layout = parameters.layout
    return Register(
        job=strategy.name,
        cell=run[0],
        run=run[1],
        strategy=strategy.strategy,
        codec=strategy.codec,
        schema_hash=layout.hash(strategy.codec),
        schema=layout.schema,
        parameters=layout.size,
        every=strategy.period,
        lr_bits=strategy.lr_bits,
        momentum_bits=strategy.momentum_bits,
        nesterov=strategy.nesterov,
        round=start.round,
        state_hash=start.state_hash,
        holds_state=start.held,
        fresh=fresh,
        resume=resume,
        taken=taken,
        resume_round=start.round if start.checkpoint is not None else None,
        resume_manifest_hash=start.manifest_hash,
        resume_names=list(start.names),
        buffers=layout.buffers,
        blocks=sum(wire.blocks for wire in fragments.wires),
        fragments=fragments.count,
        fragment_blocks=[wire.blocks for wire in fragments.wires] if fragments.count > 1 else [],
        every_step=strategy.every_step,
        keeps=fragments.keeps,
        mode=strategy.mode,
        overlap=strategy.overlap,
        mix=strategy.mix,
        quorum=strategy.quorum,
        grace=strategy.grace_seconds if strategy.quorum is not None else 0.0,
        patience=float(strategy.patience),
        about=about_this_process(),
        framework=parameters.framework,
        frozen=_frozen(strategy, parameters, start, warn),
        other_buffers=frozen_rows(parameters.buffers_to_compare()) if strategy.check_frozen else None,
    )


def _frozen(
    strategy: Strategy, parameters: Parameters, start: Start, warn: Callable[[str], None]
) -> list[FrozenRow] | None:
    """None: it is not wanted."""
    if not strategy.check_frozen:
        return None
    rows = frozen_rows(parameters.frozen())
    names, now = unread(rows), frozen_name(parameters.framework, rows)
    if names:
        warn(
            f"frozen parameters whose values cannot be read here ({names}): whether they are equal on all nodes is "
            "not checked"
        )
    if start.frozen and now and start.frozen != now and start.frozen.partition(":")[0] == parameters.framework:
        warn(
            f"round {start.round} was trained over other frozen parameters than the model has now: load those, or "
            "start over with fresh=True"
        )
    return rows


def frozen_settings(register: Register) -> Settings:
    """For a checkpoint's manifest: what was not trained."""
    name = frozen_name(register.framework, register.frozen or [])
    return {"frozen": name} if name else {}


_PACKAGES = ("numpy", "torch", "mlx.core")


def about_this_process(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """``processor``, ``python``, and the versions of those of numpy, torch and mlx that are loaded."""
    found = {"processor": _processor(cpuinfo), "python": platform.python_version()}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name.partition(".")[0]] = str(version)
    return found


def _processor(cpuinfo: Path) -> str:
    try:
        with cpuinfo.open(errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return " ".join(filter(None, (platform.system(), platform.processor() or platform.machine())))


class GoingOn:
    """Made with each sync object of ``job``; ``optimizer`` None: none was given, though the cell may have one."""

    def __init__(self, job: Job, model: Any, optimizer: Any) -> None:
        before, job.made_with = job.made_with, (_reference(model), _reference(optimizer))
        self._same_model, self._same_optimizer = before[0]() is model, before[1]() is optimizer
        self._given = optimizer is not None
        # mlx has the schedule inside the optimizer
        frameworks = {base.__module__.partition(".")[0] for base in type(model).__mro__}
        self._scheduler = [] if "mlx" in frameworks else ["the scheduler"]

    def line(
        self,
        strategy: Strategy,
        round: int,
        checkpoint: str,
        *,
        lossy: bool,
        restored: bool,
        momentum: bool,
        outer_momentum: bool,
        lost: str = "",
        beside: Sequence[str] = (),
        data: bool = False,
    ) -> str:
        """``checkpoint``: where the state comes from; empty: it is held here. ``lossy``: the codec keeps error
        feedback. ``restored``: the optimizer has the state that was saved. ``momentum``: the one that is this node's
        alone goes on, where the strategy has one in place of an optimizer. ``outer_momentum``: it is not zero.
        ``lost``: what a Stop has cost. ``beside``: what was registered with it and has the state that was saved;
        ``data``: the loops over it have their positions."""
        goes_on, anew, more = ["parameters"], list[str](), ""
        if strategy.descent is not None:
            (goes_on if momentum else anew).append("each node's momentum")
        else:
            if strategy.outer_momentum:
                (goes_on if outer_momentum else anew).append("outer momentum")
            anew += ["the error feedback"] if lossy else []
            if restored:
                goes_on.append("the optimizer's state")
                anew += [] if beside else self._scheduler
            elif self._given and self._same_optimizer:
                goes_on.append("the optimizer")
            elif self._same_model and not self._given:
                makes = ["an optimizer", "a scheduler"] if self._scheduler else ["an optimizer"]
                more = f", as do {_listed(makes)} that this cell makes"
            else:
                anew += ["the optimizer", *self._scheduler]
        goes_on += [*beside, *(["the data of nc.shard"] if data else [])]
        anew += [] if data else ["the data"]
        begins = "begins" if len(anew) == 1 and anew != ["the data"] else "begin"
        begin = f"; {_listed(anew)} {begins} anew" if anew else ""
        more += f"; {lost}" if lost else ""
        where = f" of checkpoint {checkpoint!r}" if checkpoint else ""
        way_out = "" if checkpoint else " (fresh=True starts over)"
        return (
            f"training {strategy.name!r} goes on at round {round}{where}: {_listed(goes_on)} go on"
            f"{begin}{more}{way_out}"
        )

    def stopped_line(
        self,
        strategy: Strategy,
        round: int,
        loops: int,
        names: Sequence[str],
        edited: Sequence[str],
        *,
        same: bool,
    ) -> str:
        """``loops``: so many over nc.shard go on. ``names``: optimizers and what else was registered that go on.
        ``same``: it is the sync object that was stopped, with all that it has."""
        goes_on = ["the model with its work since then", *(["outer momentum"] if strategy.outer_momentum else [])]
        goes_on += ["the " + name if name.startswith("optimizer") else name for name in names]
        over = f" ({loops - 1} of its loops are over and give no batches)" if loops > 1 else ""
        goes_on += ["random numbers", *([f"the data of nc.shard{over}"] if loops else [])]
        more = f"; set anew by this cell: {_listed(edited)}" if edited else ""
        if not same and strategy.mode != SERVER and not any(name.startswith("optimizer") for name in names):
            makes = _listed(["an optimizer", *(word.replace("the ", "a ") for word in self._scheduler)])
            more += f"; {makes} that this cell makes begin anew: optimizer= and extra= let them go on"
        if not same and strategy.mode == SERVER:
            more += "; the optimizer's state begins afresh"
        if not loops:
            more += "; other data than those of nc.shard begin as this cell says: sync.global_step counts on"
        return (
            f"training {strategy.name!r} goes on where it was stopped, after round {round}: {_listed(goes_on)} go on"
            f"{more} (fresh=True starts over)"
        )


def _listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([*([", ".join(words[:-1])] if words[:-1] else []), words[-1]])


def _reference(value: Any) -> Any:
    """A weak reference, so that no model is kept alive; of what has none a reference to nothing."""
    with contextlib.suppress(TypeError):
        if value is not None:
            return weakref.ref(value)
    return _nothing


def _nothing() -> object:
    return _NOTHING


_NOTHING = object()


# ---- what a sync object is made of ------------------------------------------------------------------------------


def registered_objects(model: Any, optimizer: Any, extra: Mapping[str, Any] | None) -> RegisteredObjects:
    """``optimizer=``, one or several, and ``extra=``.

    Raises:
        TypeError: one of them has no state that could be kept; names it.
        ValueError: the optimizers step nothing of ``model``.
    """
    several = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = [one for one in several if check_optimizer(one) is not None]
    check_trains(optimizers, model)
    return RegisteredObjects(optimizers, check_extra(extra))


def fragments_of(strategy: Strategy, layout: TensorLayout) -> Fragments:
    """How a model with this layout is cut and sent."""
    return Fragments(
        strategy.codec,
        layout.size - layout.buffers,
        layout.buffers,
        strategy.fragments,
        over_senders=strategy.over_senders,
        gradients=strategy.gradients,
        central_optimizer=strategy.mode == SERVER,
        exact_every=strategy.exact_every,
        tiles=tiles_of(layout) if strategy.descent is not None else None,
        descent=strategy.descent,
        momentum_dtype=strategy.momentum_dtype,
    )


def taken_over(runtime: Runtime, job: Job) -> TakenState | None:
    """The state from which ``job`` goes on because the cluster took it over from one before it; None where there is
    none, or this node holds a state of the job already."""
    rows = runtime.roster.taken if runtime.roster is not None and not job.member.holds else []
    return next((row for row in rows if row.job == job.name), None)


_jobs: "weakref.WeakKeyDictionary[Runtime, weakref.WeakSet[Job]]" = weakref.WeakKeyDictionary()
"""Runtime -> its jobs."""


def job_of(runtime: Runtime, strategy: Strategy, model: Any) -> Job:
    """The job that a new sync object for ``model`` is for.

    Raises:
        TrainingError: another one of this cell has not finished it, or trains parameters of this model.
    """
    name = strategy.name
    attached = runtime.job(name)
    job = attached if isinstance(attached, Job) else Job(runtime, name)
    if attached is None:
        runtime.attach_job(name, job)
    if getattr(job.owner, "unfinished", False):
        raise TrainingError(
            f"job {name!r} has a sync object in this cell that is not finished: call finish() on it before this one is "
            "made, or give this one another name="
        )
    jobs = _jobs.setdefault(runtime, weakref.WeakSet())
    _check_no_other_trains(model, strategy, jobs - {job})
    jobs.add(job)
    return job


def _check_no_other_trains(model: Any, strategy: Strategy, jobs: Iterable[Job]) -> None:
    """Two that send gradients may share: what each adds to a parameter is the same on all nodes."""
    for other in jobs:
        if not getattr(other.owner, "unfinished", False) or (
            strategy.gradients and getattr(other.owner, "sends_gradients", False)
        ):
            continue
        shared = shared_parameter(model, other.made_with[0]())
        if shared:
            raise TrainingError(
                f"{shared!r} of {strategy.name!r} is a parameter of {other.name!r} too, which is not finished: two "
                "sync objects would each average it. Make one for a module that has both models, as "
                "nn.ModuleList([first, second]), or call finish() on the other one before this one is made"
            )


_alone: "weakref.WeakKeyDictionary[Runtime, int]" = weakref.WeakKeyDictionary()
"""Runtime -> the newest cell that was replayed and made a sync object."""


def begins_alone(runtime: Runtime) -> bool:
    """Whether this is the first sync object of a cell that is replayed."""
    before, _alone[runtime] = _alone.get(runtime), runtime.cell()
    return before != runtime.cell()
