"""The environment a vLLM process needs, as data: the launcher sets it before Python starts."""

from __future__ import annotations

from typing import Literal


def vllm_environment(device: Literal["cpu", "gpu"], *, address: str = "127.0.0.1", interface: str | None = None,
                     threads: int = 1) -> dict[str, str]:
    """Variables of a rollout engine's process and of the workers it starts.

    Args:
        device: where the engine runs.
        address: this node's address inside the job; the engine's workers meet there.
        interface: network interface of `address` for gloo; on a CPU the loopback device by default.
        threads: OpenMP threads a worker (CPU only).
    """
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": address,
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if interface is None and device == "cpu":
        interface = "lo"
    if interface is not None:
        variables["GLOO_SOCKET_IFNAME"] = interface
    if device == "gpu":
        # Trainer and engine must agree on it, or communicators between them hang (SkyRL#143).
        return variables | {"NCCL_CUMEM_ENABLE": "0"}
    return variables | {
        # Several processes share the cores here; vLLM's own binding expects a NUMA node a worker.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1",
        # Lets an engine without tensor parallelism run its worker inside the engine core's process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
