"""Which interface a job's processes meet on."""

from __future__ import annotations

import psutil
import pytest

from launch.cluster.interfaces import LOOPBACK_OF_A_NODE, JobAddress, choose, job_address
from launch.errors import UserError

ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.1.0.7", "ib0": "10.2.0.7", "ib1": "10.2.1.7", "docker0": "172.17.0.1",
             "tap": ""}
UP = {"lo", "eth0", "ib0", "docker0", "tap"}


@pytest.mark.parametrize("routes, wanted, expected", [
    (["eth0"], None, ("eth0", "10.1.0.7")),             # not docker0, which comes first by name
    (["ib1", "eth0"], None, ("eth0", "10.1.0.7")),      # ib1 is down
    ([], None, ("docker0", "172.17.0.1")),
    (["eth0"], "ib0", ("ib0", "10.2.0.7"))])
def test_chosen(routes, wanted, expected):
    assert choose(ADDRESSES, UP, routes, wanted) == JobAddress(*expected)


@pytest.mark.parametrize("wanted, why", [("ib", "no such interface"), ("tap", "no IPv4"), ("ib1", "down"),
                                         ("lo", "loopback")])
def test_an_interface_that_cannot_carry_the_job_is_refused_with_those_that_can(wanted, why):
    with pytest.raises(UserError) as caught:
        choose(ADDRESSES, UP, ["eth0"], wanted)
    assert why in caught.value.what and "docker0, eth0, ib0" in caught.value.fix


def test_without_a_network_the_simulated_nodes_meet_on_a_loopback_address_that_ray_leaves_alone():
    assert choose({"lo": "127.0.0.1"}, {"lo"}, [], None) == JobAddress("lo", LOOPBACK_OF_A_NODE)


def test_this_machine():
    found = job_address()
    assert found.interface in psutil.net_if_addrs()
    assert found.address == LOOPBACK_OF_A_NODE or found.address in {
        each.address for each in psutil.net_if_addrs()[found.interface]}
