"""Known failures of the nodes: memory and disks, network, GPUs."""

from __future__ import annotations

from launch.report.diagnose.known.symptom import Symptom

MEMORY: tuple[Symptom, ...] = (
    Symptom("gpu-memory", "CUDA out of memory",
            "A GPU has no memory for an allocation of PyTorch. Much reserved but unallocated memory means "
            "fragmentation; otherwise the plan's estimate was too small.",
            "Lower trainer.token_budget, set trainer.recompute=full, or increase trainer.tp, pp or cp; for an "
            "engine lower rollout.memory_utilization. `megatron-rl plan explain CONFIG memory` shows the estimate.",
            logs=r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA error: out of memory|"
                 r"CUBLAS_STATUS_ALLOC_FAILED"),
    Symptom("kv-cache", "No available memory for the cache blocks",
            "An engine has no room for a KV cache, or not enough for the longest sequence.",
            "Increase rollout.memory_utilization or rollout.tp, or lower max_prompt_tokens and max_new_tokens.",
            logs=r"No available memory for the cache blocks|larger than the available KV cache memory|"
                 r"larger than the maximum number of tokens that can be stored in KV cache"),
    Symptom("ray-memory", "node running low on memory",
            "Ray killed a worker because the node used 95% of its host memory.",
            "Lower reward.workers or, on CPUs, rollout.kv_cache_gb. `megatron-rl logs RUN --role ray-logs` names the "
            "largest.",
            logs=r"[Tt]ask was killed due to the node running low on memory|"
                 r"Workers \(tasks / actors\) killed due to memory pressure",
            weight=0),
    Symptom("host-memory", "MemoryError",
            "The kernel's out-of-memory killer ended a process. Its log stops, and its exit status is -9 or 137.",
            "Lower reward.workers or, on CPUs, rollout.kv_cache_gb. `dmesg -T | grep -i killed` on the node names the "
            "process.",
            logs=r"Out of memory: Killed process|std::bad_alloc|OSError: \[Errno 12\]|\bMemoryError\b"),
    Symptom("silent-death", "died without an error of its own",
            "A process ended without a message: killed, out of memory, or crashed in native code.",
            "Check the end of its log and `dmesg -T` on its node (killed, segfault, Xid).",
            outcome=r"died without an error of its own|lost its process \d+|died without a word",
            weight=2),
    Symptom("shared-memory", "insufficient shared memory",
            "/dev/shm is full or small (64 MB in many containers). NCCL, Ray, vLLM and data workers need it.",
            "Start the container with the host's /dev/shm (--ipc=host or --shm-size). On a node without jobs of "
            "yours, `find /dev/shm -user $USER -type f -delete` removes leftovers.",
            logs=r"insufficient shared memory|out of shared memory|unable to (?:open|mmap) shared memory|"
                 r"/dev/shm.*No space"),
    Symptom("disk-full", "No space left on device",
            "A disk or quota is full: the run's folder, /tmp or the home folder. Complete checkpoints are intact.",
            "Free space, set run.dir to another file system, or lower checkpoint.keep.",
            logs=r"No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]",
            outcome=r"no space left",
            weight=0),
)

NETWORK: tuple[Symptom, ...] = (
    Symptom("collective-timeout", "Watchdog caught collective operation timeout",
            "A rank waited for the others until its deadline, usually after another rank failed, hung or was late.",
            "Find that rank with `megatron-rl logs RUN --first-error`. If none failed, check the network: "
            "`megatron-rl preflight --tier fabric`.",
            logs=r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:recv|"
                 r"send) operation",
            weight=2),
    Symptom("peer-gone", "Connection closed by remote peer",
            "The process at the other end of a connection ended before.",
            "Find the process that ended first: `megatron-rl logs RUN --first-error`.",
            logs=r"Connection (?:closed|reset) by (?:remote )?peer|ncclRemoteError|remote process exited|"
                 r"ActorDiedError|RayActorError|EngineDeadError",
            weight=2),
    Symptom("infiniband", "NET/IB : Got completion from peer",
            "InfiniBand gave up sending to a peer (status 12: retries exhausted): a cable, port or switch is down, "
            "or two rails have no route.",
            "Run `ibstat` on both nodes, exclude the node (--exclude) and tell the administrator. For RoCE check "
            "NCCL_IB_GID_INDEX and NCCL_IB_TC.",
            logs=r"NET/IB\w* ?: ?Got completion from peer|IBV_WC_RETRY_EXC_ERR|transport retry counter exceeded",
            weight=0),
    Symptom("interface", "Unable to find address for",
            "A configured network interface does not exist on this node. gloo takes one exact name; for NCCL "
            "`=eth0` is exact and `eth0` a prefix.",
            "Set the interfaces in the site profile, or unset NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.",
            logs=r"Unable to find (?:address|interface) for|no socket interface found|"
                 r"connecting to address  with family",
            weight=0),
    Symptom("port-in-use", "Address already in use",
            "A leftover process or another job on the node uses a port of the job.",
            "End the leftover by the pid in the message. Unset run.port_base to take a free block.",
            logs=r"[Aa]ddress already in use|EADDRINUSE|\[Errno 98\]",
            outcome=r"port .* (?:in use|taken)",
            weight=0),
    Symptom("open-files", "Too many open files",
            "The limit of open files is too low (often 1024).",
            "`ulimit -n 65536` before submission, or LimitNOFILE of slurmd (administrator).",
            logs=r"Too many open files|\[Errno 24\]",
            weight=0),
    Symptom("locked-memory", "ibv_reg_mr_iova2 failed",
            "The limit of locked memory is too low for InfiniBand.",
            "Set LimitMEMLOCK=infinity for slurmd; see PropagateResourceLimitsExcept.",
            logs=r"ibv_\w+(?:\(.*\))? failed.*Cannot allocate memory",
            weight=0),
)

GPU: tuple[Symptom, ...] = (
    Symptom("gpu-fault", "uncorrectable ECC error",
            "A GPU or its link is broken: memory errors, off the bus, NVLink down.",
            "Nothing, if the launcher excludes the node (exit 76); otherwise use --exclude=NODE. Tell the "
            "administrator.",
            logs=r"uncorrectable (?:ECC|NVLink) error|fallen off the bus|\bNVRM: Xid|CUDA_ERROR_ECC_UNCORRECTABLE|"
                 r"unspecified launch failure|hardware error",
            outcome=r"^hardware_fault: ",
            weight=0),
    Symptom("gpu-ordinal", "invalid device ordinal",
            "A process sees fewer GPUs than it was placed on.",
            "Request one task per node with all GPUs (--gpus-per-node, not --gpus-per-task or --gpu-bind). Do not set "
            "CUDA_VISIBLE_DEVICES.",
            logs=r"invalid device ordinal",
            weight=0),
    Symptom("driver", "Driver/library version mismatch",
            "The driver was updated on a running system, or is too old for this CUDA.",
            "Reboot the node or update its driver (administrator), equal on all nodes of a job.",
            logs=r"[Dd]river/library version mismatch|CUDA driver version is insufficient|"
                 r"provided PTX was compiled with an unsupported toolchain",
            weight=0),
)
