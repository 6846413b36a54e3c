"""A process is killed while a checkpoint is asked for, collected, written and told, on real kernels.

``FAULT_POINTS=all`` tries every point with a model that one node adds up and with one that is divided between all.
"""

from collections.abc import Iterator

import pytest

from tests.fault_cluster import ALL_OWN, ONE_OWNER, FaultCluster, cases, check_death, fault_cluster

SUITE = {
    "owner": {"checkpoint half written": ONE_OWNER},
    "member": {"part of a checkpoint not sent": ONE_OWNER},
    "coordinator": {
        "checkpoint asked for": ONE_OWNER,
        "SAVE sent to all": ONE_OWNER,
        "SAVED received": ALL_OWN,
        "SAVED sent to one": ONE_OWNER,
    },
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[FaultCluster]:
    with fault_cluster() as running:
        yield running


@cases(SUITE, saving=True)
def test_every_survivor_is_told_of_a_whole_checkpoint(
    role: str, point: str, elements: int, cluster: FaultCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    check_death(cluster, point, role, elements, capsys)
