"""Large arrays in memory that was used before.

- :mod:`.reuse`: arrays that are handed out again once nothing refers to them

May import: nothing of ours. Called by: ``training``, ``collectives``. Importing this room does not import numpy.
"""

from notebook_cluster.memory.reuse import Memory

__all__ = ["Memory"]
