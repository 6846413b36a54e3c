"""What the doctor finds: facts that were measured, said in one line each with the command that mends it.

May import: ``discovery`` (addresses), ``protocol``. Called by: ``coordinator`` (for a cluster) and
``cli`` (without one).

- :mod:`.findings`: how a finding is said, and those about peers; all of them pure
- :mod:`.network`, :mod:`.versions`: those about links between machines, and about what is installed
"""
