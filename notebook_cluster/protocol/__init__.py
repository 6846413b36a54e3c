"""Typed messages and the state that views show. No I/O, no threads, no sockets.

May import: nothing of notebook_cluster. Called by: every other room.

Who says what to whom:

========================  ==========================================  =====================
module                    between                                     carried by
========================  ==========================================  =====================
:mod:`.peer`              coordinator <-> agent                       link (resumable)
:mod:`.node`              coordinator <-> node runtime                link, then agent's ipc
:mod:`.runs`              coordinator <-> node runtime: registration  same as ``node``
:mod:`.rounds`            coordinator <-> node runtime, training only same as ``node``
:mod:`.decisions`         coordinator <-> node runtime                same as ``node``
:mod:`.kept`              taking over what a cluster has left: inside ``peer``, ``node`` and ``views``
:mod:`.measuring`         how fast nodes reach each other: inside ``node`` and ``views``
:mod:`.views`             coordinator <-> view                        loopback, CURVE
:mod:`.state`             what views show                             inside ``views``
:mod:`.interaction`       ``input()``, values, widgets, completion, variables: inside ``views`` and ``node``
:mod:`.transfers`         view <-> runtime or agent: values and files inside the others
:mod:`.mesh`              node <-> node: headers, who took which data mesh
:mod:`.sidebar`           Jupyter server <-> browser                  WebSocket, as JSON
========================  ==========================================  =====================

Messages are frozen msgspec structs, tagged by their class name. Bulk bytes (Jupyter message parts,
tensors) never go inside a struct: they travel as raw buffers beside it; only pieces of at most 256 KiB do.
"""

from notebook_cluster.protocol.names import check_name
from notebook_cluster.protocol.wire import PROTOCOL_VERSION, VERSION, Message, ProtocolError, decode, encode

__all__ = ["PROTOCOL_VERSION", "VERSION", "Message", "ProtocolError", "check_name", "decode", "encode"]
