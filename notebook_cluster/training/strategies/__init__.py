"""What people call in a cell: one file for each strategy, which reads from top to bottom like its paper.

- :mod:`.diloco`: DiLoCo, and Local SGD as its special case; :mod:`.sparse_loco`: the same with sparse contributions
- :mod:`.demo`: a step of all nodes at every batch, made of momenta
- :mod:`.data_parallel`: a step of all nodes at every batch, made of gradients (:mod:`.gradients`), with each node's
  optimiser or with that of one node for all (:mod:`.central_optimizer`)

May import: everything below in ``training``. Called by: people's cells, through the package's lazy names.
"""
