from __future__ import annotations

import re
from pathlib import Path

from launch.cluster import schema
from launch.cluster.gpus import table
from launch.config.keys import all_keys

PAGE = (Path(__file__).parents[2] / "docs/clusters.md").read_text(encoding="utf-8")


def test_the_table_of_gpus_is_the_one_in_the_code():
    """Refresh with: python -c "from launch.cluster.gpus import table; print(table(), end='')"."""
    assert PAGE.endswith("\n" + table())


def test_every_key_of_a_cluster_file_is_explained_and_no_other():
    explained = set(re.findall(r"`([a-z_.]+)`", PAGE.partition("| Key | Meaning |")[2].partition("###")[0]))
    keys = {key.dotted for key in all_keys(schema.ClusterFile) if key.section is None and "*" not in key.dotted}
    assert explained - {"network.switches", "nics_per_node", "coefficients"} == keys - {"coefficients"}
