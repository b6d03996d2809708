from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launch.cluster.gpus import KNOWN, find
from launch.errors import UserError

MEASURED = Path(__file__).parents[2] / "benchmarks/measured"


@pytest.mark.parametrize(("name", "row"), [
    ("h100", "H100-SXM-80GB"), ("H100-SXM-80GB", "H100-SXM-80GB"), ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
    ("nvidia_h100_80gb_hbm3", "H100-SXM-80GB"), ("H100-96GB-HBM2e-500W", "H100-96GB-HBM2e-500W"),
    ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"), ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
    ("nvidia_a100-sxm4-80gb", "A100-SXM-80GB"), ("A100", "A100-SXM-80GB"), ("a100_40gb", "A100-SXM-40GB"),
    ("NVIDIA H20", "H20-96GB"), ("NVIDIA H200", "H200-SXM-141GB"), ("H800", "H800-SXM-80GB"),
    ("NVIDIA B200", "B200-SXM-180GB"), ("A800-80GB", "A800-SXM-80GB"),
    ("cpu", "CPU-core"), ("CPU-core", "CPU-core")])
def test_a_name_finds_its_row(name, row):
    assert find(name).name == row


@pytest.mark.parametrize(("name", "near"), [
    ("H100 PCIe", "H100-SXM-80GB"), ("NVIDIA H100 NVL", "H100-SXM-80GB"), ("NVIDIA A100 80GB PCIe", "A100-SXM-80GB"),
    ("NVIDIA GH200 480GB", "H200-SXM-141GB"), ("NVIDIA H100 96GB HBM3", "H100"), ("H2000", "H200-SXM-141GB"),
    ("V100", ""), ("1g.10gb", ""), ("", "")])
def test_another_card_is_not_taken_for_one_of_the_table(name, near):
    """A PCIe card has the family's name, and three quarters of its rate."""
    with pytest.raises(UserError) as error:
        find(name, "x.yaml:3, gpus.kind")
    assert repr(name) in error.value.what and "x.yaml:3" in error.value.where
    assert error.value.fix.startswith(f"nearest: {near}") and all(gpu.name in error.value.fix for gpu in KNOWN)


def test_memory_decides_where_the_name_does_not():
    """Some H100 with 96 GB call themselves just "NVIDIA H100"."""
    assert find("NVIDIA H100", memory_bytes=int(94.99 * 2**30)).name == "H100-96GB-HBM2e-500W"
    assert find("NVIDIA H100", memory_bytes=int(79.2 * 2**30)).name == "H100-SXM-80GB"
    assert find("NVIDIA A100", memory_bytes=int(39.5 * 2**30)).name == "A100-SXM-40GB"


def test_every_gpu_of_the_measured_points_is_known():
    names = {str(point["hardware"]["gpu"]) for file in MEASURED.glob("*.yaml")
             for point in yaml.safe_load(file.read_text())["points"]}
    assert len(names) >= 6
    assert all(find(name) for name in names - {"not_stated"})


def test_figures_are_dense_and_consistent():
    """Ratios that the datasheets imply; a sparse figure would break the first."""
    rows = {gpu.name: gpu for gpu in KNOWN}
    h100, h800, h200, a100 = (rows[name] for name in ("H100-SXM-80GB", "H800-SXM-80GB", "H200-SXM-141GB",
                                                      "A100-SXM-80GB"))
    assert 3.1 < h100.bf16_flops / a100.bf16_flops < 3.2                # both dense: 989.4 / 312
    assert h800.bf16_flops == h200.bf16_flops == h100.bf16_flops        # one chip
    assert h800.nvlink_bandwidth < h100.nvlink_bandwidth
    for gpu in KNOWN:
        assert gpu.fp8_flops in (gpu.bf16_flops, pytest.approx(2 * gpu.bf16_flops, rel=1e-3))
        assert gpu.fp32_flops < gpu.bf16_flops and gpu.source
        # Sold in GB of 1e9 or of 2^30; the driver keeps less than 3 % of it.
        assert 0.97 <= gpu.usable_bytes / gpu.hbm_bytes <= 1.075


@given(st.text(max_size=40) | st.sampled_from([gpu.name for gpu in KNOWN]).flatmap(
    lambda name: st.permutations(name).map("".join)))
def test_any_text_finds_a_row_or_says_so(text):
    try:
        assert find(text) in KNOWN
    except UserError as error:
        assert error.fix and error.exit_code == 2
