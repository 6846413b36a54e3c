"""How ``nc.shard`` divides data: what can be divided, and who took what, agreed on by all nodes.

- :mod:`.source`: kinds of data with a length; :mod:`.samplers`: their order in an epoch, and what a sampler chooses
- :mod:`.streams`: kinds without one, also .tar files; :mod:`.stream_readers`: items of them
- :mod:`.ledger`: one node's knowledge of one epoch, pure; :mod:`.taken`: which positions are; :mod:`.dealing`: parts of
  the rest; :mod:`.shares`: keeps the ledgers of all nodes alike; :mod:`.pieces`: their messages in pieces
- :mod:`.position`: where a loop is, as plain data that is kept and read again; :mod:`.loop_registry`: the loops of a
  cell; :mod:`.training_loops`: those in which a model is trained

May import: ``training``'s Runtime and ``protocol``. Called by: ``runtime`` and ``namespace``.
"""
