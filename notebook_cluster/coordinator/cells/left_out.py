"""What people are told of cells that a node's kernel does without, as one line. Pure."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_cluster.journal.events import LeftOutWhy

_WHY = {
    "died": ("whose replay ended its kernel", "whose replays ended its kernel"),
    "skipped": ("which was skipped", "which were skipped"),
    "stopped": ("which Stop interrupted", "which Stop interrupted"),
}
_MOST = 6


def describe(node: str, left_out: "Mapping[int, LeftOutWhy]") -> str:
    """``without cell 2, which was skipped: %cluster restart mini --all-cells runs it again``; empty without any."""
    parts = []
    for why, (one, several) in _WHY.items():
        cells = sorted(cell for cell, reason in left_out.items() if reason == why)
        if len(cells) == 1:
            parts.append(f"cell {cells[0]}, {one}")
        elif cells:
            more = f" and {len(cells) - _MOST} more" if len(cells) > _MOST else ""
            parts.append(f"cells {', '.join(map(str, cells[:_MOST]))}{more}, {several}")
    if not parts:
        return ""
    # Another kernel is given what Stop interrupted.
    option = " --all-cells" if set(left_out.values()) - {"stopped"} else ""
    them = "it" if len(left_out) == 1 else "them"
    return f"without {', and '.join(parts)}: %cluster restart {node}{option} runs {them} again"
