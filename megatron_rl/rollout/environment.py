"""What a vLLM engine needs in its environment. `launch.envvars` sets it; a test compares the two."""

from __future__ import annotations

from typing import Literal


def vllm_environment(device: Literal["cpu", "gpu"], *, address: str = "127.0.0.1", interface: str = "lo"
                     ) -> dict[str, str]:
    """Variables that must be set before the Python of an engine's process starts; its workers inherit them.

    Args:
        device: where the engine runs.
        address: this node's address inside the job; the engine's workers meet there.
        interface: network interface of `address`, for gloo.
    """
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": address,
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "GLOO_SOCKET_IFNAME": interface,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if device == "gpu":
        # Trainer and engine must agree on it, or communicators between them hang (SkyRL#143).
        return variables | {"NCCL_CUMEM_ENABLE": "0"}
    return variables | {
        # Several processes share the cores here; vLLM's own binding expects a NUMA node a worker.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        # Lets an engine without tensor parallelism run its worker inside the engine core's process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
