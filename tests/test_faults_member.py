"""A node that adds nothing up, or another slice, is killed at every point of a round, on real kernels.

``FAULT_POINTS=all`` tries every point with a model that one node adds up and with one that is divided between all.
"""

from collections.abc import Iterator

import pytest

from tests.fault_cluster import ALL_OWN, ONE_OWNER, FaultCluster, cases, check_death, fault_cluster

SUITE = {
    "work not encoded": ONE_OWNER,
    "ARRIVED sent": ONE_OWNER,
    "first chunk sent": ONE_OWNER,
    "half of the chunks sent": ALL_OWN,
    "all chunks sent": ONE_OWNER,
    "all means here": ONE_OWNER,
    "COMMIT received": ONE_OWNER,
    "APPLIED not sent": ONE_OWNER,
    "applied": ALL_OWN,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[FaultCluster]:
    with fault_cluster() as running:
        yield running


@cases({"member": SUITE})
def test_the_others_go_on_when_a_member_dies(
    role: str, point: str, elements: int, cluster: FaultCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    check_death(cluster, point, role, elements, capsys)
