"""What is in the namespace of a node: the ``nc`` names, and how people see the variables there.

- :mod:`.api`: ``nc.rank()``, ``nc.all_reduce(x)``, ``nc.jax_distributed()`` ...; :mod:`.shard`: ``nc.shard(data)``;
  :mod:`.shard_loops`, :mod:`.stream_loops`: one pass over it; :mod:`.decisions`: ``nc.should_stop(flag)``,
  ``nc.mean_metrics(loss=x)``;
  :mod:`.torch_group`: ``nc.torch_distributed()``, and how a wait inside it ends
- :mod:`.script`: a script that ``notebook-cluster run`` runs here; :mod:`.script_surroundings`: what it finds there
- :mod:`.variables`: the table of variables; :mod:`.last_value`: the value of a cell's last expression

May import: ``runtime`` and ``data`` of the node, and what the node may. Called by: ``shell``, and
:mod:`notebook_cluster` (the ``nc`` names). Importing it imports neither numpy nor torch.
"""
