"""Engines that start agents on other machines: Slurm, SSH, and whatever others add.

May import: ``security``, ``protocol``. Called by: ``coordinator``, and ``server`` for their names.

An engine does what it is for (queues, quotas, placement, requeue); a launcher has it start one command,
``notebook-cluster share --dial ...``, on so many hosts, and says how that stands. It schedules nothing and knows
nothing of nodes.

- :mod:`.launcher`: the protocol ``Launcher``, what it is told and what it says
- :mod:`.finding`: the launcher of a name: ours, or one of the entry points ``notebook_cluster.launchers``
- :mod:`.commands`: how the programs of an engine are run: with a time limit, and their own words when they refuse
- :mod:`.slurm`, :mod:`.ssh`: one engine each
- :mod:`.children`: what launchers share whose hosts are processes of this one: SSH, and played machines
- :mod:`.pretended`: no engine: machines that are played on this one; :mod:`.pretended_machine` is one of them
- :mod:`.ipyparallel_engines`: each engine that ipyparallel has a launcher for; :mod:`.ipyparallel_call` has that start
  and stop them, in a process of its own
"""

from notebook_cluster.launchers.finding import find_launcher, known_engines
from notebook_cluster.launchers.launcher import HostState, Launch, Launcher, LaunchError, LaunchOrder, LaunchState

__all__ = [
    "HostState",
    "Launch",
    "LaunchError",
    "LaunchOrder",
    "LaunchState",
    "Launcher",
    "find_launcher",
    "known_engines",
]
