"""The shell of a node's kernel: what happens around each cell, and what IPython does otherwise than in a notebook.

- :mod:`.extension`: loading, and what happens before and after each cell
- :mod:`.adjustments`, :mod:`.widget_messages`, :mod:`.pip`: what differs from a notebook's kernel
- :mod:`.threads`: how many threads libraries take
- :mod:`.progress_bars`, :mod:`.tqdm_bar`: tqdm's bars for notebooks
- :mod:`.tracebacks`: errors that look alike on all nodes

May import: :mod:`..namespace`, :mod:`..runtime` and what the node may. Called by: IPython, through
:mod:`notebook_cluster.node`.
"""
