"""Known failures of a job, as Slurm sees it, and how attempts end: a row for each exit code."""

from __future__ import annotations

from launch.report.diagnose.known.symptom import Symptom

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
    Symptom("unfinished", "stopped in order before the last step",
            "The run stopped in order, with a checkpoint, and this job does not go on: a fresh job does, or Slurm took "
            "neither a requeue nor a job, or the run has had its attempts. It is no success, so that jobs which depend "
            "on this one (afterok) do not start on half a run.",
            "`megatron-rl status RUN` says what follows. Where no job goes on, submit again: the run continues from "
            "its checkpoint.",
            slurm=r"exit=94:0"),
    Symptom("faulty-node", "GPU, node or network fault, with evidence",
            "A node died, or its checks found broken hardware after the failure. The run's ledger names it, and the "
            "evidence.",
            "Nothing, where a fresh job goes on without the node (`megatron-rl status RUN`); tell the administrator.",
            slurm=r"exit=76:0"),
    Symptom("slurm-refused", "Slurm refused the request or cannot be reached",
            "Slurm did not take what it was asked for (a job, the step of the supervisors, a question), or its "
            "controller did not answer.",
            "The message has Slurm's words, and a remedy where they are known; `scontrol ping` shows whether the "
            "controller answers.",
            slurm=r"exit=6:0",
            outcome=r"^user_error: srun ended with status"),
    Symptom("interrupted", "interrupted a second time",
            "It was ended before its checkpoint was complete: Ctrl-C twice, or Slurm ended the job.",
            "Start it again: it goes on from its last checkpoint. To end a run with one, interrupt it once and wait, "
            "or `megatron-rl stop`.",
            slurm=r"exit=130:0",
            outcome=r"^interrupted: "),
    Symptom("internal", "a bug in megatron-rl itself",
            "An error that nobody foresaw ended the command; or the batch script ended before it, at a module that "
            "cannot be loaded, say.",
            "The end of the job's log: with a traceback of megatron-rl's, report it as a bug; else mend the site "
            "profile (modules, python).",
            slurm=r"exit=1:0",
            weight=3),
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
