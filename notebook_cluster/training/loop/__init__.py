"""What a sync object does on the main thread, between two steps of people's training loop.

May import: ``background``, ``checkpointing``, ``settings`` and ``models``. Called by: ``strategies``, and
``node.api`` for ``nc.report()``.
"""
