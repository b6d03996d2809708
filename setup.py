"""Packaging. `pip install .` gives the launcher only, fit for a login node; the stack that computes (torch, vLLM,
Megatron-core, Ray) comes pinned from requirements/*.lock, because no single resolver run gives a working set.

The metadata is here. pyproject.toml names the build backend and holds the settings of the tools, and has no [project]
table: with one, setuptools would take the metadata from there."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
readme = root / "README.md"

setup(
    name="megatron-rl",
    version=runpy.run_path(str(root / "launch" / "version.py"))["VERSION"],
    description="GRPO on Slurm clusters: Megatron-core trains, vLLM rolls out, Ray drives",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["launch", "launch.*", "megatron_rl", "megatron_rl.*"]),
    include_package_data=True,
    install_requires=["click>=8.1", "pydantic>=2.12", "pyyaml>=6", "rich>=14", "psutil>=6", "plotext>=6.1"],
    extras_require={"report": ["matplotlib>=3.9"], "slurm": ["submitit>=1.5.4"]},
    entry_points={"console_scripts": ["megatron-rl = launch.cli.main:main"]},
)
