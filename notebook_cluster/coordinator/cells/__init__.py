"""The cells of a cluster: which nodes run each of them, what they print, ask and answer, and what views are told.

May import: ``coordinator.nodes`` and what lies below it. Called by: the inbox, the requests of views, ``kernels``.
"""
