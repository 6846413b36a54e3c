"""Ends the kernels, and what they started, when the agent dies without a chance to do so itself (SIGKILL).

A shell process waits on a pipe from the agent: each line adds or drops a process group. When the pipe closes, because
the agent ended in whatever way, the groups that are left are killed and the agent's socket folder is removed.
ipykernel's own check of its parent would end a busy kernel too, but a second later and without its children.
"""

import subprocess
from pathlib import Path

_SCRIPT = r"""
groups=' '
while read -r action group; do
  case "$action" in
    add) groups="$groups$group " ;;
    drop) case "$groups" in *" $group "*) groups="${groups%% $group *} ${groups#* $group }" ;; esac ;;
  esac
done
for group in $groups; do kill -s KILL -- "-$group" 2>/dev/null; done
# Also what they have started in sessions of its own, as long as it has kept its environment.
for place in /proc/[0-9]*; do
  if grep -qaF "NOTEBOOK_CLUSTER_CELL_MARK=$1/" "$place/environ" 2>/dev/null; then
    kill -s KILL "${place#/proc/}" 2>/dev/null
  fi
done
rm -rf -- "$1"
"""


class Watchdog:
    """One shell process for the life of the agent.

    Args:
        directory: the agent's socket folder, removed at the end.
    """

    def __init__(self, directory: Path) -> None:
        # A session of its own: a Ctrl-C in the agent's terminal is not for the watchdog, nor is a kill of its group.
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "notebook-cluster-watchdog", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Of the shell."""
        return self._process.pid

    def add(self, group: int) -> None:
        """Kill process group ``group`` when the agent ends."""
        self._tell(f"add {group}\n")

    def drop(self, group: int) -> None:
        """The group is gone."""
        self._tell(f"drop {group}\n")

    def close(self) -> None:
        """Kill what is left, remove the folder, wait for the shell to end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            # Somebody killed the shell: the kernels' own check of their parent is left.
            pass
