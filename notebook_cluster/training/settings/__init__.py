"""What people pass to a sync object, checked: each error names the value and the way out.

May import: ``rounds.numerics``, ``codecs``, ``protocol``. Called by: everything above in ``training``.
"""
