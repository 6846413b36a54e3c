"""Callbacks for the training loops of libraries: a sync object that the library's own loop steps, saves and resumes.

They use the hooks of the library only and change nothing in it; each is imported when it is asked for.

- :mod:`.transformers`: ``nc.transformers``, for the ``Trainer`` of Hugging Face (and TRL's)
- :mod:`.lightning`: ``nc.lightning``
- :mod:`.hooks`: ``nc.sync_every``, for any loop with a torch optimizer
- :mod:`.hosted`: what the first two do alike with their sync object
- :mod:`.same_data`: whether two nodes have the same data

May import: ``training``, ``node``. Called by: people's cells, through the package's lazy names.
"""
