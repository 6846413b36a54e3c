"""What a collective raises when its cell can no longer be finished by everyone."""


class Deadlock(RuntimeError):
    """Nodes wait for each other in different calls, this one among them; the text names the lines. Rounds raise it
    too."""


class PeerLost(RuntimeError):
    """A node that this operation needs raised, ended or was lost; the text names it and the cause."""
