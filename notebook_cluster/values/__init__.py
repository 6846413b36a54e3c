"""Python values that travel between notebook and nodes: packed without pickle, hashed, and kept until they are fetched.

May import: ``collectives`` (arrays on the wire), ``protocol``. Called by: ``node``, ``client`` and ``magics``.

- :mod:`.encoding`: what travels, as what, and why something stays;
  :mod:`.plain`, :mod:`.arrays`, :mod:`.frames`: its parts
- :mod:`.content_hash`: are the values of two nodes the same
- :mod:`.transfer_store`: values that wait on a node until they are fetched, or until all of them has come
"""
