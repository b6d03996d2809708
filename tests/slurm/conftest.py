"""One private Slurm for all tests of this folder: 32 nodes x 8 H100 under four leaves and two spines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm_cluster import Group, SlurmCluster, running

TOPOLOGY = """\
SwitchName=leaf1 Nodes=h100-[001-008]
SwitchName=leaf2 Nodes=h100-[009-016]
SwitchName=leaf3 Nodes=h100-[017-024]
SwitchName=leaf4 Nodes=h100-[025-032]
SwitchName=spine1 Switches=leaf[1-2]
SwitchName=spine2 Switches=leaf[3-4]
SwitchName=core Switches=spine[1-2]
"""


@pytest.fixture(scope="package")
def slurm() -> Iterator[SlurmCluster]:
    """The cluster. Each test finds it clean: see `_clean_afterwards`."""
    with running([Group("h100", 32)], TOPOLOGY) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _clean_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Jobs that a test submitted are cancelled, nodes that it killed or drained come back. Jobs of a fixture of wider
    scope stay."""
    if "slurm" not in request.fixturenames:
        yield
        return
    cluster: SlurmCluster = request.getfixturevalue("slurm")
    before = cluster.jobs()
    yield
    cluster.reset(keep=[job for job in cluster.jobs() if job in before])
