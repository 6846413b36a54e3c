"""When a coordinator that slept ends because its owner began another: most machines must say so, not one alone."""

from types import SimpleNamespace
from typing import Any

import pytest

from notebook_cluster.coordinator.peers.links import PeerLinks

EPOCH = 1_000


class Slept:
    """A coordinator of epoch 1000 whose links have these (condition, epoch that the agent follows instead)."""

    def __init__(self, **links: tuple[str, int]) -> None:
        self.reasons: list[str] = []
        self.rows = {
            name: SimpleNamespace(
                name=name, dialer=SimpleNamespace(newer=newer), condition=condition, asleep=False,
                is_open=condition in ("connected", "suspect"), become=lambda condition, reason: None,
            )
            for name, (condition, newer) in links.items()
        }  # fmt: skip
        fake: Any = SimpleNamespace(
            state=SimpleNamespace(epoch=EPOCH, cluster="digits"), tell=lambda level, text: None, dirty=lambda: None,
            peer_lost=lambda name, reason: None, links=self.rows,
        )  # fmt: skip
        others: Any = dict.fromkeys(("trust", "context", "identity", "on_message", "reception", "revoke", "on_left"))
        self.links = PeerLinks(fake, delivery=fake, membership=fake, received={}, stop=self.reasons.append, **others)

    def hears(self, name: str) -> list[str]:
        """Why it ends, after the condition of this link has become what it is."""
        row: Any = self.rows[name]
        self.links._on_condition(row.dialer, name, row.condition, "start 2000 has taken over")
        return self.reasons


def test_a_coordinator_whose_only_machine_follows_another_ends_with_who_and_what_to_do() -> None:
    (reason,) = Slept(local=("connected", 0), mini=("refused", 2_000)).hears("mini")
    assert reason.startswith(
        "mini follows another coordinator of cluster 'digits', which its owner started on 1970-01-01"
    )
    assert "this one has ended. %cluster attach digits on the machine where that one runs goes on with it" in reason


def test_those_that_are_not_there_do_not_count() -> None:
    slept = Slept(mini=("refused", 2_000), desk=("refused", 2_000), air=("connected", 0), gone=("lost", 0))
    (reason,) = slept.hears("desk")
    assert reason.startswith("mini and desk follow another")


@pytest.mark.parametrize(
    "links",
    [
        {"mini": ("refused", 2_000), "desk": ("connected", 0)},
        {"mini": ("refused", 2_000), "desk": ("suspect", 0), "air": ("connected", 0)},
        {"mini": ("refused", 0)},
        {"mini": ("refused", EPOCH)},
        {"mini": ("refused", EPOCH - 1)},
    ],
)
def test_what_a_single_machine_says_or_an_older_epoch_ends_nothing(links: dict[str, tuple[str, int]]) -> None:
    assert Slept(**links).hears("mini") == []
