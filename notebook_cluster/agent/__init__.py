"""The long-lived process on a peer: starts and supervises kernels, relays their messages, watches the devices.

May import: ``checkpoints``, ``pairing``, ``link``, ``discovery``, ``security``, ``protocol``. Called by: ``cli``
(``notebook-cluster share``); a coordinator starts its private agent as ``python -m notebook_cluster.agent --private``.
Never imports torch.

From the outside in:

- :mod:`.running`: an agent as a process; :mod:`.service`: :class:`Agent`, from start to end
- :mod:`.clusters`: a session with each coordinator, and what ends kernels here without it; :mod:`.host`: the nodes of
  one cluster here; :mod:`.taking_over`: what is left of a cluster whose coordinator is gone, for the next one
- :mod:`.resources`: what all clusters share, and who uses which accelerator
- :mod:`.transfers`: files that a coordinator sends; :mod:`.receiving`: how they come into a working folder
- :mod:`.kernels`: processes, what passes between them and the link, what ends with them
- :mod:`.machine`: what this machine is and how full; :mod:`.diagnosis`: what the doctor asks
- :mod:`.sharing`: what concerns other people: who may come in, what the owner allows when a node wants to start
- :mod:`.devices`: what this machine can compute on; :mod:`.gpus`: those with memory of their own
- :mod:`.settings`: how an agent is asked to run; :mod:`.events`: what it tells
"""

from notebook_cluster.agent.events import AgentReady, SharedMachine, SharingEvent, SharingFile, Tell, shared_machines
from notebook_cluster.agent.kernels.programs import FOLLOWS_ALL
from notebook_cluster.agent.running import run_agent
from notebook_cluster.agent.service import Agent
from notebook_cluster.agent.settings import DEFAULT_CODE_MINUTES, DEFAULT_LEASE_S, AgentSettings, LaunchedAs, Limits

__all__ = [
    "DEFAULT_CODE_MINUTES",
    "DEFAULT_LEASE_S",
    "FOLLOWS_ALL",
    "Agent",
    "AgentReady",
    "AgentSettings",
    "LaunchedAs",
    "Limits",
    "SharedMachine",
    "SharingEvent",
    "SharingFile",
    "Tell",
    "run_agent",
    "shared_machines",
]
