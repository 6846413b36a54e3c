"""How many threads a node takes: the processors of this machine, divided by the nodes that run on it.

Every library that computes on the processor takes all of its cores. Two nodes that do so on one machine take turns
on each core and wait for each other's threads at each operation, which makes small models 20 to 35 times slower. So
each node gets ``cores // nodes`` threads, see :func:`threads_for` in :mod:`.threads`.

May import: nothing of this package. Called by: ``agent`` (which counts, and starts kernels), ``node`` (which looks at
the start of each cell).
"""

from notebook_cluster.processors.threads import (
    PLACE,
    NodeCount,
    count_nodes,
    thread_variables,
    threads_for,
    usable_cores,
    variables_of_ours,
)

__all__ = ["PLACE", "NodeCount", "count_nodes", "thread_variables", "threads_for", "usable_cores", "variables_of_ours"]
