"""Output of nodes in the notebook, within what a Jupyter server lets through.

May import: ``headless``, ``errors``, ``widgets``, ``protocol``. Called by: ``execution``, ``commands``, ``session``.
"""
