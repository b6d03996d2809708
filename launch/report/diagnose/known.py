"""The table of known failures. docs/troubleshooting.md is made from it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Symptom:
    """One known failure: how to recognise it, its cause and its remedy."""

    code: str
    see: str
    """The first sign of the failure, as printed. It is part of a recorded sample (tests/report/samples)."""
    cause: str
    remedy: str
    logs: str = ""
    slurm: str = ""
    outcome: str = ""
    weight: int = 0
    """0: explains every other finding; 1: a cause; 2: a consequence; 3: the least specific."""

    @cached_property
    def in_logs(self) -> re.Pattern | None:
        return re.compile(self.logs) if self.logs else None


JOB: tuple[Symptom, ...] = (
    Symptom("output-folder", "FAILED exit=0:53",
            "Slurm could not open the job's output file: its folder is missing or not writable on the node. The "
            "script never ran, and there is no log.",
            "Create the folder of --output on a shared file system, or use a flat name (%x-%j.log).",
            slurm=r"^FAILED .*exit=0:53"),
    Symptom("requeue-wait", "PENDING BeginTime",
            "The job was requeued. Slurm starts it again after about two minutes.",
            "Nothing.",
            slurm=r"^PENDING BeginTime .*restarts=[1-9]"),
    Symptom("queue-wait", "PENDING Resources",
            "The job waits for nodes, for jobs of higher priority, or for a dependency.",
            "Wait, or request less. `squeue --start -j JOB` shows the estimate.",
            slurm=r"^PENDING (?:Resources|Priority|Dependency|BeginTime .*restarts=0|None|ReqNodeNotAvail|"
                  r"Nodes_required|QOS|Assoc)",
            weight=1),
    Symptom("held", "PENDING JobHeldUser",
            "The job is held, by a user or because it failed to start.",
            "`scontrol release JOB`. If it failed to start, check the node that `scontrol show job` names first.",
            slurm=r"^PENDING (?:JobHeld|launch_failed_requeued_held|\(launch failed)"),
    Symptom("never-starts", "PENDING PartitionTimeLimit",
            "The job requests more than its partition, account or QOS allows.",
            "Check `scontrol show partition`. Request less time or fewer nodes, or another partition.",
            slurm=r"^PENDING (?:PartitionTimeLimit|PartitionNodeLimit|PartitionConfig|BadConstraints|"
                  r"AccountNotAllowed|InvalidAccount|InvalidQOS|AssocMax\w*|QOSMax\w*PerJob\w*|PartitionDown|"
                  r"PartitionInactive)"),
    Symptom("node-fail", "DUE TO NODE FAILURE",
            "A node crashed, lost its network, or was switched off.",
            "Nothing, if Slurm requeues the job. By hand: sbatch --exclude=NODE.",
            logs=r"DUE TO NODE FAILURE",
            slurm=r"^NODE_FAIL",
            outcome=r"^(?:node_failure|died): "),
    Symptom("preempted", "DUE TO PREEMPTION",
            "A job of higher priority took the nodes. Work since the last checkpoint is lost, unless the GraceTime "
            "holds a step and a checkpoint.",
            "Nothing, if the job is requeued. Lower checkpoint.every to lose less.",
            logs=r"DUE TO PREEMPTION",
            slurm=r"^PREEMPTED"),
    Symptom("time-limit", "DUE TO TIME LIMIT",
            "The time limit ended the job before its last checkpoint.",
            "Increase run.stop_margin_s (the plan prints what it needs) or --time.",
            logs=r"DUE TO TIME LIMIT",
            slurm=r"^TIMEOUT"),
    Symptom("cancelled", "CANCELLED",
            "The job was cancelled (scancel).",
            "Submit it again to continue from its last checkpoint.",
            logs=r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ \*\*\*",
            slurm=r"^CANCELLED",
            weight=2),
    Symptom("slurm-memory", "oom_kill event",
            "The job used more host memory than Slurm gave it.",
            "Request all memory (--mem=0 with --exclusive), or lower reward.workers or, on CPUs, rollout.kv_cache_gb.",
            logs=r"[Dd]etected \d+ oom[-_]kill event|oom_kill event|task \d+: Out Of Memory",
            slurm=r"^OUT_OF_MEMORY"),
    Symptom("export-none", "execve(): python3: No such file or directory",
            "A job submitted with --export=NONE, NIL or NAME=value has no PATH.",
            "Submit without --export, or with --export=ALL.",
            logs=r"error: execve\(\): \S+: No such file or directory"),
    Symptom("wrong-root", "No module named launch",
            "The batch script does not run in the repository's root, or the nodes do not see it.",
            "Submit from the root on a shared file system, or set MEGATRON_RL_ROOT to it.",
            logs=r"No module named '?launch'?|submit (?:this )?from the repository(?:'s)? root"),
    Symptom("step-aborted", "Exited with exit code",
            "A task of the step failed or received a signal.",
            "Find the task that ended first: `megatron-rl logs RUN --first-error`.",
            logs=r"srun: (?:Job step aborted|error: \S+: tasks? [\d,-]+: (?:Exited with exit code|Terminated|"
                 r"Killed))",
            weight=2),
)

MEMORY: tuple[Symptom, ...] = (
    Symptom("gpu-memory", "CUDA out of memory",
            "A GPU has no memory for an allocation of PyTorch. Much reserved but unallocated memory means "
            "fragmentation; otherwise the plan's estimate was too small.",
            "Lower trainer.token_budget, set trainer.recompute=full, or increase trainer.tp, pp or cp; for an "
            "engine lower rollout.memory_utilization. `megatron-rl plan explain CONFIG memory` shows the estimate.",
            logs=r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA error: out of memory|"
                 r"CUBLAS_STATUS_ALLOC_FAILED",
            weight=1),
    Symptom("kv-cache", "No available memory for the cache blocks",
            "An engine has no room for a KV cache, or not enough for the longest sequence.",
            "Increase rollout.memory_utilization or rollout.tp, or lower max_prompt_tokens and max_new_tokens.",
            logs=r"No available memory for the cache blocks|larger than the available KV cache memory|"
                 r"larger than the maximum number of tokens that can be stored in KV cache",
            weight=1),
    Symptom("ray-memory", "node running low on memory",
            "Ray killed a worker because the node used 95% of its host memory.",
            "Lower reward.workers or, on CPUs, rollout.kv_cache_gb. `megatron-rl logs RUN --role ray-logs` names the "
            "largest.",
            logs=r"[Tt]ask was killed due to the node running low on memory|"
                 r"Workers \(tasks / actors\) killed due to memory pressure"),
    Symptom("host-memory", "MemoryError",
            "The kernel's out-of-memory killer ended a process. Its log stops, and its exit status is -9 or 137.",
            "Lower reward.workers or, on CPUs, rollout.kv_cache_gb. `dmesg -T | grep -i killed` on the node names the "
            "process.",
            logs=r"Out of memory: Killed process|std::bad_alloc|OSError: \[Errno 12\]|\bMemoryError\b",
            weight=1),
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
                 r"/dev/shm.*No space",
            weight=1),
    Symptom("disk-full", "No space left on device",
            "A disk or quota is full: the run's folder, /tmp or the home folder. Complete checkpoints are intact.",
            "Free space, set run.dir to another file system, or lower checkpoint.keep.",
            logs=r"No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]",
            outcome=r"no space left"),
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
            logs=r"NET/IB\w* ?: ?Got completion from peer|IBV_WC_RETRY_EXC_ERR|transport retry counter exceeded"),
    Symptom("interface", "Unable to find address for",
            "A configured network interface does not exist on this node. gloo takes one exact name; for NCCL "
            "`=eth0` is exact and `eth0` a prefix.",
            "Set the interfaces in the site profile, or unset NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.",
            logs=r"Unable to find (?:address|interface) for|no socket interface found|"
                 r"connecting to address  with family"),
    Symptom("port-in-use", "Address already in use",
            "A leftover process or another job on the node uses a port of the job.",
            "End the leftover by the pid in the message. Unset run.port_base to take a free block.",
            logs=r"[Aa]ddress already in use|EADDRINUSE|\[Errno 98\]",
            outcome=r"port .* (?:in use|taken)"),
    Symptom("open-files", "Too many open files",
            "The limit of open files is too low (often 1024).",
            "`ulimit -n 65536` before submission, or LimitNOFILE of slurmd (administrator).",
            logs=r"Too many open files|\[Errno 24\]"),
    Symptom("locked-memory", "ibv_reg_mr_iova2 failed",
            "The limit of locked memory is too low for InfiniBand.",
            "Set LimitMEMLOCK=infinity for slurmd; see PropagateResourceLimitsExcept.",
            logs=r"ibv_\w+(?:\(.*\))? failed.*Cannot allocate memory"),
)

GPU: tuple[Symptom, ...] = (
    Symptom("gpu-fault", "uncorrectable ECC error",
            "A GPU or its link is broken: memory errors, off the bus, NVLink down.",
            "Nothing, if the launcher excludes the node (exit 76); otherwise use --exclude=NODE. Tell the "
            "administrator.",
            logs=r"uncorrectable (?:ECC|NVLink) error|fallen off the bus|\bNVRM: Xid|CUDA_ERROR_ECC_UNCORRECTABLE|"
                 r"unspecified launch failure|hardware error",
            outcome=r"^hardware_fault: "),
    Symptom("gpu-ordinal", "invalid device ordinal",
            "A process sees fewer GPUs than it was placed on.",
            "Request one task per node with all GPUs (--gpus-per-node, not --gpus-per-task or --gpu-bind). Do not set "
            "CUDA_VISIBLE_DEVICES.",
            logs=r"invalid device ordinal"),
    Symptom("driver", "Driver/library version mismatch",
            "The driver was updated on a running system, or is too old for this CUDA.",
            "Reboot the node or update its driver (administrator), equal on all nodes of a job.",
            logs=r"[Dd]river/library version mismatch|CUDA driver version is insufficient|"
                 r"provided PTX was compiled with an unsupported toolchain"),
)

STACK: tuple[Symptom, ...] = (
    Symptom("ray-start", "have not registered within the timeout",
            "Ray's workers did not start in time, on a slow file system or an overloaded node.",
            "Increase run.deadline_s, or put the environment on a local disk or in a container.",
            logs=r"have not registered within the timeout|Failed to register worker|did not (?:start|"
                 r"register) within",
            weight=1),
    Symptom("missing-module", "ModuleNotFoundError",
            "A package is missing in the environment of a node.",
            "Use the same environment on every node: `make install`, or the container of the site profile.",
            logs=r"ModuleNotFoundError: No module named '(?!launch)"),
    Symptom("model-files", "weight files are missing in",
            "The model's folder is incomplete, or missing on a node.",
            "Copy the file that the message names again. model.path must be on a shared file system.",
            logs=r"weight files are missing in|holds neither model\.safetensors|"
                 r"the model folder \S+ does not exist|tensors are missing in|is truncated or damaged|"
                 r"No such file or directory: '\S+\.safetensors'",
            outcome=r"weight files are missing in|holds neither model\.safetensors|"
                    r"the model folder \S+ does not exist|tensors are missing in|is truncated or damaged"),
    Symptom("tokenizer", "holds no tokenizer",
            "Tokenizer files are missing or damaged, or the chat template does not fit the data.",
            "Copy tokenizer.json and tokenizer_config.json of the model again, or set data.chat_template.",
            logs=r"holds no tokenizer|the tokenizer in \S+ cannot be read|[Cc]an't load tokenizer for",
            outcome=r"holds no tokenizer|the tokenizer in \S+ cannot be read|chat template"),
    Symptom("offline", "couldn't connect to 'https://huggingface.co'",
            "Something tried to download, usually a name from the Hub instead of a folder. Jobs run offline.",
            "Use local folders and files: model.path, data.train, data.eval.",
            logs=r"couldn't connect to 'https://huggingface\.co|OfflineModeIsEnabled|"
                 r"outgoing traffic has been disabled"),
    Symptom("digest", "the engines do not hold what the trainer sent",
            "An engine held other weights than the trainer sent: a fault of memory, network or this program. They "
            "were not served.",
            "Start again to continue from the checkpoint. Exclude a node that is named twice.",
            logs=r"the engines do not hold what the trainer sent"),
)

ENDS: tuple[Symptom, ...] = (
    Symptom("hang", "never arrived",
            "No progress for longer than a phase may take. The process that the others wait for is named.",
            "Check the stack (attempt's stacks/) and the log of that process. For a slow phase increase "
            "run.hang_factor or run.hang_min_s.",
            slurm=r"exit=75:0",
            outcome=r"^hang: ",
            weight=1),
    Symptom("bad-node", "kept out by the ledger",
            "The ledger of bad nodes holds a node of this attempt, with evidence.",
            "Nothing: the next attempt excludes it. To use it again, remove its entry."),
    Symptom("preflight", "preflight found a critical fault",
            "A check before the start failed, and too few nodes were left.",
            "`megatron-rl preflight` on the nodes shows the failed checks and the --exclude= line.",
            slurm=r"exit=5:0",
            outcome=r"^preflight: ",
            weight=1),
    Symptom("no-plan", "no placement fits",
            "No plan fits these nodes, or the allocation differs from the plan.",
            "`megatron-rl plan CONFIG` names the smallest changes that fit. run.replan=true plans for the "
            "allocation.",
            slurm=r"exit=3:0",
            outcome=r"differs from the plan|no (?:placement|plan) fits",
            weight=1),
    Symptom("no-progress", "crashed again without progress",
            "Several attempts ended at the same step, so no further attempt is made.",
            "Fix the first error of the last attempt, then submit again.",
            slurm=r"exit=93:0",
            outcome=r"attempts in a row",
            weight=1),
    Symptom("attempts-used-up", "has had its 20 attempts",
            "The run has used up its unattended attempts.",
            "Check why they ended (runs/NAME/attempts.jsonl). Submitting again restarts the count; or increase "
            "run.max_attempts.",
            outcome=r"has had its \d+ attempts",
            weight=2),
    Symptom("unfinished", "stopped cleanly before the last step",
            "The run stopped cleanly with a checkpoint. Dependent jobs (afterok) do not start.",
            "If no job continues (`megatron-rl status RUN`), submit again.",
            slurm=r"exit=94:0",
            weight=1),
    Symptom("faulty-node", "GPU, node or network fault, with evidence",
            "A node died, or its checks found broken hardware after the failure.",
            "Nothing, if a fresh job continues without the node. Tell the administrator.",
            slurm=r"exit=76:0",
            weight=1),
    Symptom("slurm-refused", "Slurm refused the request or cannot be reached",
            "Slurm refused a request, or its controller did not answer.",
            "See Slurm's words in the message. `scontrol ping` shows whether the controller answers.",
            slurm=r"exit=6:0",
            outcome=r"^user_error: srun ended with status",
            weight=1),
    Symptom("interrupted", "interrupted a second time",
            "The run ended before its checkpoint was complete: Ctrl-C twice, or Slurm ended the job.",
            "Start it again to continue from its last checkpoint. One Ctrl-C, or `megatron-rl stop`, stops with a "
            "checkpoint.",
            slurm=r"exit=130:0",
            outcome=r"^interrupted: ",
            weight=1),
    Symptom("internal", "a bug in megatron-rl itself",
            "An unexpected error ended the command, or the batch script failed before it.",
            "Read the end of the job's log. Report a traceback of megatron-rl; otherwise fix the site profile "
            "(modules, python).",
            slurm=r"exit=1:0",
            weight=3),
    Symptom("user-error", "error:",
            "The configuration, the model, the data or a reward function is wrong.",
            "Follow the message (`fix:`), then submit again.",
            slurm=r"exit=2:0",
            outcome=r"^user_error: ",
            weight=2),
    Symptom("crash", "crash:",
            "A component of the job failed.",
            "See its first error: `megatron-rl logs RUN --first-error`.",
            slurm=r"exit=70:0",
            outcome=r"^crash: ",
            weight=3),
)

GROUPS: tuple[tuple[str, tuple[Symptom, ...]], ...] = (
    ("The job and Slurm", JOB), ("Memory and disks", MEMORY), ("Network", NETWORK), ("GPUs", GPU),
    ("Environment, model and data", STACK), ("How attempts end", ENDS))
SYMPTOMS: tuple[Symptom, ...] = tuple(symptom for _, group in GROUPS for symptom in group)
BY_CODE = {symptom.code: symptom for symptom in SYMPTOMS}
IN_ANY_LOG = re.compile("|".join(f"(?:{symptom.logs})" for symptom in SYMPTOMS if symptom.logs))
"""One search instead of thirty for the lines that match nothing."""
