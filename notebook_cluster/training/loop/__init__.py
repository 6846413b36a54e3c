"""What a sync object does on the main thread, between two steps of people's training loop.

- :mod:`.sync`: what people call on every strategy; :mod:`.registration`: what a node says when it begins
- :mod:`.round_client`: contribute to a round, wait for its COMMIT, take up what came of it
- :mod:`.replica`: this node's model between two rounds; :mod:`.encoding`: its contribution as bytes
- :mod:`.goes_on`: what it begins with; :mod:`.step_stops`: a Stop falls between two steps; :mod:`.stopped_run`: what
  that leaves for the next run of the cell; :mod:`.average`: an average of the global parameters
- :mod:`.optimizer_state`: the optimiser's, which checkpoints hold; :mod:`.progress`: what the panel is told

May import: ``background``, ``checkpointing``, ``settings`` and ``models``. Called by: ``strategies``, and
``node.api`` for ``nc.report()``.
"""
