"""Every exit code of the project, in one place. docs/exit-codes.md is generated from this table."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a `megatron-rl` process returns to its caller, see `MEANINGS`."""

    OK = 0
    INTERNAL = 1
    USER_ERROR = 2
    NO_FEASIBLE_PLAN = 3
    PREFLIGHT = 5
    SLURM = 6
    CRASH = 70
    HANG = 75
    HARDWARE_FAULT = 76
    NO_PROGRESS = 93
    UNFINISHED = 94
    INTERRUPTED = 130


MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "finished, or stopped on request with a checkpoint written",
    ExitCode.INTERNAL: "a bug in megatron-rl itself",
    ExitCode.USER_ERROR: "usage, configuration, model, data or reward error",
    ExitCode.NO_FEASIBLE_PLAN: "no placement fits the cluster",
    ExitCode.PREFLIGHT: "preflight found a critical fault",
    ExitCode.SLURM: "Slurm refused the request or cannot be reached",
    ExitCode.CRASH: "a component of the job died",
    ExitCode.HANG: "no progress within the deadline; stacks of all ranks were written",
    ExitCode.HARDWARE_FAULT: "GPU, node or network fault, with evidence",
    ExitCode.NO_PROGRESS: "crashed again without progress: do not restart",
    ExitCode.UNFINISHED: "stopped cleanly before the last step; another job continues, or no attempts are left",
    ExitCode.INTERRUPTED: "interrupted a second time, before the checkpoint was complete",
}
