"""The command ``notebook-cluster`` of the environment that the tests run in."""

import os
import subprocess
import sys
from pathlib import Path

COMMAND = str(Path(sys.executable).with_name("notebook-cluster"))


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it and wait for its end; ``environment`` is put on top of this process's."""
    return subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False, env=os.environ | environment
    )
