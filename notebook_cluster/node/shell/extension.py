"""Loading into a kernel, and what happens before and after each cell.

The coordinator puts ``{"notebook_cluster": {"cell": 7, "generation": 3, "nodes": [...]}}`` into the metadata of each
execute_request. Requests without it (completion's helpers, a person's own client) leave everything as it is.
"""

import ast
import atexit
import functools
import logging
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_cluster.node.namespace import last_value
from notebook_cluster.node.runtime import world
from notebook_cluster.node.runtime.running_cell import CellInterrupts
from notebook_cluster.node.shell.adjustments import (
    answer_when_idle,
    follow_headers,
    lose_nothing,
    prepare_shell,
    register_pip,
)
from notebook_cluster.node.shell.progress_bars import bars, install_bars
from notebook_cluster.node.shell.threads import NodeThreads
from notebook_cluster.node.shell.tracebacks import CellNumbers, shorten_tracebacks
from notebook_cluster.training.runtime import set_runtime

if TYPE_CHECKING:
    from notebook_cluster.node.runtime.node_runtime import NodeRuntime

log = logging.getLogger(__name__)

_INTERRUPTED = "interrupted before the cell began"
_VARIABLES = (
    "NOTEBOOK_CLUSTER_CONTROL",
    "NOTEBOOK_CLUSTER_NODE",
    "NOTEBOOK_CLUSTER_INCARNATION",
    "NOTEBOOK_CLUSTER_DEVICE",
)
_loaded: "NodeExtension | None" = None


def load(ip: Any) -> None:
    """Make the kernel of shell ``ip`` a node; says so and does nothing where no agent started it."""
    global _loaded
    if _loaded is not None:
        return
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing or getattr(ip, "kernel", None) is None:
        print(
            "notebook_cluster.node is loaded by agents in the kernels that they start; in a notebook use "
            "%load_ext notebook_cluster"
        )
        return
    from notebook_cluster.node.runtime.node_runtime import NodeRuntime

    # While a cell computes, the runtime waits this long for the interpreter, several times for each message: a Stop, a
    # frame of another node. Python's own 5 ms are for programs that answer nobody.
    sys.setswitchinterval(0.001)
    sockets = os.environ.get("NOTEBOOK_CLUSTER_SOCKETS", "")
    runtime = NodeRuntime(
        os.environ["NOTEBOOK_CLUSTER_NODE"],
        int(os.environ["NOTEBOOK_CLUSTER_INCARNATION"]),
        device=os.environ["NOTEBOOK_CLUSTER_DEVICE"],
        control=os.environ["NOTEBOOK_CLUSTER_CONTROL"],
        sockets=Path(sockets) if sockets else None,
        directory=Path.cwd(),
    )
    set_runtime(runtime)
    _loaded = NodeExtension(ip, runtime)
    _loaded.register()
    install_bars(ip)
    register_pip(ip)
    follow_headers()
    lose_nothing(ip.kernel)
    prepare_shell(ip)


def unload(ip: Any) -> None:
    """Take the hooks out again and end the runtime."""
    global _loaded
    if _loaded is not None:
        _loaded.unregister()
        set_runtime(None)
        _loaded = None


class NodeExtension:
    """The hooks of one kernel."""

    def __init__(self, ip: Any, runtime: "NodeRuntime") -> None:
        self._ip = ip
        self._runtime = runtime
        self._pid = os.getpid()
        self._running: str | None = None
        """Message id of the cell that runs."""
        self._silent = False
        self._level = 0
        """That of ``_levels`` on which the cell that runs was begun."""
        self._refusal: str | None = None
        self._given: dict[str, Any] = {}
        self._gate = _Gate(self)
        self._numbers = CellNumbers(ip)
        self._interrupts = CellInterrupts(ip.kernel)
        self._levels = CellLevels(ip)
        self._threads = NodeThreads(os.environ, runtime.set_threads)
        self._hooks = {
            "pre_execute": self._before,
            "post_execute": self._after_silent,
            "post_run_cell": self._after,
        }

    def register(self) -> None:
        for event, hook in self._hooks.items():
            self._ip.events.register(event, hook)
        self._ip.ast_transformers.append(self._gate)
        last_value.install(self._ip)
        shorten_tracebacks(self._ip)
        self._numbers.install()
        self._runtime.blocked.cell_of_file = self._numbers.of_file
        self._interrupts.install()
        self._levels.install()
        self._runtime.output_backpressure.install()
        self._runtime.on_fetch_variables = functools.partial(answer_when_idle, self._ip, self._runtime.send_control)
        self._give({"rank": 0, "world_size": 1})
        self._refresh()
        atexit.register(self._at_exit)

    def unregister(self) -> None:
        for event, hook in self._hooks.items():
            self._ip.events.unregister(event, hook)
        self._ip.ast_transformers.remove(self._gate)
        last_value.uninstall()
        self._numbers.uninstall()
        self._interrupts.uninstall()
        self._levels.uninstall()
        self._threads.close()
        self._runtime.output_backpressure.uninstall()
        atexit.unregister(self._at_exit)
        self._runtime.close()

    def take_refusal(self) -> str | None:
        """Why the cell that starts now must not run, once. Otherwise its code comes next.

        Raises:
            KeyboardInterrupt: SIGINT came since the kernel took up a request that is no cell of the cluster.
        """
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            return refusal
        if self._running is not None and not self._runtime.enter_cell():
            return _INTERRUPTED
        try:
            self._interrupts.allow()
        except KeyboardInterrupt:
            if self._running is None:
                raise
            return _INTERRUPTED
        return None

    def _parent(self) -> dict[str, Any]:
        parent = self._ip.kernel.get_parent()
        return parent if isinstance(parent, dict) else {}

    def _before(self) -> None:
        """pre_execute: it also fires for widget messages, and on subshell threads; those are no cells."""
        if threading.current_thread() is not threading.main_thread() or self._running is not None:
            return
        parent = self._parent()
        info = world.cell_info(parent)
        if info is None:
            return
        self._refusal = None
        try:
            with self._interrupts.allowed():
                self._runtime.begin_cell(info)
        except KeyboardInterrupt:
            # IPython swallows what a hook raises and would run the cell all the same.
            self._refusal = _INTERRUPTED
            self._runtime.end_cell("interrupted")
            return
        except RuntimeError as error:
            self._refusal = str(error)
            return
        self._running, self._silent = parent["header"]["msg_id"], info.silent
        self._level = self._levels.level
        self._numbers.cell = info.cell
        bars.begin(info.widgets and not info.silent)
        last_value.begin_cell({} if info.replay else parent)
        self._refresh()
        self._threads.begin_cell()

    def _after(self, result: Any) -> None:
        """post_run_cell: fires for cells that are not silent."""
        self._end(result)

    def _after_silent(self) -> None:
        """post_execute: the only one that fires for a silent cell."""
        if threading.current_thread() is threading.main_thread():
            self._refusal = None  # not taken by a cell with a syntax error: it must not stop the next one
        if self._silent:
            self._end(self._ip.last_execution_result)

    def _end(self, result: Any) -> None:
        if threading.current_thread() is not threading.main_thread() or self._running is None:
            return
        if self._levels.level != self._level or self._parent().get("header", {}).get("msg_id") != self._running:
            return
        self._running, self._silent = None, False
        error = None
        if result is not None:
            error = result.error_before_exec if result.error_before_exec is not None else result.error_in_exec
        if error is None:
            status = "ok"
        elif isinstance(error, KeyboardInterrupt):
            status = "interrupted"
        else:
            status = f"error: {type(error).__name__}: {error}"
        try:
            bars.end(failed=error is not None)
            if "torch.distributed" in sys.modules:
                from notebook_cluster.node.namespace.torch_group import name_foreign_group

                name_foreign_group(self._runtime)
        finally:
            try:
                self._runtime.end_cell(status)
            except (Exception, KeyboardInterrupt) as failure:
                self._fail(result, failure)

    def _fail(self, result: Any, failure: BaseException) -> None:
        """What the end of the cell raised is its error: IPython would only print it and call the cell a success, but
        the kernel's reply is made of ``result`` afterwards."""
        if result is not None and result.error_before_exec is None and result.error_in_exec is None:
            result.error_in_exec = failure
        log.debug("the end of the cell failed", exc_info=failure)
        failure.add_note("raised at the end of the cell, after its last line")
        self._ip.showtraceback((type(failure), failure, None))

    def _refresh(self) -> None:
        """The plain names, as the roster says now; also where %reset has taken them away."""
        # nc is not imported: this package's root leads to rooms above this one.
        self._give({"nc": sys.modules["notebook_cluster"], "device": self._runtime.device()})
        roster = self._runtime.roster
        if roster is None:
            return
        row = world.find(roster, self._runtime.name)
        if row is not None:
            self._give({"rank": row.rank, "world_size": len(roster.nodes)})

    def _give(self, names: dict[str, Any]) -> None:
        """Put ``names`` into the namespace, hidden from %who; a name that the user has taken for their own stays."""
        namespace = self._ip.user_ns
        ours = {
            name: value
            for name, value in names.items()
            if name not in namespace or (name in self._given and namespace[name] is self._given[name])
        }
        self._given.update(ours)
        self._ip.push(ours, interactive=False)

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:  # not in a forked child, which has the sockets but not the thread
            self._runtime.close()


class CellLevels:
    """Tells a cell from those that its code runs: %run of a notebook and run_cell() fire the same events for each."""

    def __init__(self, ip: Any) -> None:
        self._ip = ip
        self.level = 0

    def install(self) -> None:
        original = self._ip.run_cell

        @functools.wraps(original)
        def run_cell(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return original(*args, **kwargs)
            self.level += 1
            try:
                return original(*args, **kwargs)
            finally:
                self.level -= 1

        # On the instance: IPython's class stays as it is.
        self._ip.run_cell = run_cell

    def uninstall(self) -> None:
        del self._ip.run_cell


class _Gate(ast.NodeTransformer):
    """Stops a cell whose world could not be fixed: the one place where IPython lets an extension reject a cell."""

    def __init__(self, extension: NodeExtension) -> None:
        self._extension = extension

    def visit(self, node: ast.AST) -> ast.AST:
        refusal = self._extension.take_refusal()
        if refusal is not None:
            from IPython.core.error import InputRejected

            raise InputRejected(refusal)
        return node
