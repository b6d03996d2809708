"""Known failures of the nodes: memory and disks, network, GPUs."""

from __future__ import annotations

from launch.report.diagnose.known.symptom import Symptom

MEMORY: tuple[Symptom, ...] = (
    Symptom("gpu-memory", "CUDA out of memory",
            "A GPU has no memory left for an allocation of PyTorch's. With much reserved but unallocated memory "
            "it is fragmentation, else the plan's estimate was too small.",
            "Lower trainer.token_budget, use trainer.recompute=full, more trainer.tp, pp or cp; for an engine a "
            "lower rollout.memory_utilization. `megatron-rl plan --explain memory` shows what was expected.",
            logs=r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA error: out of memory|"
                 r"CUBLAS_STATUS_ALLOC_FAILED"),
    Symptom("kv-cache", "No available memory for the cache blocks",
            "After its weights an engine has no room for a KV cache, or too little for one sequence of the "
            "longest length.",
            "A higher rollout.memory_utilization, more rollout.tp, or smaller max_prompt_tokens and "
            "max_new_tokens.",
            logs=r"No available memory for the cache blocks|larger than the available KV cache memory|"
                 r"larger than the maximum number of tokens that can be stored in KV cache"),
    Symptom("ray-memory", "node running low on memory",
            "Ray's memory monitor killed a worker because the node had used 95% of its host memory.",
            "Fewer or smaller processes on the node (reward.workers, rollout.kv_cache_gb on CPUs), or a node with "
            "more memory. Something else may be using it: `megatron-rl logs RUN --role ray-logs` names the "
            "largest processes.",
            logs=r"[Tt]ask was killed due to the node running low on memory|"
                 r"Workers \(tasks / actors\) killed due to memory pressure",
            weight=0),
    Symptom("host-memory", "MemoryError",
            "The kernel's out-of-memory killer ended a process: its log just stops, and its exit status is -9 or "
            "137.",
            "Fewer or smaller processes on the node; `dmesg -T | grep -i killed` on the node names the process.",
            logs=r"Out of memory: Killed process|std::bad_alloc|OSError: \[Errno 12\]|\bMemoryError\b"),
    Symptom("silent-death", "died without an error of its own",
            "A process was gone and had said nothing: killed from outside, out of memory, or crashed in native "
            "code.",
            "The end of its log; `dmesg -T` on its node (killed, segfault, Xid); fewer processes on the node if "
            "it was memory.",
            outcome=r"died without an error of its own|lost its process \d+|died without a word",
            weight=2),
    Symptom("shared-memory", "insufficient shared memory",
            "/dev/shm is full or small (64 MB in many containers). NCCL, Ray, vLLM and data workers keep buffers "
            "there. What an attempt's processes leave is removed at its end, or by the run's next attempt on the node; "
            "what a node keeps that no attempt comes back to is not.",
            "Start the container with the host's /dev/shm (--ipc=host, or --shm-size). On a node where no job of yours "
            "runs, `find /dev/shm -user $USER -type f` lists what dead ones left, and with `-delete` removes it.",
            logs=r"insufficient shared memory|out of shared memory|unable to (?:open|mmap) shared memory|"
                 r"/dev/shm.*No space"),
    Symptom("disk-full", "No space left on device",
            "A disk is full, or a quota is used up: the run's folder, /tmp of a node, or the home folder.",
            "Free some, or set run.dir to another file system; complete checkpoints are untouched. "
            "checkpoint.keep bounds what a run keeps.",
            logs=r"No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]",
            outcome=r"no space left",
            weight=0),
)

NETWORK: tuple[Symptom, ...] = (
    Symptom("collective-timeout", "Watchdog caught collective operation timeout",
            "A rank waited for the others until its deadline. It mostly only follows: another rank had failed, "
            "hung or been late before.",
            "`megatron-rl logs RUN --first-error` for the rank that failed first; if none did, the network: run "
            "the fabric checks (`megatron-rl preflight --tier fabric`).",
            logs=r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:recv|"
                 r"send) operation",
            weight=2),
    Symptom("peer-gone", "Connection closed by remote peer",
            "A process found the connection to another one closed: that one had ended before.",
            "`megatron-rl logs RUN --first-error`: the process that ended first.",
            logs=r"Connection (?:closed|reset) by (?:remote )?peer|ncclRemoteError|remote process exited|"
                 r"ActorDiedError|RayActorError|EngineDeadError",
            weight=2),
    Symptom("infiniband", "NET/IB : Got completion from peer",
            "InfiniBand gave up sending to a peer (status 12: retries used up): a cable, a port or switch that is "
            "down, or routes that do not exist between two rails.",
            "`ibstat` on both nodes; leave the node out (--exclude) and tell the administrator. In RoCE networks "
            "also the site profile's NCCL_IB_GID_INDEX and NCCL_IB_TC.",
            logs=r"NET/IB\w* ?: ?Got completion from peer|IBV_WC_RETRY_EXC_ERR|transport retry counter exceeded",
            weight=0),
    Symptom("interface", "Unable to find address for",
            "A library was told to use a network interface that this node does not have, or whose name is not "
            "exact. gloo takes one name; in NCCL's, `=eth0` is exact and `eth0` a prefix.",
            "Name the interfaces in the site profile (slurm/profiles), or leave the choice to the launcher; "
            "nothing in the shell may set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME.",
            logs=r"Unable to find (?:address|interface) for|no socket interface found|"
                 r"connecting to address  with family",
            weight=0),
    Symptom("port-in-use", "Address already in use",
            "A port of the job is held by another process: a leftover of an earlier job, or another job on the "
            "same node.",
            "The message names the process where it can be seen. Unset run.port_base, so that the job takes a "
            "free block; end the leftover by its pid.",
            logs=r"[Aa]ddress already in use|EADDRINUSE|\[Errno 98\]",
            outcome=r"port .* (?:in use|taken)",
            weight=0),
    Symptom("open-files", "Too many open files",
            "The limit of open files is too low (1024 by default on many systems); hundreds of connections need "
            "more.",
            "`ulimit -n 65536` before submission, or LimitNOFILE of slurmd (administrator). The preflight checks "
            "it.",
            logs=r"Too many open files|\[Errno 24\]",
            weight=0),
    Symptom("locked-memory", "ibv_reg_mr_iova2 failed",
            "Memory could not be pinned for InfiniBand: the limit of locked memory is low.",
            "`ulimit -l unlimited` in slurmd's service (LimitMEMLOCK=infinity), see PropagateResourceLimitsExcept.",
            logs=r"ibv_\w+(?:\(.*\))? failed.*Cannot allocate memory",
            weight=0),
)

GPU: tuple[Symptom, ...] = (
    Symptom("gpu-fault", "uncorrectable ECC error",
            "A GPU or its link is broken: memory errors, fallen off the bus, NVLink down.",
            "The launcher leaves the node out where a check shows evidence (exit 76); else --exclude=NODE, and "
            "tell the administrator: the GPU needs a reset or a replacement.",
            logs=r"uncorrectable (?:ECC|NVLink) error|fallen off the bus|\bNVRM: Xid|CUDA_ERROR_ECC_UNCORRECTABLE|"
                 r"unspecified launch failure|hardware error",
            outcome=r"^hardware_fault: ",
            weight=0),
    Symptom("gpu-ordinal", "invalid device ordinal",
            "A process sees fewer GPUs than it was placed on: Slurm handed out a part of them (--gpus-per-task, "
            "--gpu-bind), or something changed CUDA_VISIBLE_DEVICES.",
            "One task a node with all GPUs (--gpus-per-node, as the rendered scripts do); nothing in the shell or "
            "the container may set CUDA_VISIBLE_DEVICES.",
            logs=r"invalid device ordinal",
            weight=0),
    Symptom("driver", "Driver/library version mismatch",
            "The driver was updated under a running system, or is older than this CUDA needs.",
            "Reboot the node (administrator); nodes of a job need one driver, which the preflight compares.",
            logs=r"[Dd]river/library version mismatch|CUDA driver version is insufficient|"
                 r"provided PTX was compiled with an unsupported toolchain",
            weight=0),
)
