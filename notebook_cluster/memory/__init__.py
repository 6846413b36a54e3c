"""Large arrays in memory that was used before (:mod:`.arrays`).

- :class:`ArrayPool` hands arrays out again once nothing refers to them
- :class:`Scratch` hands arrays out again for the same use
- :func:`keep_freed` keeps freed memory with the process

May import: nothing of ours. Called by: ``training``, ``collectives``, ``codecs``. Importing this room does not
import numpy.
"""

from notebook_cluster.memory.arrays import ArrayPool, Scratch, keep_freed

__all__ = ["ArrayPool", "Scratch", "keep_freed"]
