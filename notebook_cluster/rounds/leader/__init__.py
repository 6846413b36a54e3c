"""The coordinator's half of the commit protocol: what is decided, from what members said. Plain Python.

- :mod:`.machine`: ``apply(state, event)``, the table of everything below; :mod:`.events_effects`, :mod:`.state`
- :mod:`.registration`, :mod:`.runs`: who trains which job, in which of its runs, and what cannot be;
  :mod:`.alike`: whether they train one model together
- :mod:`.arrivals`, :mod:`.silence`: who is at the boundary, who is waited for, and who is left out
- :mod:`.attempts`, :mod:`.unlike`: SEAL, PREPARED, COMMIT; nodes that computed differently
- :mod:`.recovery`, :mod:`.saving`: after a restart of the coordinator; checkpoints
"""
