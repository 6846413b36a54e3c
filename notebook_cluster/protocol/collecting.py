"""The last values of a cell on its way from the nodes to a view that asked for them (``-o``, ``--async``).

A view asks by :data:`VALUE_KEY` among the cell's user expressions. The node keeps the value of the cell's last
expression then, and answers the expression :data:`VALUE_EXPRESSION` with a bundle that holds :data:`VALUE_MIME`.
"""

from notebook_cluster.protocol.wire import Message

VALUE_KEY = "notebook_cluster_value"
VALUE_EXPRESSION = "__import__('notebook_cluster.node.last_value', fromlist=['x']).packed()"
VALUE_MIME = "application/vnd.notebook-cluster.value+json"
MOST_VALUE_BYTES = 4 * 1024 * 1024
"""Raw bytes of one node's value."""
MOST_PACKED_BYTES = 6 * 1024 * 1024
"""The same as JSON with base64."""


class NodeValue(Message, frozen=True):
    """An event of a cell: the last value on ``node``, when the cell has ended well there."""

    cell: int
    node: str
    rank: int | None
    packed: bytes
    """JSON: ``{"meta": ..., "buffers": [base64, ...]}``, or ``{"kind", "text", "reason"}`` where it cannot travel."""
