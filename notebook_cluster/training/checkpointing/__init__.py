"""Checkpoints of a training job.

- :mod:`.saving`: one node writes for all, or, where its cluster is gone, for itself
- :mod:`.resuming`: where a job begins; :mod:`.optimizer_bytes`: an optimiser's state as a safetensors file
- :mod:`.registered`: optimizers and what else has a state; :mod:`.beside`: what of a model is in no round, and the
  whole ``state_dict`` of a checkpoint

May import: ``settings``, ``models``, and the room ``checkpoints``, which knows the files. Called by: ``background`` and
``loop``.
"""
