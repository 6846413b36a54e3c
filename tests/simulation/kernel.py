"""A node's process: the sockets of a kernel and the real runtime of a node, without IPython.

A cell's source is the name of a program of the world, which is called on the process's main thread as a cell is.
"""

import asyncio
import hmac
import itertools
import json
import os
from collections import deque
from unittest import mock

import msgspec
import zmq

from notebook_cluster.node.runtime import world as cells
from notebook_cluster.node.runtime.node_runtime import NodeRuntime
from tests.simulation import pump, sockets
from tests.simulation.loop import SimulatedLoop
from tests.simulation.schedule import Process, Thread

DELIMITER = b"<IDS|MSG>"
STARTS = (0.3, 1.2)
"""Seconds that a kernel takes to start."""
_PORTS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")


class SimulatedKernelProcess:
    """In the place of :class:`notebook_cluster.agent.kernels.supervisor.KernelProcess`."""

    world = None

    def __init__(self, options, on_end):
        self._options, self._on_end = options, on_end
        self._loop = asyncio.get_running_loop()
        schedule = self.world.schedule
        agent = schedule.process
        name = options.environment["NOTEBOOK_CLUSTER_NODE"]
        self.kernel = Process(schedule, agent.host, f"kernel {name}")
        self.kernel.parent = agent
        self.pid = self.kernel.pid
        self.connection = {"transport": "ipc", "ip": str(options.sockets), "key": b"key"}
        self.connection |= {port: number for number, port in enumerate(_PORTS, 1)}
        self.ended = asyncio.Event()
        self.return_code = None
        self.kernel.on_end.append(self._process_ended)
        agent.on_end.append(lambda process: self.kernel.end())
        self.world.kernel_began(self.kernel, options)
        self.running = KernelInside(self.world, self.kernel, options, self.connection)

    @classmethod
    async def start(cls, options, on_end, programs):
        await asyncio.sleep(cls.world.schedule.rng.uniform(0.01, 0.05))
        return cls(options, on_end)

    def _process_ended(self, process):
        self.world.kernel_ended(process)

        def tell():
            self.return_code = process.exit_code
            self.ended.set()
            self._on_end(self)

        if self._loop._process.alive:
            self._loop.call_later(0.001, tell)

    def interrupt(self):
        if self.kernel.alive:
            self.running.interrupt()

    def wake(self):
        pass

    def look_below(self):
        pass

    def kill(self):
        self.kernel.end(-9)

    def reason(self):
        return "killed by SIGKILL (out of memory? see dmesg)" if self.return_code == -9 else f"exit {self.return_code}"

    def ended_by_itself(self):
        return self.return_code not in (None, -15, -1)

    def log_lines(self, count):
        return []

    def remove_files(self):
        pass


class KernelInside:
    """What runs in the process."""

    def __init__(self, world, process, options, connection):
        self._world, self._process = world, process
        self._options, self._connection = options, connection
        self._requests = deque()
        self._numbers = itertools.count(1)
        self.runtime = None
        self._name = options.environment["NOTEBOOK_CLUSTER_NODE"]
        self.main = process.main = Thread(process, self._main, "main")
        self.main.start()

    def interrupt(self):
        if self.runtime is not None and self.runtime.cell():
            self.main.interrupt()

    # ---- the main thread

    def _main(self):
        schedule = self._world.schedule
        self.main.park(schedule.rng.uniform(*STARTS))
        environment = self._options.environment
        places = environment.get("NOTEBOOK_CLUSTER_SOCKETS", "")
        with mock.patch.dict(os.environ, environment):
            self.runtime = NodeRuntime(
                environment["NOTEBOOK_CLUSTER_NODE"],
                int(environment["NOTEBOOK_CLUSTER_INCARNATION"]),
                device=environment["NOTEBOOK_CLUSTER_DEVICE"],
                control=environment["NOTEBOOK_CLUSTER_CONTROL"],
                sockets=self._world.path(places) if places else None,
                directory=self._options.directory,
            )
        self._process.runtime = self.runtime
        self._world.runtime_began(self._process, self.runtime)
        self._loop = SimulatedLoop(self._process, self._world.loop_error)
        self._process.main = self.main
        self._loop.call_soon(self._serve)
        while True:
            while not self._requests:
                self.main.park()
            self._execute(*self._requests.popleft())

    def _execute(self, identity, parts):
        header = json.loads(parts[0])
        content = json.loads(parts[3])
        source = content["code"]
        if "exit_now" in source:
            self._process.end(0)
            self.main.park()
        parent = {"header": header, "metadata": json.loads(parts[2]), "content": content}
        self._publish(parts[0], "status", {"execution_state": "busy"})
        status, error = "ok", None
        info = cells.cell_info(parent)
        began = False
        try:
            if info is not None:
                self.runtime.begin_cell(info)
                began = True
                if not self.runtime.enter_cell():
                    raise KeyboardInterrupt
            self._world.run_program(source, self._process, self.runtime, info)
        except KeyboardInterrupt:
            status, error = "interrupted", ("KeyboardInterrupt", "")
        except Exception as raised:
            self._world.program_failed(self._process, raised)
            status, error = f"error: {type(raised).__name__}: {raised}", (type(raised).__name__, str(raised))
        self.main.interrupts = 0
        if began:
            try:
                self.runtime.end_cell(status)
            except (Exception, KeyboardInterrupt) as raised:
                self._world.program_failed(self._process, raised)
                error = error or (type(raised).__name__, str(raised))
        reply = {"status": "ok", "execution_count": 1, "user_expressions": {}, "payload": []}
        if error is not None:
            reply = {"status": "error", "ename": error[0], "evalue": error[1], "traceback": [], "execution_count": 1}
            self._publish(parts[0], "error", {"ename": error[0], "evalue": error[1], "traceback": []})
        self._reply(self._shell, identity, parts[0], "execute_reply", reply)
        self._publish(parts[0], "status", {"execution_state": "idle"})

    # ---- the sockets

    def _serve(self):
        context = sockets.Context()
        self._iopub = context.socket(zmq.PUB)
        self._bind(self._iopub, "iopub_port")
        self._shell = self._listen(context, "shell_port", self._on_shell)
        self._control = self._listen(context, "control_port", self._on_control)
        self._listen(context, "stdin_port", lambda identity, parts: None)

    def _bind(self, socket, port):
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind(f"ipc://{self._connection['ip']}-{self._connection[port]}")

    def _listen(self, context, port, on_message):
        socket = context.socket(zmq.ROUTER)
        self._bind(socket, port)

        def received(frames):
            on_message(frames[0], frames[3:])

        pump.Pump(socket, received)
        return socket

    def _on_shell(self, identity, parts):
        if json.loads(parts[0])["msg_type"] == "execute_request":
            self._requests.append((identity, parts))
            self.main.wake()

    def _on_control(self, identity, parts):
        kind = json.loads(parts[0])["msg_type"]
        if kind == "shutdown_request":
            self._loop.call_later(0.05, self._process.end, 0)
            return
        self._publish(parts[0], "status", {"execution_state": "busy"})
        self._reply(self._control, identity, parts[0], kind.replace("request", "reply"), {"status": "ok"})
        self._publish(parts[0], "status", {"execution_state": "idle"})

    def _frames(self, parent, kind, content):
        header = {
            "msg_id": f"{self._process.pid}-{next(self._numbers)}", "session": "kernel", "username": "kernel",
            "date": "2026-01-01T00:00:00Z", "msg_type": kind, "version": "5.4",
        }  # fmt: skip
        parts = [msgspec.json.encode(header), parent, b"{}", msgspec.json.encode(content)]
        signature = hmac.digest(b"key", b"".join(parts), "sha256").hex().encode()
        return [DELIMITER, signature, *parts]

    def _publish(self, parent, kind, content):
        self._iopub.send_multipart([kind.encode(), *self._frames(parent, kind, content)])

    def _reply(self, socket, identity, parent, kind, content):
        socket.send_multipart([identity, *self._frames(parent, kind, content)])
