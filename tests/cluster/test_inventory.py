from __future__ import annotations

import types
from dataclasses import replace

import pytest

from launch.cluster.file import parse_cluster
from launch.cluster.inventory import ASSUMED, NodeFacts, join, read
from launch.cluster.spec import ClusterSpec
from launch.errors import UserError
from tests.cluster.test_file import TEXT

MIB = 2**20


class Nvml(types.SimpleNamespace):
    """Answers as `pynvml` does, for the GPUs that it is given: (name, total bytes, bytes that the driver keeps)."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    class NVMLError_DriverNotLoaded(NVMLError):
        pass

    nvmlMemory_v2 = 0x02000028

    def __init__(self, gpus=(), start: Exception | None = None, answer: Exception | None = None) -> None:
        super().__init__(gpus=gpus, start=start, answer=answer, open=False)

    def nvmlInit(self):
        if self.start:
            raise self.start
        self.open = True

    def nvmlShutdown(self):
        self.open = False

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{self.gpus.index(handle)}"

    def nvmlDeviceGetName(self, handle):
        if self.answer:
            raise self.answer
        return handle[0]

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        assert version == self.nvmlMemory_v2     # without it, `total` alone counts what the driver keeps as usable
        return types.SimpleNamespace(total=handle[1], reserved=handle[2])


H100 = ("NVIDIA H100 80GB HBM3", 81559 * MIB, 551 * MIB)


def spec(**changes: str) -> ClusterSpec:
    text = TEXT
    for old, new in changes.items():
        text = text.replace(f"{old}: {'h100' if old == 'kind' else '8'}\n", f"{old}: {new}\n", 1)
    return parse_cluster(text, "c.yaml")


def test_a_node_as_its_driver_sees_it(tmp_path):
    nvml = Nvml([H100] * 8)
    facts = read(nvml, tmp_path)
    assert facts == NodeFacts((H100[0],) * 8, (81008 * MIB,) * 8) and not nvml.open
    joined = join(spec(), facts, "n1", "c.yaml")
    assert joined.gpu.usable_bytes == 81008 * MIB                 # 79.11 GiB, what torch calls the total capacity
    assert joined.sources["gpu.usable_bytes"].startswith("NVML on n1") and joined.nodes == spec().nodes


def test_names_may_be_bytes(tmp_path):
    assert read(Nvml([(b"NVIDIA H100 80GB HBM3", *H100[1:])]), tmp_path).gpu_names == ("NVIDIA H100 80GB HBM3",)


@pytest.mark.parametrize("start", [Nvml.NVMLError_LibraryNotFound(), Nvml.NVMLError_DriverNotLoaded()])
def test_a_login_node_has_no_facts(tmp_path, start):
    assert read(Nvml(start=start), tmp_path) is None and read(Nvml([]), tmp_path) is None


@pytest.mark.parametrize("nvml", [Nvml(start=Nvml.NVMLError("unknown error")),
                                  Nvml([H100], answer=Nvml.NVMLError("GPU is lost"))])
def test_a_driver_that_does_not_answer(tmp_path, nvml):
    with pytest.raises(UserError, match="does not answer") as error:
        read(nvml, tmp_path)
    assert error.value.where == "NVML" and not nvml.open


@pytest.mark.parametrize(("cluster", "gpus", "words"), [
    (spec(kind="h200"), [H100] * 8, ["c.yaml and n1 disagree", "H100-SXM-80GB", "not H200-SXM-141GB", "gpus.kind"]),
    (spec(), [H100] * 7, ["there are 7 GPUs, not 8", "gpus.per_node", "--exclusive"]),
    (spec(), [(H100[0], 73000 * MIB, 551 * MIB)] * 8, ["offers 76.0 GB, not 84.9", "gpus.memory_gb"]),
    (spec(), [("NVIDIA H100", 97871 * MIB, 600 * MIB)] * 8, ["H100-96GB-HBM2e-500W", "gpus.kind"]),
    (spec(), [H100, ("NVIDIA H200", 143771 * MIB, 600 * MIB)], ["mixes kinds", "1 x NVIDIA H200"]),
    (spec(), [("NVIDIA L40S", 46068 * MIB, 600 * MIB)], ["no figures for a GPU named 'NVIDIA L40S'", "NVML on n1"])])
def test_disagreement_names_both_sides(tmp_path, cluster, gpus, words):
    with pytest.raises(UserError) as error:
        join(cluster, read(Nvml(gpus), tmp_path), "n1", "c.yaml")
    assert all(word in str(error.value) for word in [*words, "NVML on n1"]), str(error.value)


@pytest.mark.parametrize(("found", "expected"), [
    ((("mlx5_0", 200.0), ("mlx5_1", 200.0), ("storage", 100.0)), (2, 25e9, 2)),
    ((("mlx5_0", 200.0),) * 3, (8, 50e9, 8)), ((), (8, 50e9, 8))])      # three among eight GPUs: not understood
def test_ports_replace_what_was_assumed_and_nothing_else(found, expected):
    assumed = replace(spec(), sources={**spec().sources, "cluster.nics_per_node": f"{ASSUMED}: one a GPU"})
    facts = NodeFacts((H100[0],) * 8, (81008 * MIB,) * 8, found)
    joined = join(assumed, facts, "n1", "Slurm")
    assert (joined.nics_per_node, joined.nic_bandwidth, joined.rails) == expected
    assert ("RDMA ports" in joined.sources["cluster.nic_bandwidth"]) == (expected[0] == 2)
    given = join(spec(), facts, "n1", "c.yaml")
    assert (given.nics_per_node, given.nic_bandwidth) == (8, 50e9)


def test_ports_of_the_network(tmp_path):
    """As /sys/class/infiniband lists them: an idle port and one that cannot be parsed do not count."""
    for device, rate, state in (("mlx5_0", "400 Gb/sec (4X NDR)", "4: ACTIVE"),
                                ("mlx5_1", "200 Gb/sec (4X HDR)", "4: ACTIVE"),
                                ("mlx5_2", "10 Gb/sec (4X SDR)", "1: DOWN"), ("odd", "fast", "4: ACTIVE")):
        port = tmp_path / device / "ports/1"
        port.mkdir(parents=True)
        (port / "rate").write_text(rate + "\n")
        (port / "state").write_text(state + "\n")
        (port / "link_layer").write_text("InfiniBand\n")
    assert read(Nvml([H100]), tmp_path).ports == (("mlx5_0", 400.0), ("mlx5_1", 200.0))
    assert read(Nvml([H100]), tmp_path / "none").ports == ()
