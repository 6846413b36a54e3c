"""Large arrays in memory that was used before.

- :mod:`.kept`: freed memory that stays with the process
- :mod:`.reuse`: arrays that are handed out again once nothing refers to them
- :mod:`.scratch`: arrays that are handed out again for the same use

May import: nothing of ours. Called by: ``training``, ``collectives``, ``codecs``. Importing this room does not
import numpy.
"""

from notebook_cluster.memory.kept import keep_freed
from notebook_cluster.memory.reuse import Memory
from notebook_cluster.memory.scratch import Scratch

__all__ = ["Memory", "Scratch", "keep_freed"]
