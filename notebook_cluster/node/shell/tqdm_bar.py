"""tqdm's bars for notebooks on a node; imported when a cell makes its first bar. See :mod:`.progress_bars`."""

import sys
from typing import Any

from tqdm.std import tqdm

from notebook_cluster.node.shell.progress_bars import BarView, bars


class NotebookBar(tqdm):  # type: ignore[misc]
    """``tqdm.notebook.tqdm`` and the notebook's half of ``tqdm.auto.tqdm`` on a node, with tqdm's arguments.

    ``display`` and a width in words (``ncols="80%"``) are accepted and have no effect.
    """

    _view: "BarView | None" = None
    _decided = 0
    """The cell (as ``bars`` counts) for which it is decided whether this is a widget."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("display", None)
        if isinstance(options.get("ncols"), str):
            del options["ncols"]
        if "disable" in options:
            options["disable"] = bool(options["disable"])  # None means: where no terminal is
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Show how far it is."""
        if self._decided != bars.cell and not self.disable:
            self._decided = bars.cell
            self._view = bars.take(self)
        if self._view is None:
            return super().display(msg, pos)
        self._view.show(self, msg)
        return True

    def clear(self, nolock: bool = False) -> None:
        """Take the text away, so that other text can be written; a widget stays."""
        if self._view is None:
            super().clear(nolock)

    def close(self) -> None:
        """The bar has ended: its widgets are free, and with ``leave`` its text stays."""
        if self._view is None:
            super().close()
            return
        position = abs(self.pos)
        bars.give_back(self._view)
        self.detach()
        if position == 0 if self.leave is None else self.leave:
            self._ema_dt = lambda: None  # from here on its rate is that of the whole time
            self._write_line()
        self._end()

    def settle(self, *, failed: bool) -> None:
        """The cell ends, or fails, before the bar does: its text stays as it is now. In a later cell it may go on,
        unless it belongs to a loop of a cell that has ``failed``."""
        if self._view is not None:
            bars.give_back(self._view)
        self.detach()
        self._write_line()
        if failed and self.iterable is not None:
            # The loop is kept by the traceback; when that goes the bar would be closed, and written once more.
            self._end()

    def detach(self, *, again: bool = False) -> None:
        """It has no view any more; with ``again`` it gets another one when it moves."""
        self._view = None
        if again:
            self._decided = 0

    def _write_line(self) -> None:
        # What was printed before comes before it, though tqdm writes to stderr.
        sys.stdout.flush()
        self.fp.write(f"{self}\n")
        self.fp.flush()

    def _end(self) -> None:
        self.disable = True
        self._decr_instances(self)


def bar_range(*args: Any, **options: Any) -> NotebookBar:
    """``tqdm.notebook.trange``: ``tqdm(range(*args), **options)``."""
    return NotebookBar(range(*args), **options)
