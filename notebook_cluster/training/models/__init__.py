"""A model of torch or MLX as one flat float32 vector and back, and what training needs of the framework's optimisers.

May import: ``rounds.numerics`` and ``codecs``. No framework is imported before a model of it is there. Called by:
everything above in ``training``.
"""
