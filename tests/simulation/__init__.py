"""A whole cluster in one process: coordinator, agents, nodes and a view on one seeded schedule with virtual time.

Real are the coordinator, the agents, the link, the mesh, the journal, the runtimes of the nodes and the training code
of their cells. Stand-ins are what a machine gives them:

- :mod:`.schedule`: hosts, processes and threads (greenlets), the clocks, and who runs next
- :mod:`.loop`: the event loop of a process
- :mod:`.threads`: threading's primitives and the I/O thread of a node
- :mod:`.network`, :mod:`.sockets`, :mod:`.pump`: libzmq's sockets over connections with delay, cuts and partitions,
  and what the product builds on them that has a thread of its own
- :mod:`.disk`: the thread that writes the journal, on SQLite's own files, with a disk that is slow, full or without
  power
- :mod:`.kernel`: a node's process without IPython
- :mod:`.replaced`: puts all of these in the place of the real ones while a world runs
- :mod:`.world`: the cluster, with :mod:`.machines`, :mod:`.people` at them and the :mod:`.plan` of the cell;
  :mod:`.faults`; :mod:`.checks`: what must hold at each step; :mod:`.left_out`: the product without a precaution

``python -m tests.simulation --from SEED --seeds N`` plays seeds; the seed that failed replays the failure.
"""
