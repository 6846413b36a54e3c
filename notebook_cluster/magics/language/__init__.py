"""What may be typed after the magics, and what it means: pure functions and data.

May import: :mod:`..errors`, ``protocol``. Called by: everything above it in ``magics``.

- :mod:`.grammar`: what may be typed, as data; :mod:`.parsing`: what was, and which nodes ``%%on`` means.
"""
