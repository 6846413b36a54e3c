"""A cell on the nodes, from being sent to the error or the values that it ends with.

May import: ``display``, ``errors``. Called by: the commands, ``session``, :mod:`..extension`.

- :mod:`.cells`: ``%%on_all`` and ``%%on``, which wait; :mod:`.handle`, :mod:`.handle_view`: ``--async``,
  which does not.
- :mod:`.node_values`: last values; :mod:`.waiting`: Stop, and ``input()`` of nodes.
"""
