"""The arithmetic of a round on flat float32 vectors, the same bits on every node.

- :mod:`.outer`: the outer step; :mod:`.momentum`: how its momentum is kept; :mod:`.weighted_mean`: means in rank order
- :mod:`.vectors`, :mod:`.fragments`: where a model's tensors lie in a vector, and how it is cut and sent
- :mod:`.bits`: outer settings and flags of gradients, as both sides of a round see them
"""
