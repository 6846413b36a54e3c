"""What JupyterLab's renderer (``labextension/``) needs to show the text of several nodes as tabs.

It stands beside text/plain and text/html in the same bundle and repeats none of the text: which nodes there are, how
they ended, and which block of text is whose. Frontends that do not know the type show the HTML.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from notebook_cluster.magics.display.slots import NodeOutput

MIME_TYPE = "application/vnd.notebook-cluster.output+json"
MOST_CHARACTERS = 8192
"""With more nodes than fit in here there are no tabs."""


@dataclass(frozen=True)
class Tabs:
    """Tabs over the texts of one place (``row``) below the cell named ``cell``."""

    cell: str
    row: int
    states: Mapping[str, str] = field(default_factory=dict)
    """Node -> what it does or how it ended, see ``CellView.nodes``."""

    def describe(self, blocks: Sequence[Sequence[NodeOutput]], first: int, count: int, page: int) -> dict[str, Any]:
        """The structure for page ``page`` (from 0), which holds ``count`` of the row's ``blocks`` from ``first`` on.

        ``blocks``: who wrote each block of text. Empty where there is nothing to choose: one node, or far too many.
        """
        nodes = sorted(
            ((output, number) for number, members in enumerate(blocks) for output in members),
            key=lambda pair: pair[0].order,
        )
        if len(nodes) < 2:
            return {}
        described = {
            "version": 1,
            "cell": self.cell,
            "row": self.row,
            "page": page,
            "first": first,
            "count": count,
            "names": [output.node for output, _ in nodes],
            "ranks": [output.rank for output, _ in nodes],
            "states": [self.states.get(output.node, "") for output, _ in nodes],
            "blocks": [number for _, number in nodes],
        }
        return described if len(json.dumps(described)) <= MOST_CHARACTERS else {}
