"""What a sync object does on the main thread, between two steps of people's training loop.

- :mod:`.sync`: what people call on every strategy; :mod:`.registration`: what a node says when it begins
- :mod:`.round_client`: contribute to a round, wait for its COMMIT, take up what came of it
- :mod:`.replica`: this node's model between two rounds; :mod:`.encoding`: its contribution as bytes
- :mod:`.optimizer_state`: the optimiser's, which checkpoints hold; :mod:`.progress`: what the panel is told

May import: ``background``, ``checkpointing``, ``settings`` and ``models``. Called by: ``strategies``, and
``node.api`` for ``nc.report()``.
"""
