"""A training job on the thread of the node's runtime: it drives the member's machine while the main thread computes.

May import: ``checkpointing`` and ``settings``. Called by: ``loop``, and by the runtime through
:class:`notebook_cluster.training.runtime.JobHandler`.
"""
