"""The node that adds a slice up is killed at every point of a round, on real kernels.

``FAULT_POINTS=all`` tries every point with a model that one node adds up and with one that is divided between all.
"""

from collections.abc import Iterator

import pytest

from tests.fault_cluster import ALL_OWN, ONE_OWNER, FaultCluster, cases, check_death, fault_cluster

SUITE = {
    "work encoded": ONE_OWNER,
    "SEAL received": ALL_OWN,
    "slice added up": ONE_OWNER,
    "first chunk of the mean sent": ONE_OWNER,
    "half of the mean sent": ONE_OWNER,
    "whole mean sent": ALL_OWN,
    "PREPARED not sent": ONE_OWNER,
    "PREPARED sent": ONE_OWNER,
    "applying": ONE_OWNER,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[FaultCluster]:
    with fault_cluster() as running:
        yield running


@cases({"owner": SUITE})
def test_the_others_go_on_when_the_owner_of_a_slice_dies(
    role: str, point: str, elements: int, cluster: FaultCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    check_death(cluster, point, role, elements, capsys)
