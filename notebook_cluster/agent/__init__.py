"""The long-lived process on a peer: starts and supervises kernels, relays their messages, watches the devices.

May import: ``link``, ``discovery``, ``security``, ``protocol``. Called by: ``cli`` (``notebook-cluster share``); a
coordinator starts its private agent as ``python -m notebook_cluster.agent --private``. Never imports torch.

From the outside in:

- :mod:`.service`: :class:`Agent`: sessions with coordinators, leases in time, PeerInfo and samples
- :mod:`.host`: the nodes of one cluster here; :mod:`.kernel`: one node from StartNode to NodeEnded
- :mod:`.supervisor`: a kernel's process; :mod:`.relay`: its Jupyter channels; :mod:`.control`: its runtime's messages
- :mod:`.devices`, :mod:`.leases`, :mod:`.sampling`, :mod:`.machine`: what is here, who uses it, how full it is
- :mod:`.watchdog`: ends kernels after a SIGKILL of the agent
"""

from notebook_cluster.agent.service import Agent, run_agent
from notebook_cluster.agent.settings import DEFAULT_LEASE_S, AgentSettings, Ready

__all__ = ["DEFAULT_LEASE_S", "Agent", "AgentSettings", "Ready", "run_agent"]
