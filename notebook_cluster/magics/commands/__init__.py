"""What each line magic does: asks the client, says what happened.

May import: ``session`` and what is below it. Called by: :mod:`..extension`.

- :mod:`.cluster`: the subcommands of ``%cluster``.
- :mod:`.transfers`: ``%push``, ``%pull`` and ``%cluster send``.
"""
