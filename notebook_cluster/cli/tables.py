"""Tables on the terminal."""

import sys
from collections.abc import Iterable, Sequence


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print ``rows`` under ``headings``; what others call themselves is shown as it is and steers nothing."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings)
    for row in rows:
        # Text, not str: a peer's words must not be read as rich's markup.
        table.add_row(*(Text(cell) for cell in row))
    # A table that goes to a file or another program is not wrapped at 80 columns.
    Console(width=None if sys.stdout.isatty() else 200).print(table)
