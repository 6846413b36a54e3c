"""The coordinator is killed at every point of a round, on real kernels, and started again.

``FAULT_POINTS=all`` tries every point with a model that one node adds up and with one that is divided between all.
"""

from collections.abc import Iterator

import pytest

from tests.fault_cluster import ONE_OWNER, FaultCluster, cases, check_death, fault_cluster
from tests.fault_points import SAVING, points_of

SUITE = {point: ONE_OWNER for point in points_of("coordinator") if not point.startswith(SAVING)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[FaultCluster]:
    with fault_cluster() as running:
        yield running


@cases({"coordinator": SUITE})
def test_training_goes_on_when_the_coordinator_dies(
    role: str, point: str, elements: int, cluster: FaultCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    check_death(cluster, point, role, elements, capsys)
