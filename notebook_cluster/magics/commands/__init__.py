"""What each line magic does: asks the client, says what happened.

May import: ``session``, ``execution``, ``display``, ``language``. Called by: :mod:`..extension`.
"""
