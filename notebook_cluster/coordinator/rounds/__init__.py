"""The training of a cluster: carries out what the pure round machine decides, and tells it who makes no progress.
Who waits for each other in vain is found here too.

May import: ``coordinator.nodes`` and what lies below it; ``rounds.leader``. Called by: the inbox and the requests of
views.
"""
