"""Large arrays in memory that was used before.

- :mod:`.reuse`: arrays that are handed out again once nothing refers to them
- :mod:`.scratch`: arrays that are handed out again for the same use

May import: nothing of ours. Called by: ``training``, ``collectives``, ``codecs``. Importing this room does not
import numpy.
"""

from notebook_cluster.memory.reuse import Memory
from notebook_cluster.memory.scratch import Scratch

__all__ = ["Memory", "Scratch"]
