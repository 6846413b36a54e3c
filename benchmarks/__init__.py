"""How long a person waits, beside the tools they would use otherwise, and what bad input does: one JSON line for each.

``python -m benchmarks.start_up --nodes 4``   nothing -> first result on all nodes
``python -m benchmarks.start_up --on slurm --nodes 3``   the same on nodes that Slurm starts
``python -m benchmarks.on_all --nodes 4``     ``1+1`` on all nodes of a running cluster
``python -m benchmarks.stop --nodes 4``       Stop -> every node idle, the cell ended
``python -m benchmarks.panel --nodes 32``     what the panel of a large cluster costs
``python -m benchmarks.joiners --agents 64``   many hosts of one launch that come in at once while others train
``python -m benchmarks.late_node``            a large state that joins over a slow cable while others train; as root
``python -m benchmarks.all_reduce``           ``nc.all_reduce`` and ``nc.barrier`` beside torch's gloo
``python -m benchmarks.rounds``               time and memory of a round beside the same by hand on torch's gloo
``python -m benchmarks.fuzz --frames 200000`` bad frames to every port of a peer
``python -m benchmarks.churn``                training while everything fails, each round computed again; as root
``python -m benchmarks.codecs``               size, error and speed of each codec on a real pseudo-gradient
``python -m benchmarks.links``                training over slow links, beside the formula; as root
``python -m benchmarks.uneven``               training on machines of unlike speed, beside torch's gloo
``python -m benchmarks.fidelity``             the loss of each strategy, beside data-parallel training

They need the ``test`` extra (ipyparallel, hypothesis). They use Jupyter folders of their own and leave no process
behind. May import what people import of ``notebook_cluster``; nothing imports them.
"""
