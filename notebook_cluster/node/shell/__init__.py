"""The shell of a node's kernel: what happens around each cell, and what IPython does otherwise than in a notebook.

- :mod:`.extension`: loading, and what happens before and after each cell
- :mod:`.adjustments`: what differs from a notebook's kernel, and ``%pip``; :mod:`.tracebacks`: errors, alike on all
- :mod:`.threads`: how many threads libraries take
- :mod:`.progress_bars`, :mod:`.tqdm_bar`: tqdm's bars for notebooks

May import: ``namespace`` and ``runtime`` of the node, and what the node may. Called by: IPython, through
:mod:`notebook_cluster.node`.
"""
