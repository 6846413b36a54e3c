"""Output of nodes in the notebook, within what a Jupyter server lets through.

May import: ``errors``, ``widgets``, ``protocol``. Called by: ``execution``, ``session``, the commands.

- :mod:`.output`: all output of one cell; :mod:`.slots`: of one node; :mod:`.folding`: of several nodes as few blocks.
- :mod:`.terminal`: text as a terminal would show it; :mod:`.publishing`: where displays go, and whether
  somebody is there.
- :mod:`.node_widgets`, :mod:`.mirrored`: widgets of nodes in the notebook.
"""
