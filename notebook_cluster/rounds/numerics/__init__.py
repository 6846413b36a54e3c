"""The arithmetic of a round on flat float32 vectors, the same bits on every node.

- :mod:`.outer`, :mod:`.outer_settings`: the outer step; :mod:`.weighted_mean`: means in rank order
- :mod:`.layout`, :mod:`.fragments`, :mod:`.tiles`: how a model's vector is cut and sent
- :mod:`.gradient_flags`: which tensors had a gradient; :mod:`.vectors`: memory that is used again
"""
