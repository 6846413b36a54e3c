"""Kernels on this peer: the processes, what passes between them and the link, and what ends with them.

- :mod:`.kernel`: one node from StartNode to NodeEnded
- :mod:`.supervisor`: a kernel's process, its folders and variables; :mod:`.programs`: what it has started ends with
  it, also after a SIGKILL of the agent
- :mod:`.relay`: the Jupyter channels; :mod:`.subshell`: questions that are answered while a cell runs
- :mod:`.control_socket`: the runtimes' messages, nodes that have to wait in ``print()``, and checkpoints that they keep
  before their kernels end

May import: ``machine``, ``sharing`` (what the owner allows) and ``devices`` of the agent, and what the agent may.
Called by: the agent's files above.
"""
