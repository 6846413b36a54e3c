"""What a Dialer and a Session offer alike: their outbox, and what was left out of it."""

from collections.abc import Callable

from notebook_cluster.link.channel import Channel


class LinkEnd:
    """One end of a link as its owner sees it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def waiting_bytes(self) -> int:
        """Sent, or about to be, and not acknowledged."""
        return self._channel.outbox.size

    @property
    def left_out(self) -> int:
        """Droppable messages left out so far because the outbox was full."""
        return self._channel.dropped

    @property
    def on_shortened(self) -> Callable[[int], None] | None:
        """Called with the number of droppable messages left out; see :class:`.channel.Channel`."""
        return self._channel.on_shortened

    @on_shortened.setter
    def on_shortened(self, callback: Callable[[int], None] | None) -> None:
        self._channel.on_shortened = callback
