"""The window: a process on the owner's machine for a cluster whose coordinator runs on a peer, its head.

To notebooks, sidebar and command line it looks like the coordinator: it has the cluster's folder, lock and connection
file, and passes what views say over the link to the head, and back. What needs the owner's key is done here: pairing,
and telling agents (``Grant``) which head they may obey. It ends when nobody looks for a while; the cluster goes on.

Started by ``client.start``, in place of a coordinator; imports parts of ``coordinator`` that are the same for both.
"""
