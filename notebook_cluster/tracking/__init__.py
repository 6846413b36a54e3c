"""Trackers: a process of its own that follows the journal of a run and logs its curves to Weights & Biases, MLflow or
TensorBoard's event files, each point once.

May import: ``client``, ``journal``, ``rounds`` (what a registration says as bits), ``protocol``, ``security``.
Called by: ``magics``, which start and end the process.

- :mod:`.process`: start a tracker of a run, ask how it is, end it; the command line of its process
- :mod:`.follower`: what that process does: read what is new, log it, remember it, until the run is over
- :mod:`.points`: which points are new
- :mod:`.trackers`: the libraries; each is imported in that process only
- :mod:`.remembered`: what was logged where, in a file beside the run

A library that raises, waits for a server or asks for a login does so in that process: neither the notebook nor a node
waits for it. The process reads files only: it is no view of the cluster and does not keep it alive.
"""

from notebook_cluster.tracking.process import describe, start_tracking, stop_tracking, trackers_of, trouble
from notebook_cluster.tracking.remembered import TITLES, TRACKERS

__all__ = ["TITLES", "TRACKERS", "describe", "start_tracking", "stop_tracking", "trackers_of", "trouble"]
