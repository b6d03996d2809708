"""What `megatron-rl doctor` knows: how a failure shows itself, what causes it, what to do. docs/troubleshooting.md is
written from this table, one row a failure.

`logs` is searched for in every line of an attempt's logs, `slurm` in one line made of the job's record
(`FAILED NonZeroExitCode exit=1:0 restarts=0`), `outcome` in one made of outcome.json (`crash: trainer-1 died ...`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Symptom:
    """One row."""

    code: str
    see: str
    """What people see first, as it is printed; part of a recorded sample (tests/report/samples)."""
    cause: str
    remedy: str
    logs: str = ""
    slurm: str = ""
    outcome: str = ""
    weight: int = 1
    """0: explains whatever else is found; 1: a cause; 2: only follows from one, or is the least specific."""

    @cached_property
    def in_logs(self) -> re.Pattern | None:
        return re.compile(self.logs) if self.logs else None


JOB: tuple[Symptom, ...] = (
    Symptom("output-folder", "FAILED exit=0:53",
            "Slurm could not open the job's output file: its folder does not exist, or may not be written, on the "
            "node. The script never ran, and there is no log anywhere.",
            "Make the folder that --output names, on a file system that the nodes see, or use a flat name "
            "(%x-%j.log).",
            slurm=r"^FAILED .*exit=0:53",
            weight=0),
    Symptom("requeue-wait", "PENDING BeginTime",
            "The job was requeued. Slurm starts it again about two minutes later, when the credentials of the "
            "last start have expired.",
            "Nothing: this is no hang. `megatron-rl status` shows when it starts.",
            slurm=r"^PENDING BeginTime .*restarts=[1-9]",
            weight=0),
    Symptom("queue-wait", "PENDING Resources",
            "The job waits for its turn: nodes are in use, jobs of higher priority come first, or another job has "
            "to end.",
            "Wait, or ask for fewer nodes or less time: `squeue --start -j JOB` shows the estimate.",
            slurm=r"^PENDING (?:Resources|Priority|Dependency|BeginTime .*restarts=0|None|ReqNodeNotAvail|"
                  r"Nodes_required|QOS|Assoc)"),
    Symptom("held", "PENDING JobHeldUser",
            "The job is held: by a person, or by Slurm after it failed to start.",
            "`scontrol release JOB`; if it failed to start, look at the node first (`scontrol show job` names it).",
            slurm=r"^PENDING (?:JobHeld|launch_failed_requeued_held|\(launch failed)",
            weight=0),
    Symptom("never-starts", "PENDING PartitionTimeLimit",
            "The job asks for more than its partition, account or QOS gives: it will never start.",
            "`scontrol show partition`; then a shorter --time, fewer nodes, or another partition.",
            slurm=r"^PENDING (?:PartitionTimeLimit|PartitionNodeLimit|PartitionConfig|BadConstraints|"
                  r"AccountNotAllowed|InvalidAccount|InvalidQOS|AssocMax\w*|QOSMax\w*PerJob\w*|PartitionDown|"
                  r"PartitionInactive)",
            weight=0),
    Symptom("node-fail", "DUE TO NODE FAILURE",
            "A node of the job stopped answering: it crashed, lost its network, or was switched off.",
            "Slurm requeues the job by itself where it may (--requeue); the next attempt leaves the node out "
            "where the ledger has evidence. To leave it out by hand: sbatch --exclude=NODE.",
            logs=r"DUE TO NODE FAILURE",
            slurm=r"^NODE_FAIL",
            outcome=r"^(?:node_failure|died): ",
            weight=0),
    Symptom("preempted", "DUE TO PREEMPTION",
            "A job of higher priority took the nodes. Work since the last checkpoint is lost, unless the partition "
            "or QOS has a GraceTime that holds a step and a checkpoint.",
            "Nothing, where the job is requeued: it goes on from its checkpoint. Lower checkpoint.every if much "
            "was lost.",
            logs=r"DUE TO PREEMPTION",
            slurm=r"^PREEMPTED",
            weight=0),
    Symptom("time-limit", "DUE TO TIME LIMIT",
            "The time limit ended the job before it had written its last checkpoint: the margin was too small, or "
            "the job did not come to a step boundary.",
            "A larger run.stop_margin_s (the plan prints what it needs), or a longer --time. The next attempt "
            "goes on from the last checkpoint.",
            logs=r"DUE TO TIME LIMIT",
            slurm=r"^TIMEOUT",
            weight=0),
    Symptom("cancelled", "CANCELLED",
            "Somebody cancelled the job (scancel).",
            "Submit it again: it goes on from its last checkpoint. To end a run with a checkpoint use "
            "`megatron-rl stop`.",
            logs=r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ \*\*\*",
            slurm=r"^CANCELLED",
            weight=2),
    Symptom("slurm-memory", "oom_kill event",
            "The job used more host memory than Slurm gave it, and the kernel killed a process. Often --mem is "
            "small by default and not the whole node.",
            "Ask for all memory (--mem=0 with --exclusive), fewer reward workers, or smaller rollout.kv_cache_gb "
            "on CPUs.",
            logs=r"[Dd]etected \d+ oom[-_]kill event|oom_kill event|task \d+: Out Of Memory",
            slurm=r"^OUT_OF_MEMORY",
            weight=0),
    Symptom("export-none", "execve(): python3: No such file or directory",
            "The step started without PATH: the job was submitted with --export=NONE, NIL or NAME=value, and "
            "Slurm hands that on to every srun.",
            "Submit without --export, or with --export=ALL; the rendered scripts do.",
            logs=r"error: execve\(\): \S+: No such file or directory",
            weight=0),
    Symptom("wrong-root", "No module named launch",
            "The batch script does not run in the repository's root: it was submitted from another folder, or the "
            "folder is not on a file system that the nodes see.",
            "Submit from the root, or set MEGATRON_RL_ROOT to it.",
            logs=r"No module named '?launch'?|submit (?:this )?from the repository(?:'s)? root",
            weight=0),
    Symptom("step-aborted", "Exited with exit code",
            "Slurm ended the step because one task had ended with an error, or because of a signal.",
            "Look at the task that ended first: `megatron-rl logs RUN --first-error`.",
            logs=r"srun: (?:Job step aborted|error: \S+: tasks? [\d,-]+: (?:Exited with exit code|Terminated|"
                 r"Killed))",
            weight=2),
)

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
            "/dev/shm is full or small (64 MB in many containers). NCCL, Ray and data workers keep buffers there.",
            "Start the container with the host's /dev/shm (--ipc=host, or --shm-size); remove files of dead jobs.",
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

STACK: tuple[Symptom, ...] = (
    Symptom("ray-start", "have not registered within the timeout",
            "Ray's workers did not come up in time: many start at once, on a slow file system or an overloaded "
            "node.",
            "A higher run.deadline_s; the environment on a local disk or in a container instead of a shared file "
            "system.",
            logs=r"have not registered within the timeout|Failed to register worker|did not (?:start|"
                 r"register) within"),
    Symptom("missing-module", "ModuleNotFoundError",
            "A package is missing in the environment that the node uses.",
            "`make install` (or the container of the site profile); the same environment on every node.",
            logs=r"ModuleNotFoundError: No module named '(?!launch)",
            weight=0),
    Symptom("model-files", "weight files are missing in",
            "The model's folder is incomplete, or not there on a node.",
            "The message names the file: copy it again. model.path must lie on a file system that every node sees.",
            logs=r"weight files are missing in|holds neither model\.safetensors|"
                 r"the model folder \S+ does not exist|tensors are missing in|is truncated or damaged|"
                 r"No such file or directory: '\S+\.safetensors'",
            outcome=r"weight files are missing in|holds neither model\.safetensors|"
                    r"the model folder \S+ does not exist|tensors are missing in|is truncated or damaged",
            weight=0),
    Symptom("tokenizer", "holds no tokenizer",
            "The tokenizer's files are missing or damaged, or its chat template does not fit the data.",
            "Copy tokenizer.json and tokenizer_config.json of the model again; data.chat_template chooses the "
            "template.",
            logs=r"holds no tokenizer|the tokenizer in \S+ cannot be read|[Cc]an't load tokenizer for",
            outcome=r"holds no tokenizer|the tokenizer in \S+ cannot be read|chat template",
            weight=0),
    Symptom("offline", "couldn't connect to 'https://huggingface.co'",
            "Something tried to download: a name from the Hub where a folder is needed. Jobs are offline on "
            "purpose.",
            "Give local folders and files: model.path, data.train, data.eval.",
            logs=r"couldn't connect to 'https://huggingface\.co|OfflineModeIsEnabled|"
                 r"outgoing traffic has been disabled",
            weight=0),
    Symptom("digest", "the engines do not hold what the trainer sent",
            "After a weight sync an engine holds other weights than the trainer sent: a fault of memory or "
            "network, or of this program. Nothing was served from them.",
            "Start again (it goes on from the checkpoint); if the same node is named twice, leave it out.",
            logs=r"the engines do not hold what the trainer sent",
            weight=0),
)

ENDS: tuple[Symptom, ...] = (
    Symptom("hang", "never arrived",
            "Nothing moved for longer than a phase may take. The process that the others wait for is named; "
            "stacks of all are in the attempt's stacks/.",
            "Look at the named process's stack and log. If a phase is slow rather than stuck: run.hang_factor, "
            "run.hang_min_s.",
            slurm=r"exit=75:0",
            outcome=r"^hang: "),
    Symptom("bad-node", "kept out by the ledger",
            "A node of this attempt is in the run's ledger of bad nodes, with evidence.",
            "The next attempt leaves it out by itself. To give it another chance: remove its entry from the "
            "ledger.",
            weight=0),
    Symptom("preflight", "preflight found a critical fault",
            "A check before the start failed, and too few nodes were left.",
            "`megatron-rl preflight` on the nodes shows node by check, and the --exclude= line.",
            slurm=r"exit=5:0",
            outcome=r"^preflight: "),
    Symptom("no-plan", "no placement fits",
            "No way to divide the model over these nodes fits their memory, or the allocation differs from the "
            "plan.",
            "`megatron-rl plan CONFIG` names the smallest changes that would fit; run.replan=true plans for what "
            "was given.",
            slurm=r"exit=3:0",
            outcome=r"differs from the plan|no (?:placement|plan) fits"),
    Symptom("no-progress", "crashed again without progress",
            "Attempts ended one after another at the same step: another start would do the same, so none is made.",
            "The first error of the last attempt; when it is mended, submit again.",
            slurm=r"exit=93:0",
            outcome=r"attempts in a row"),
    Symptom("attempts-used-up", "has had its 20 attempts",
            "The run may start so many attempts without a person, and has.",
            "Look at why they ended (runs/NAME/attempts.jsonl), then submit again, which counts anew; or raise "
            "run.max_attempts.",
            outcome=r"has had its \d+ attempts",
            weight=2),
    Symptom("user-error", "error:",
            "Something in the configuration, the model, the data or a reward function needs a correction; the "
            "message says where.",
            "As the message says (`fix:`); then submit again.",
            slurm=r"exit=2:0",
            outcome=r"^user_error: ",
            weight=2),
    Symptom("crash", "crash:",
            "A component of the job failed.",
            "Its first error: `megatron-rl logs RUN --first-error`.",
            slurm=r"exit=70:0",
            outcome=r"^crash: ",
            weight=3),
)

GROUPS: tuple[tuple[str, tuple[Symptom, ...]], ...] = (
    ("The job and Slurm", JOB), ("Memory and disks", MEMORY), ("Network", NETWORK), ("GPUs", GPU),
    ("Environment, model and data", STACK), ("How attempts end", ENDS))
TABLE: tuple[Symptom, ...] = tuple(symptom for _, group in GROUPS for symptom in group)
BY_CODE = {symptom.code: symptom for symptom in TABLE}
PAGE = "docs/troubleshooting.md"
ANY_LOG = re.compile("|".join(f"(?:{symptom.logs})" for symptom in TABLE if symptom.logs))
"""One search instead of thirty for the lines that match nothing."""
