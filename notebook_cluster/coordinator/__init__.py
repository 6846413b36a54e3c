"""The process that owns one cluster: membership, cells, rounds, the run log.

May import: training, checkpoints, peering, doctor, pairing, collectives, codecs, link, discovery, mesh, security,
protocol.
Called by: ``client``, which starts ``python -m notebook_cluster.coordinator`` and speaks to it over a socket.

The state changes only through ``apply(state, event)`` (:mod:`.state`), and every event is in the run log before
anybody is told, so a coordinator that was killed is started again from its log. Nothing here imports torch.
"""
