"""What concerns other people: who may come in and with which code, what the owner of the machine allows them.

- :mod:`.service`: the side that faces others, from start to end: :mod:`.codes` for pairing, :mod:`.coordinators` that
  are trusted, :mod:`.announcing` over mDNS, :mod:`.dialling` to clusters that cannot come here
- :mod:`.admission`: whether a node may start, by the owner's limits; :mod:`.presence`: is somebody here;
  :mod:`.sleep`: was the machine asleep

May import: :mod:`..settings`, :mod:`..events`, :mod:`..devices`, and what the agent may. Called by: ``agent``'s own
files above, ``kernels`` among them.
"""
