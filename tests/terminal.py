"""A program on a terminal of its own, typed at by a test."""

import fcntl
import os
import re
import signal
import struct
import subprocess
import termios
import threading
import time

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]|\r")
_WHERE = b"\x1b[6n"
"""The question for the cursor's place, which a real terminal answers."""


class TerminalProcess:
    """``command`` with a controlling terminal of ``columns`` by ``lines``; :meth:`close` ends it."""

    def __init__(
        self, command: list[str], *, columns: int = 160, lines: int = 60, environment: dict[str, str] | None = None
    ) -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
            | {"TERM": "xterm"}
            | (environment or {}),
        )
        os.close(theirs)
        self._output = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    @property
    def output(self) -> str:
        """What was shown, without what moves the cursor or colours."""
        return _ESCAPE.sub("", self._output.decode(errors="replace"))

    def until(self, text: str, seconds: float = 60, *, after: int = 0) -> int:
        """Wait until ``text`` was shown from place ``after`` on; returns the place behind it."""
        deadline = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None and not self._reader.is_alive()
            place = self.output.find(text, after)
            if place >= 0:
                return place + len(text)
            assert not ended, f"the program ended without {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"{text!r} was not shown in {seconds} s:\n{self.output}"
            time.sleep(0.02)

    def close(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it if it runs; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self._reader.join(5)
            os.close(self._ours)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 65536)
            except OSError:
                # Linux: nobody has the other end open any more.
                return
            self._output += data
            if _WHERE in data:
                os.write(self._ours, b"\x1b[1;1R")
