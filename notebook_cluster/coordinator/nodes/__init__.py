"""The nodes of a cluster: which are there, what they measure, and the relay between those without a way to each other.

May import: the coordinator's delivery, view server and core. Called by: the inbox, and the folders ``cells``, ``peers``
and ``rounds``, which watch who comes and goes.
"""
