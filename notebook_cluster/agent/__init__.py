"""The long-lived process on a peer: starts and supervises kernels, relays their messages, watches the devices.

May import: ``checkpoints``, ``pairing``, ``link``, ``discovery``, ``security``, ``protocol``. Called by: ``cli``
(``notebook-cluster share``); a coordinator starts its private agent as ``python -m notebook_cluster.agent --private``.
Never imports torch.

From the outside in:

- :mod:`.running`: an agent as a process; :mod:`.service`: :class:`Agent`, from start to end; :mod:`.settings`
- :mod:`.sharing`: what concerns other people: who may come in, and what the owner allows when a node wants to start;
  :mod:`.limits`; :mod:`.sharing_limits`: afterwards
- :mod:`.clusters`: a session with each coordinator; :mod:`.host`: the nodes of one cluster here
- :mod:`.kernels`: processes, what passes between them and the link, what ends with them
- :mod:`.transfers`: files that a coordinator sends; :mod:`.receiving`: how they come into a working folder
- :mod:`.devices`, :mod:`.leases`, :mod:`.sampling`, :mod:`.machine`, :mod:`.resources`: what is here, who uses it, how
  full it is; :mod:`.diagnosis`: what the doctor asks
- :mod:`.events`: what the person at the machine is told; :mod:`.sharing_file`: for the same user's other programs
"""

from notebook_cluster.agent.events import SharingEvent, Tell
from notebook_cluster.agent.kernels.programs import FOLLOWS_ALL
from notebook_cluster.agent.limits import Limits
from notebook_cluster.agent.running import run_agent
from notebook_cluster.agent.service import Agent
from notebook_cluster.agent.settings import DEFAULT_CODE_MINUTES, DEFAULT_LEASE_S, AgentSettings, Ready
from notebook_cluster.agent.sharing_file import SharedMachine, SharingFile, shared_machines

__all__ = [
    "DEFAULT_CODE_MINUTES",
    "DEFAULT_LEASE_S",
    "FOLLOWS_ALL",
    "Agent",
    "AgentSettings",
    "Limits",
    "Ready",
    "SharedMachine",
    "SharingEvent",
    "SharingFile",
    "Tell",
    "run_agent",
    "shared_machines",
]
