"""The background runtime of a node: the thread that answers others while the cell computes.

- :mod:`.node_runtime`: :class:`.NodeRuntime`, what training and the ``nc`` names call
- :mod:`.agent_socket`: the socket to the agent; :mod:`.jobs`: messages and frames to the training job that they are for
- :mod:`.rosters`: the roster with which a cell began; :mod:`.world`: rank, world size and variables out of the roster
- :mod:`.interrupts`: a Stop, and moments that it must not cut
- :mod:`.output_backpressure`: ``print()`` waits while the link is behind
- :mod:`.telemetry`, :mod:`.blocked`: what panels show of a node; what its main thread waits for

May import: :mod:`..data` and what the node may. Called by: ``namespace`` and ``shell``.
"""
