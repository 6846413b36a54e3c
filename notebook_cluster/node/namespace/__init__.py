"""What is in the namespace of a node: the ``nc`` names, and how people see the variables there.

- :mod:`.api`: ``nc.rank()``, ``nc.all_reduce(x)`` ...; :mod:`.shard`: ``nc.shard(data)``
- :mod:`.torch_group`, :mod:`.torch_wait`: ``nc.torch_distributed()``; :mod:`.cell_variables`:
  ``nc.jax_distributed()``
- :mod:`.variables`: the table of variables; :mod:`.last_value`: the value of a cell's last expression

May import: :mod:`..runtime`, :mod:`..data` and what the node may. Called by: ``shell``, and :mod:`notebook_cluster`
(the ``nc`` names). Importing it imports neither numpy nor torch.
"""
