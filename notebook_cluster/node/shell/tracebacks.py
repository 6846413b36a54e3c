"""How errors look on a node: alike on all of them, without the lines of this package, and with what there is in
place of what was asked for."""

import difflib
import inspect
import linecache
import re
import sys
import sysconfig
import warnings
from types import TracebackType
from typing import Any

_PACKAGE = __name__.partition(".")[0] + "."
_WAITING = ("threading", "IPython.", "ipykernel.")
"""Where a Stop reaches a cell that waits: nobody looks for the cause there."""
_LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})


class CellNumbers:
    """``In[7]`` in a traceback or warning is cell 7 of the cluster, also on a node that joined late or ran fewer."""

    def __init__(self, ip: Any) -> None:
        self._compiler = ip.compile
        self._cells: dict[str, int] = {}
        self.cell = 0

    def of_file(self, filename: str) -> int | None:
        """The cell that code with this file name is of."""
        return self._cells.get(filename)

    def install(self) -> None:
        original = self._compiler.cache

        def cache(transformed_code: str, number: int = 0, raw_code: str | None = None) -> Any:
            name = original(transformed_code, self.cell or number, raw_code)
            self._cells[name] = self.cell or number
            return name

        # On the instance: IPython's class stays as it is.
        self._compiler.cache = cache
        self._format_warning = warnings.formatwarning
        warnings.formatwarning = self._of_cell

    def uninstall(self) -> None:
        del self._compiler.cache
        warnings.formatwarning = self._format_warning

    def _of_cell(
        self, message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        """A warning; the file of a cell has the number of this process in its name, so it would be another on each."""
        cell = self.of_file(filename)
        place = filename if cell is None else f"Cell In[{cell}]"
        return self._format_warning(message, category, place, lineno, line or linecache.getline(filename, lineno))


def shorten_tracebacks(ip: Any) -> None:
    """In shell ``ip`` show what this package raises without the frames below the user's call, and a Stop with the
    user's lines only, without the lines around each: these cost 8 to 50 ms of every node, and a cell that is stopped
    should end at once. What of ours was called or asked for wrongly says what there is."""
    ip.set_custom_exc(
        (KeyboardInterrupt, AttributeError, MemoryError, OSError, RuntimeError, TypeError, ValueError), _show
    )


_CALLED = re.compile(r"((\w+)\.)?(\w+)\(\) (got|missing|takes)\b")
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")
_NOT_OURS = re.compile(rf"module '{_PACKAGE[:-1]}' has no attribute '(\w+)'$")


def _for(names: str, meant: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), meant)


_ARGUMENTS = {
    **_for(
        "checkpoint checkpoints checkpoint_dir ckpt save save_every",
        "sync.checkpoint(NAME) saves a checkpoint, resume=NAME goes on from it",
    ),
    **_for("lr learning_rate", "it is your optimizer's; outer_lr= is for the rounds"),
    **_for(
        "steps inner_steps local_steps sync_every interval period H",
        "every= says how many steps are made between two rounds",
    ),
    **_for("compression compress quantize bits", "codec='int8' and others make it small"),
    **_for("epochs num_epochs", "nc.shard(data, batch_size, epochs=N) goes through the data N times"),
    **_for("rank world_size nodes backend device", "the nodes that run the cell take part"),
    **_for("momentum", "it is your optimizer's; nc.DiLoCo has outer_momentum= for the rounds"),
    **_for("scheduler lr_scheduler sched ema scaler", "extra={'scheduler': scheduler} keeps what has a state_dict()"),
    **_for("every", "with every step a round it has none; nc.DiLoCo(model, every=100) makes 100 steps between two"),
}
"""What people call an argument of a strategy that it has not, and what there is for it."""
_OF_STEP = {
    **_for("sample n num_samples count batch batch_size size", "samples=len(x) is the number of examples in the batch"),
    **_for("grads gradients", "loss.backward() and optimizer.step() come before it, or nc.DataParallel makes the step"),
}
"""The same of ``sync.step``; anything else is taken for a number to show."""
_OF_SYNC = {
    **_for("save save_checkpoint checkpoints", "sync.checkpoint(NAME) saves one"),
    **_for(
        "load load_checkpoint restore resume", "resume=NAME where the sync object is made goes on from a checkpoint"
    ),
    **_for("close end stop done wait finalize join", "sync.finish() is the end"),
    **_for(
        "sync average exchange all_reduce allreduce update", "sync.step(loss=loss) after each step exchanges in time"
    ),
    **_for(
        "state_dict parameters model module",
        "your model is trained in place; after sync.finish() all nodes hold the same",
    ),
    **_for("log report metrics log_metrics", "nc.report(accuracy=...) shows a number"),
}
"""What people look for in a sync object."""
_OF_NC = {
    **_for("FedAvg FederatedAveraging", "nc.LocalSGD averages the parameters"),
    **_for("DDP DistributedDataParallel FSDP Distributed", "nc.DataParallel averages gradients, nc.DiLoCo parameters"),
    **_for("log log_metrics metric metrics", "nc.report(accuracy=...) shows a number"),
    **_for("save save_checkpoint checkpoint", "sync.checkpoint(NAME) saves one, nc.load_checkpoint(NAME) reads it"),
    **_for("load restore", "nc.load_checkpoint(NAME) reads what sync.checkpoint(NAME) saved"),
    **_for(
        "DataLoader DistributedSampler split scatter partition", "nc.shard(data, batch_size=64) gives each its part"
    ),
    **_for("nodes size num_nodes n_nodes", "nc.world_size() nodes run the cell"),
    **_for("name hostname node_name", "nc.node() is this node's name"),
    **_for("average mean reduce", "nc.all_reduce(x, 'mean') is over all nodes"),
    **_for("wait sync synchronize", "nc.barrier() waits for all nodes"),
    **_for("init setup init_process_group start", "nothing is to be set up, the nodes that run the cell take part"),
    **_for("is_main is_master is_main_process", "rank == 0 is one of them"),
    **_for("fit train Trainer", "sync = nc.DiLoCo(model, every=100), then sync.step(loss=loss) in your own loop"),
}
"""And in ``nc``."""


def explain(error: BaseException, traceback: TracebackType | None) -> None:
    """Add to an error of something of ours what there is in its place."""
    kinds = _sync_classes()
    if isinstance(error, ValueError) and "to unpack" in str(error) and _goes_through_a_shard(traceback):
        error.args = (
            f"{error}: a batch of a list or a stream is a list of its items, one of an array or tensor a part of it; "
            "torch.utils.data.default_collate(batch) makes tensors of a list",
        )
    if isinstance(error, AttributeError):
        absent, meant = _NOT_OURS.match(str(error)), ""
        if absent is not None:
            meant = _OF_NC.get(absent[1], "")
        elif isinstance(error.obj, tuple(kinds.values())):
            known = [name for name in dir(error.obj) if not name.startswith("_")]
            close = difflib.get_close_matches(error.name or "", known, 1, 0.75)
            meant = f"do you mean {close[0]!r}?" if close else _OF_SYNC.get(error.name or "", "")
        if meant:
            error.args = (f"{error}: {meant}",)
    elif isinstance(error, TypeError) and (said := _CALLED.match(str(error))) is not None:
        unknown, of = _UNEXPECTED.search(str(error)), kinds.get(said[2])
        if said[3] != "__init__" and hasattr(of, said[3]) and _names(traceback).get(said[2], of) is of:
            _explain_method(error, said, of, unknown[1] if unknown is not None else "")
        else:
            _explain_call(error, said[2] or said[3], traceback, unknown[1] if unknown is not None else "")


def _sync_classes() -> dict[str, type]:
    """Each class of sync objects by name; none where nobody has made one."""
    found = [base for base in [getattr(sys.modules.get(f"{_PACKAGE}training.loop.sync"), "RoundSync", None)] if base]
    for base in found:
        found += base.__subclasses__()
    return {one.__name__: one for one in found}


def _explain_method(error: TypeError, said: re.Match[str], of: Any, unknown: str) -> None:
    """Of a sync object, which has the name that the documentation gives it."""
    parameters = list(inspect.signature(getattr(of, said[3])).parameters.values())[1:]
    placed = [f"{one.name}=" if one.kind is one.KEYWORD_ONLY else one.name for one in parameters]
    meant = f"nc.report({unknown}=...) shows another number" if said[3] == "step" and unknown else ""
    meant = _OF_STEP.get(unknown, meant) if said[3] == "step" else meant
    text = str(error).replace(f"{said[1]}{said[3]}()", f"sync.{said[3]}()", 1)
    error.args = (f"{text}: it is sync.{said[3]}({', '.join(placed)}){f'; {meant}' if meant else ''}",)


def _last(traceback: TracebackType) -> TracebackType:
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback


def _names(traceback: TracebackType | None) -> dict[str, Any]:
    """What names mean where it was raised."""
    frame = _last(traceback).tb_frame if traceback is not None else None
    return frame.f_globals | frame.f_locals if frame is not None else {}


def _goes_through_a_shard(traceback: TracebackType | None) -> bool:
    line, place = _last_line(traceback), f"{_PACKAGE}node.namespace.shard"
    names = _names(traceback)
    return "nc.shard(" in line or any(type(names.get(word)).__module__ == place for word in re.findall(r"\w+", line))


def _last_line(traceback: TracebackType | None) -> str:
    """The line of the code where it was raised."""
    if traceback is None:
        return ""
    last = _last(traceback)
    return linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno)


def _explain_call(error: TypeError, name: str, traceback: TracebackType | None, unknown: str) -> None:
    """Python's own message says ``got multiple values for argument 'every'``: where it is a call of ours the arguments
    are added, those that need no name first."""
    nc = sys.modules[_PACKAGE.rstrip(".")]
    if name not in nc.__all__ or traceback is None:
        return
    if f"nc.{name}(" not in _last_line(traceback) and _names(traceback).get(name) is not getattr(nc, name):
        return  # somebody's own function, of the same name
    parameters = inspect.signature(getattr(nc, name)).parameters.values()
    placed = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
    named = [f"{one.name}=" for one in parameters if one.kind is one.KEYWORD_ONLY]
    more = f"; by name {', '.join(named)}" if named else ""
    twice = _given_for_every(traceback) if "multiple values for argument 'every'" in str(error) else ""
    meant = _ARGUMENTS.get(unknown, twice) if isinstance(getattr(nc, name), type) else ""
    hint = f" ({meant})" if meant else ""
    error.args = (f"{error}{hint}: it is nc.{name}({', '.join(placed)}){more}",)


def _given_for_every(traceback: TracebackType) -> str:
    """What is said of what was put in the place of ``every``: the line names the optimizer, where it was that."""
    names = _names(traceback)
    values = [names.get(word) for word in re.findall(r"\w+", _last_line(traceback))]
    got = [one for one in values if hasattr(one, "param_groups") or hasattr(one, "apply_gradients")]
    optimizers = [type(one).__name__ for one in got if not isinstance(one, type)]
    return f"every= got {optimizers[0]}, which goes to optimizer=" if optimizers else "an optimizer goes to optimizer="


def without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """``traceback`` without the innermost frames, as far as they are this package's."""
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    while len(entries) > 1 and f"{entries[-1].tb_frame.f_globals.get('__name__', '')}.".startswith(_PACKAGE):
        entries.pop()
    return _linked(entries)


def users_lines(traceback: TracebackType | None) -> TracebackType | None:
    """``traceback`` of a Stop: the first frame, which is the shell's and is not shown, and those of the user's code.

    Left out are the frames of this package, of what it calls, and of waiting; a library that the user calls stays.
    """
    entries: list[TracebackType] = []
    inside = False
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        inside = module.startswith(_PACKAGE) or (inside and _is_library(traceback))
        if not entries or not (inside or module.startswith(_WAITING)):
            entries.append(traceback)
        traceback = traceback.tb_next
    return _linked(entries)


def _is_library(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen "))


def _linked(entries: list[TracebackType]) -> TracebackType | None:
    short = None
    for entry in reversed(entries):
        short = TracebackType(short, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return short


def _show(ip: Any, kind: type, value: BaseException, traceback: TracebackType, tb_offset: int | None = None) -> None:
    formatter = ip.InteractiveTB
    mode = formatter.mode
    shorten = without_our_frames
    explain(value, traceback)
    if isinstance(value, KeyboardInterrupt):
        formatter.set_mode("Plain")
        # What was caught while it came is told with frames of its own.
        value.__suppress_context__ = True
        shorten = users_lines
    try:
        ip.showtraceback((kind, value, shorten(traceback)), tb_offset=tb_offset)
    finally:
        formatter.set_mode(mode)
