"""The process that owns one cluster: membership, cells, rounds.

May import: training, checkpoints, peering, doctor, pairing, collectives, codecs, link, discovery, mesh, journal,
security, protocol. Its own layers are in docs/architecture.md, "The coordinator from inside".
Called by: ``client``, which starts ``python -m notebook_cluster.coordinator`` and speaks to it over a socket; in that
process ``window.seat`` runs it, which is the window once the cluster is handed over to a head. The agent of a head
starts it without one.

The state changes only through ``apply(state, event)`` (``journal.state``), and every event is in the journal before
anybody is told, so a coordinator that was killed is started again from it. Each part gets what it needs in its
constructor; only ``service`` knows all of them. Nothing here imports torch.
"""
