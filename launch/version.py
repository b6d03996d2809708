"""The version of the package. `megatron-rl --version` prints it; setup.py reads it from this file."""

VERSION = "0.1.0"
