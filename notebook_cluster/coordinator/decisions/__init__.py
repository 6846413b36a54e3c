"""What the nodes of a cell decide together: ``nc.should_stop`` and ``nc.mean_metrics``.

- :mod:`.machine`: whose answers make one call, when it is decided, and what of; pure
- :mod:`.host`: brings it what nodes say, and sends what it decides

May import: what lies below the rooms of the coordinator. Called by: the inbox; ``coordinator.cells`` tells which nodes
run the cell, ``coordinator.rounds`` who waits in a round.
"""
