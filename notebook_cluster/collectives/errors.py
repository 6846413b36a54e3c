"""What a collective raises when its cell can no longer be finished by everyone."""


class PeerLost(RuntimeError):
    """A node that this operation needs raised, ended or was lost; the text names it and the cause."""
