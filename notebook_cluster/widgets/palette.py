"""One colour per rank, the same in cards and curves; told apart on light and dark, and by the colour-blind."""

PALETTE = ("#2f81f7", "#e8853d", "#2da876", "#c75bb0", "#c9a227", "#35a7c2", "#d9534f", "#8f7ae5", "#7f9a3b", "#a9746e")
NO_RANK = "#8b949e"
GLOBAL = "#c9508a"
"""The global model of a job: its line is dotted as well."""


def rank_colour(rank: int | None) -> str:
    """The colour of ``rank`` as ``#rrggbb``; grey for a node that has none."""
    return NO_RANK if rank is None else PALETTE[rank % len(PALETTE)]
