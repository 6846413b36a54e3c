"""How long a person waits, beside the tools they would use otherwise: one JSON line for each benchmark.

``python -m benchmarks.start_up --nodes 4``   nothing -> first result on all nodes
``python -m benchmarks.on_all --nodes 4``     ``1+1`` on all nodes of a running cluster

Both need the ``test`` extra (ipyparallel). They use Jupyter folders of their own and leave no process
behind. May import what people import of ``notebook_cluster``; nothing imports them.
"""
