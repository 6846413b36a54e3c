"""What IPython does while a cell for nodes is typed and read: completion, inspection, cells without a magic.

May import: ``session`` and what is below it. Called by: :mod:`..extension`.
"""
