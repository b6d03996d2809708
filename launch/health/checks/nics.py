"""Checks that the RDMA devices are complete, active and at full rate, and that NCCL's configured devices exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launch.cluster.rdma import Nic
from launch.health.check import Check, critical, ok, warning
from launch.health.expected import Expected
from launch.health.machine import Machine
from launch.health.rails import candidates, rails_of


def check(machine: Machine, expected: Expected, environment: Mapping[str, str]) -> list[Check]:
    """All NIC checks; [] if the plan needs no NICs and none are configured."""
    by_site = "=" + ",".join(expected.nic_names) if expected.nic_names else ""
    wanted = environment.get("NCCL_IB_HCA", "") or by_site
    if not expected.nics and not wanted:
        return []
    nics = machine.nics()
    named = [nic for nic in nics if selected(nic.name, wanted)] if wanted else nics
    checks = [_hca(nics, named, wanted)] if wanted else []
    if expected.nics:
        active = [nic for nic in named if nic.state == "ACTIVE"]
        checks += [ok("nic.active", [nic.name for nic in active], "ordered by device number"),
                   _count(named, expected, wanted), _state(named, active, expected), _rate(active, expected),
                   *([] if wanted and wanted != by_site else _rails(machine, active, expected))]
    return checks


def selected(name: str, value: str) -> bool:
    """Whether a value of NCCL_IB_HCA selects the device `name`: prefixes, `=` exact names, `^` all except these. A name
    may include a port (`mlx5_0:1`)."""
    negate, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    names = [part.partition(":")[0].strip() for part in value.lstrip("^=").split(",") if part.strip()]
    hit = any(name == each if exact else name.startswith(each) for each in names)
    return hit != negate


def _hca(nics: Sequence[Nic], named: Sequence[Nic], value: str) -> Check:
    have = ", ".join(nic.name for nic in nics) or "none"
    exact = value.startswith("=")
    missing = [part.partition(":")[0].strip() for part in value.lstrip("^=").split(",") if part.strip()]
    missing = [part for part in missing
               if not any(nic.name == part if exact else nic.name.startswith(part) for nic in nics)]
    if not named or (missing and not value.startswith("^")):
        what = f"names {', '.join(missing)}, which does not exist" if missing else "selects no device"
        return critical("nic.nccl_ib_hca", value, f"NCCL_IB_HCA={value} {what}; devices: {have}",
                        "correct it in the site profile (interfaces.nccl, environment); NCCL would silently fall back "
                        "to TCP")
    return ok("nic.nccl_ib_hca", value, f"NCCL_IB_HCA={value} selects {len(named)} devices")


def _count(nics: Sequence[Nic], expected: Expected, wanted: str) -> Check:
    told = f"{len(nics)} RDMA devices" + (f" in NCCL_IB_HCA={wanted}" if wanted else "")
    if len(nics) < expected.nics:
        return critical("nic.count", len(nics), f"{told}, the plan needs {expected.nics}",
                        "check `ibstat` and dmesg on the node: a card is missing, or the container hides /sys or "
                        "/dev/infiniband")
    return ok("nic.count", len(nics), told)


def _state(nics: Sequence[Nic], active: Sequence[Nic], expected: Expected) -> Check:
    down = [nic for nic in nics if nic not in active]
    value = {nic.name: nic.state for nic in down}
    if len(active) < expected.nics and down:
        return critical("nic.state", value, f"{down[0].name} is {down[0].state}; {len(active)} of {expected.nics} "
                        "rails are up", "check the cable and the switch port; see `ibstat`")
    if down:  # the job does not need these cards
        return ok("nic.state", value, f"{len(active)} active; not used: {', '.join(value)}")
    return ok("nic.state", value, f"{len(active)} active")


def _rails(machine: Machine, active: Sequence[Nic], expected: Expected) -> list[Check]:
    """The NIC of each rail, for the placement: as set in the site profile, else the NICs next to the GPUs. [] if there
    are too few, which another check reports."""
    if expected.nic_names:
        return [ok("nic.rails", list(expected.nic_names), "from the site profile")]
    usable = candidates(active, expected.nics, expected.nic_gbit_per_s)
    if len(usable) < expected.nics:
        return []
    known = any(nic.pci for nic in usable)
    gpus = [machine.pci_path(gpu.bus_id) for gpu in machine.gpus().gpus] if known else []
    names, why = rails_of(usable, expected.nics, gpus)
    if not names:
        return [warning("nic.rails", [], f"the NICs of the {expected.nics} rails are unknown: {why}", "list them in "
                        "rail order in interfaces.nccl of the site profile; until then NCCL chooses its own")]
    return [ok("nic.rails", list(names), f"{', '.join(names)}: {'next to the GPUs' if gpus else 'by number'}")]


def _rate(active: Sequence[Nic], expected: Expected) -> Check:
    rates = sorted((nic.gbit_per_s for nic in active), reverse=True)[:expected.nics]
    if rates and rates[-1] < expected.nic_gbit_per_s:
        slow = min((nic for nic in active if nic.gbit_per_s == rates[-1]), key=lambda nic: nic.name)
        return critical("nic.rate", rates[-1], f"{slow.name} runs at {slow.gbit_per_s:g} Gbit/s, the plan expects "
                        f"{expected.nic_gbit_per_s:g}", "the link trained down: check the cable and the transceiver, "
                        "or plan with the real rate")
    if rates and rates[0] > rates[-1]:
        return warning("nic.rate", rates[-1], f"the rails have different rates: {rates[-1]:g} to {rates[0]:g} Gbit/s",
                       "list only NICs of equal rate in NCCL_IB_HCA")
    return ok("nic.rate", rates[-1] if rates else None, f"{rates[-1]:g} Gbit/s each" if rates else "no active device")
