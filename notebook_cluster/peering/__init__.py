"""Finding peers that may be used: heard over mDNS, typed, or remembered, and whether they are trusted.

May import: ``pairing``, ``link``, ``discovery``, ``security``, ``protocol``. Called by:
``coordinator``, ``client`` and ``cli``.

- :mod:`.peer_finder`: listens, asks at addresses, finds a peer by its name or address
- :mod:`.candidates`: what may be added, and why not; the keys that this user's clusters trust
"""
