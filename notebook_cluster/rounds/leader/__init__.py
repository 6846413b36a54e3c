"""The coordinator's half of the commit protocol: what is decided, from what members said. Plain Python.

- :mod:`.machine`: ``apply(state, event)``, the table of everything below; :mod:`.events_effects`, :mod:`.state`
- :mod:`.registration`, :mod:`.runs`, :mod:`.impossible`: who trains which job, and what cannot be
- :mod:`.arrivals`, :mod:`.gathering`, :mod:`.silence`, :mod:`.missing`: who is at the boundary, and who is waited for
- :mod:`.attempts`, :mod:`.unlike`, :mod:`.commit`: SEAL, PREPARED, COMMIT; nodes that computed differently
- :mod:`.recovery`, :mod:`.saving`: after a restart of the coordinator; checkpoints
"""
