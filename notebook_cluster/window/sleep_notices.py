"""``python -m notebook_cluster.window.sleep_notices``: says that this machine is about to sleep, and holds it back for
the moment that a hand over takes.

Prints ``ready``, then ``sleeps`` and ``awake`` as they come; a line on standard input lets the machine go. It ends with
standard input. ``error: ...`` and exit status 1: nothing tells here. A process of its own: what it asks of the system
must not be able to end a coordinator.

On Linux logind tells over D-Bus (PrepareForSleep), with a delay lock, which holds for ``InhibitDelayMaxSec``, 5 s where
nobody has changed it: systemd's "Inhibitor Locks". On macOS it is IOKit's IORegisterForSystemPower (Apple's QA1340),
which waits for 30 s.
"""

import ctypes
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable

INHIBIT = (
    "systemd-inhibit", "--what=sleep", "--mode=delay", "--who=notebook-cluster", "--why=hands a cluster over", "cat",
)  # fmt: skip
MONITOR = (
    "gdbus", "monitor", "--system", "--dest", "org.freedesktop.login1", "--object-path", "/org/freedesktop/login1",
)  # fmt: skip
CAN_SLEEP, WILL_SLEEP, HAS_POWERED_ON = 0xE0000270, 0xE0000280, 0xE0000300
"""Messages of IOKit (IOMessage.h)."""
_FRAMEWORKS = "/System/Library/Frameworks"


def say(word: str) -> None:
    """One line for the process that has started this one."""
    print(word, flush=True)


def main() -> int:
    """Until standard input ends."""
    try:
        return _mac() if sys.platform == "darwin" else _linux()
    except (OSError, AttributeError) as error:
        say(f"error: nothing says here that the machine is about to sleep: {error}")
        return 1


# ---- Linux


def _linux() -> int:
    for command in (INHIBIT, MONITOR):
        if shutil.which(command[0]) is None:
            raise OSError(f"{command[0]} is missing")
    said: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    monitor = subprocess.Popen(MONITOR, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    lock = _held()
    assert monitor.stdout is not None
    for source, lines in (("bus", monitor.stdout), ("word", sys.stdin)):
        threading.Thread(target=_read, args=(source, lines, said), daemon=True).start()
    say("ready")
    try:
        while True:
            source, line = said.get()
            if source == "word" and line:
                _let_go(lock)
            elif source == "word":
                return 0
            elif not line:
                raise OSError("the system bus is gone")
            elif "PrepareForSleep" in line and "true" in line:
                say("sleeps")
            elif "PrepareForSleep" in line:
                _let_go(lock)
                lock = _held()
                say("awake")
    finally:
        _let_go(lock)
        monitor.terminate()
        monitor.wait()


def _read(source: str, lines: Iterable[str], said: "queue.SimpleQueue[tuple[str, str]]") -> None:
    for line in lines:
        said.put((source, line))
    said.put((source, ""))


def _held() -> "subprocess.Popen[bytes]":
    """The lock, which lasts as long as what it runs has standard input."""
    return subprocess.Popen(INHIBIT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


def _let_go(lock: "subprocess.Popen[bytes]") -> None:
    assert lock.stdin is not None
    lock.stdin.close()
    lock.wait()


# ---- macOS


def _mac() -> int:
    iokit = ctypes.CDLL(f"{_FRAMEWORKS}/IOKit.framework/IOKit")
    core = ctypes.CDLL(f"{_FRAMEWORKS}/CoreFoundation.framework/CoreFoundation")
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
    iokit.IORegisterForSystemPower.restype = ctypes.c_uint32
    iokit.IORegisterForSystemPower.argtypes = [
        ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), kind, ctypes.POINTER(ctypes.c_uint32),
    ]  # fmt: skip
    iokit.IONotificationPortGetRunLoopSource.restype = ctypes.c_void_p
    iokit.IONotificationPortGetRunLoopSource.argtypes = [ctypes.c_void_p]
    iokit.IOAllowPowerChange.argtypes = [ctypes.c_uint32, ctypes.c_void_p]
    core.CFRunLoopGetCurrent.restype = ctypes.c_void_p
    core.CFRunLoopAddSource.argtypes = [ctypes.c_void_p] * 3
    root = 0

    def told(_: object, service: int, message: int, argument: object) -> None:
        if message == WILL_SLEEP:
            say("sleeps")
            sys.stdin.readline()
        elif message == HAS_POWERED_ON:
            say("awake")
        if message in (CAN_SLEEP, WILL_SLEEP):
            iokit.IOAllowPowerChange(root, argument)

    callback = kind(told)
    port, notifier = ctypes.c_void_p(), ctypes.c_uint32()
    root = iokit.IORegisterForSystemPower(None, ctypes.byref(port), callback, ctypes.byref(notifier))
    if not root:
        raise OSError("IORegisterForSystemPower gives nothing")
    source = iokit.IONotificationPortGetRunLoopSource(port)
    core.CFRunLoopAddSource(core.CFRunLoopGetCurrent(), source, ctypes.c_void_p.in_dll(core, "kCFRunLoopDefaultMode"))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    say("ready")
    core.CFRunLoopRun()
    return 0


def _end_with(parent: int) -> None:
    """Standard input is read by the callback, so the process that started this one is looked for."""
    while os.getppid() == parent:
        threading.Event().wait(1.0)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
