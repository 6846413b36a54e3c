"""A real cluster that trains while everything about it fails, and a checker that computes every round again.

``python -m benchmarks.churn --minutes 60 --peers 3 --seed 1``

Hosts are network namespaces: a desk with the notebook's side (client, coordinator, one node) and ``--peers`` shared
machines with a node each. They train DiLoCo over float32, over int8, and SparseLoCo, in turn, while a schedule drawn
from ``--seed`` kills kernels, agents and the coordinator, stops processes (SIGSTOP), pulls cables, puts NaN into
parameters, fills the disk of the journal, moves clocks, and has nodes and peers leave and come back
(:mod:`.faults`, :mod:`.schedule`).

Each node writes down what it contributed and what it sent (:mod:`.recording`). From that, and from the journal's word
on members, weights, attempts and hashes, every committed round is computed anew, with decoders, mean and outer step
of this folder (:mod:`.decoding`, :mod:`.checking`): nothing there is the package's. What a step does to the parameters
is drawn by node, process and step, so it can be read from the numbers which steps a contribution holds.

Clocks: ``time.time`` of a host's processes is moved (a ``sitecustomize`` on their path), the machine's clock is not.

Needs root, ``ip`` and ``nft``; Linux only. Nothing imports this package but its tests.
"""
