"""What concerns other people: who may come in and with which code, what the owner of the machine allows them.

- :mod:`.service`: the side that faces others: the announcement over mDNS, the codes for pairing
- :mod:`.coordinators`: which are trusted, and going to those that cannot come here
- :mod:`.admission`: whether a node may start, by the owner's limits; :mod:`.presence`: is somebody here, and was the
  machine asleep

May import: ``devices``, ``settings`` and ``events`` of the agent, and what the agent may. Called by: the agent's files
above, ``kernels`` and ``machine`` among them.
"""
