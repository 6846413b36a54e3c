"""Checkpoints of a training job: written by one node for all, kept by a node whose cluster is gone, begun from.

May import: ``settings``, ``models``, and the room ``checkpoints``, which knows the files. Called by: ``background`` and
``loop``.
"""
