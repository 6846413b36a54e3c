"""A training job on the thread of the node's runtime: it drives the member's machine while the main thread computes.

- :mod:`.job`: events in, effects out, notices for the main thread
- :mod:`.state_transfers`: states for nodes that join or were late, fetched and served

May import: ``checkpointing`` and ``settings``. Called by: ``loop``, and by the runtime through
:class:`notebook_cluster.training.runtime.JobHandler`.
"""
