"""How ``nc.shard`` divides data: what can be divided, and who took what, agreed on by all nodes.

- :mod:`.source`: kinds of data
- :mod:`.ledger`: one node's knowledge of one epoch, pure; :mod:`.shares`: keeps the ledgers of all nodes alike;
  :mod:`.pieces`: their messages in pieces
- :mod:`.position`: where a loop is, as plain data that is kept and read again; :mod:`.training_loops`: of those in
  which a model is trained

May import: ``training``'s Runtime and ``protocol``. Called by: ``runtime`` and ``namespace``.
"""
