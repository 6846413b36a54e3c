"""What IPython does with a cell for nodes before it runs: completion, inspection, ``%cluster cells all``.

May import: ``session`` and what is below it. Called by: :mod:`..extension`.

- :mod:`.completion`: of our magics, and of names that live on nodes.
- :mod:`.sticky`: which cells go to the nodes without a magic.
"""
