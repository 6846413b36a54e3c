"""The machines of a cluster: finding out which one is meant, pairing with it, the link to its agent, nodes on it.

May import: ``coordinator.nodes`` and what lies below it; ``peering`` and ``pairing``. Called by: the inbox and the
requests of views.
"""
