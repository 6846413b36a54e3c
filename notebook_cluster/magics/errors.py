"""Errors as people see them in a notebook: one line or a few, never a traceback through this package."""

from IPython.core.error import UsageError

__all__ = ["CellInterrupted", "CellSyntaxError", "CellTimeout", "ClusterProblem", "RemoteError", "UsageError"]


class _Short(Exception):
    """An error whose message is the whole story: IPython shows it without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[31m{type(self).__name__}\x1b[39m: {self}"]


class RemoteError(_Short):
    """A cell failed on at least one node; the message has a line for each of them.

    The nodes' own tracebacks were shown already, in the output of each node.
    """


class ClusterProblem(_Short):
    """The cluster refused or could not do what was asked; the message names the way out."""


class CellTimeout(_Short, TimeoutError):
    """A cell ran longer than its ``--timeout``, or one with ``--async`` than its ``.wait()`` was given."""


class CellSyntaxError(_Short):
    """The cell is not Python: found in the notebook, so that it is said once and nothing is sent.

    Not a SyntaxError, because IPython would show the frames of this package for one.
    """

    def _render_traceback_(self) -> list[str]:
        return str(self.args[1] if len(self.args) > 1 else self).splitlines()

    def __str__(self) -> str:
        return str(self.args[0])


class CellInterrupted(KeyboardInterrupt):
    """Stop was pressed: the cell ends so that Run All stops, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[31mKeyboardInterrupt\x1b[39m: {self}"]


# Frontends, nbclient and papermill show and compare the class names.
ClusterProblem.__name__ = "ClusterError"
CellTimeout.__name__ = "TimeoutError"
CellSyntaxError.__name__ = "SyntaxError"
CellInterrupted.__name__ = "KeyboardInterrupt"
