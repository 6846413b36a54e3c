"""A node's half of the commit protocol.

- :mod:`.machine`: ``apply(state, event)``; :mod:`.events_effects`, :mod:`.state`
- :mod:`.exchange`, :mod:`.chunks`: a sealed round: slices out, slices in, the mean; :mod:`.next_state`: the outer step
- :mod:`.retransmission`: what is missing is asked for; :mod:`.joining`: a state is fetched from who holds it
"""
