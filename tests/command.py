"""The command ``notebook-cluster`` of the environment that the tests run in."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COMMAND = str(Path(sys.executable).with_name("notebook-cluster"))


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it and wait for its end; ``environment`` is put on top of this process's."""
    return subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False, env=os.environ | environment
    )


def end_programs(*processes: "subprocess.Popen[Any]", seconds: float = 30) -> None:
    """SIGTERM to those that still run, SIGKILL to those that have not ended after ``seconds``."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
