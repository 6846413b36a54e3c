"""How nodes commit a round: both halves of the protocol side by side, pure.

No sockets, no threads, no clock: an event and a state in, effects out. The coordinator's ``RoundRunner`` drives the
leader's half, a node's training job the member's, and the explorer of the tests both.

- :mod:`.leader`: registers members, gathers who has arrived, seals, and commits what all of them computed alike
- :mod:`.member`: contributes once, takes means of its slices, prepares the next state, follows COMMIT
- :mod:`.numerics`: the outer step, weighted means, and how a model's vector is cut

May import: ``codecs``, ``journal`` (the records that the leader writes), ``protocol``, ``memory``. Called by:
``coordinator`` and ``training``. The leader imports neither numpy nor a codec.
"""
