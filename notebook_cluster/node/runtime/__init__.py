"""The background runtime of a node: the thread that answers others while the cell computes.

- :mod:`.node_runtime`: :class:`.NodeRuntime`, what training and the ``nc`` names call
- :mod:`.running_cell`: the cell that runs, and a Stop for it
- :mod:`.agent_socket`: the socket to the agent; :mod:`.jobs`: messages and frames to the training job that they are for
- :mod:`.world`: the rosters; rank, world size and variables out of them
- :mod:`.decisions`: this node's half of what all nodes decide together
- :mod:`.output_backpressure`: ``print()`` waits while the link is behind
- :mod:`.telemetry`, :mod:`.blocked`: what panels show of a node; what its main thread waits for

May import: ``data`` of the node, and what the node may. Called by: ``namespace`` and ``shell``.
"""
