"""The window: a process on the owner's machine for a cluster whose coordinator runs on a peer, its head.

To notebooks, sidebar and command line it looks like the coordinator: it has the cluster's folder, lock and connection
file, and passes what views say over the link to the head, and back. What needs the owner's key is done here: pairing,
and telling agents (``Grant``) which head they may obey. It ends when nobody looks for a while; the cluster goes on.

A cluster may be handed over while it runs. ``seat`` is the process for both: a window while a head leads, a coordinator
while this machine does.

May import: coordinator (the parts that are the same for both), peering, link, journal, security, protocol.
Called by: ``coordinator.__main__``, for its seat; ``client.start`` starts it as a process, in place of a coordinator.
"""
