"""The cores that the supervisor and all its children may use."""

from __future__ import annotations

from launch.health.check import Check, critical, ok, warning
from launch.health.expected import Expected
from launch.health.machine import Machine


def check(machine: Machine, expected: Expected) -> list[Check]:
    """Since Slurm 22.05 a step does not inherit --cpus-per-task. Without -c it may get one core."""
    cores = machine.cpus()
    needed = max(1, expected.gpus if expected.device == "gpu" else 1)
    told = f"{cores} cores"
    remedy = ("start the step with srun --cpus-per-task, and request the cores with sbatch --cpus-per-task or "
              "--exclusive")
    if cores < needed:
        return [critical("cpu.affinity", cores, f"{told} for {needed} GPUs: data loading and kernels would starve",
                         remedy)]
    if expected.device == "gpu" and cores < needed + expected.reward_processes:
        return [warning("cpu.affinity", cores, f"{told} for {needed} GPUs and {expected.reward_processes} reward "
                        "processes: if this node trains, they take time from its ranks",
                        f"lower reward.workers, or {remedy}")]
    if cores < expected.cpus:
        return [warning("cpu.affinity", cores, f"{told}, the job requested {expected.cpus}", remedy)]
    return [ok("cpu.affinity", cores, told)]
