"""Slurm's refusals and their remedies. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from launch.errors import UserError
from launch.exit_codes import ExitCode

Answer = Literal["refused", "absent", "none"]
"""`refused`: Slurm refused. `absent`: Slurm could not be reached, so nothing was done. `none`: Slurm gave no answer in
time, so it is unknown whether the request was carried out."""


class SlurmError(UserError):
    """A Slurm command failed. Exits with `ExitCode.SLURM`."""

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None,
                 exit_code: ExitCode = ExitCode.SLURM, answer: Answer = "refused") -> None:
        super().__init__(what, where=where, fix=fix, exit_code=exit_code)
        self.answer = answer


@dataclass(frozen=True)
class Refusal:
    """A message of Slurm and its remedy."""

    name: str
    pattern: str
    """Case-insensitive regular expression. A group named `option` is filled into `fix`."""
    fix: str
    answer: Answer = "refused"


TABLE: tuple[Refusal, ...] = (
    Refusal("accounting off", r"accounting storage is disabled",
            "this Slurm has no accounting: see the job's run folder (`outcome.json`) and, for a while after the job's "
            "end, `scontrol show job`"),
    Refusal("unknown option",
            r"(?:unrecognized|invalid|ambiguous|unknown) option(?: --)?[ '\"-]+(?P<option>[a-z][a-z-]*)",
            "this Slurm has no --{option}: {toggle}"),
    Refusal("partition", r"invalid partition|partition configuration not available",
            "choose another --partition; `sinfo -s` lists them"),
    Refusal("account", r"invalid account|account/partition|accounting/qos policy|account.*(?:not|required|denied)",
            "use --account with an account that may use this partition; `sacctmgr show assoc user=$USER` lists "
            "yours"),
    Refusal("time limit", r"time limit is invalid|exceeds? .*time limit|time ?limit",
            "use a shorter --time; `sinfo -o '%P %l'` shows each partition's limit"),
    Refusal("qos", r"invalid qos", "use another --qos; `sacctmgr show qos format=name` lists them"),
    Refusal("reservation", r"reservation is invalid|invalid reservation",
            "correct --reservation; `scontrol show reservation` lists them"),
    Refusal("gpus", r"generic resource|invalid gres|gres\)? specification",
            "this Slurm does not accept this GPU request: in the site profile set gpus: gres, gpus_per_node or "
            "none"),
    Refusal("memory", r"memory (?:specification|required)", "in the site profile put mem under refuses"),
    Refusal("nodes", r"node configuration is not available|node count specification|nodes? .*not available",
            "request fewer nodes, another --partition, or fewer GPUs or less memory per node: `sinfo -N -l` and "
            "`sinfo -o %G` show what exists"),
    Refusal("node name", r"invalid node name|node \S+ not found",
            "a node in the list (--exclude, --nodelist) is unknown: `sinfo -N` lists all"),
    Refusal("job id", r"invalid job id", "Slurm has forgotten this job or never had it: `squeue --me` lists yours; "
            "`megatron-rl status RUN` reads the run's folder"),
    Refusal("permission", r"access/permission denied|permission denied",
            "the job belongs to another user, or the site does not allow this"),
    Refusal("already ended", r"already (?:completed|finishing)|job has finished|requeue.*(?:disabled|not allowed)|"
            r"requested operation is presently disabled",
            "the job has ended, or the site or the script forbids requeueing"),
    Refusal("munge", r"munge",
            "the authentication daemon munged does not answer on this machine: inform the administrator"),
    Refusal("no answer", r"socket timed out|zero bytes were transmitted",
            "slurmctld is busy, but may have accepted a submission: check `squeue --me` before you try again",
            "none"),
    Refusal("no controller",
            r"unable to contact slurm controller|connection refused|connect failure|in standby mode|"
            r"communication connection failure|transport endpoint is not connected",
            "slurmctld does not answer: `scontrol ping`; try again later, nothing was submitted", "absent"),
    Refusal("no configuration", r"configuration source|slurm\.conf|could not open",
            "this machine does not belong to a Slurm cluster, or SLURM_CONF points to the wrong file"),
)

TOGGLES = {"exclusive": "put exclusive under refuses", "mem": "put mem under refuses",
           "requeue": "put requeue under refuses", "signal": "put signal under refuses",
           "dependency": "put dependency under refuses", "comment": "put comment under refuses",
           "open-mode": "put open_mode under refuses", "ntasks-per-node": "put ntasks_per_node under refuses",
           "gpus-per-node": "set gpus: gres", "gres": "set gpus: gpus_per_node", "segment": "remove segment"}
"""sbatch option in the batch script -> change to make in the site profile."""


def toggle(option: str) -> str:
    """The remedy in the site profile for an option that the site refuses."""
    change = TOGGLES.get(option)
    return f"in the site profile {change}" if change else "leave it out"


def explain(command: str, status: int, text: str) -> SlurmError:
    """The error for a failed command: the last line of its output, and the remedy from the table.

    Args:
        text: stderr, or stdout if stderr is empty.
    """
    said = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    fix: str | None = None
    answer: Answer = "refused"
    for refusal in TABLE:
        match = next((found for line in said if (found := re.search(refusal.pattern, line, re.IGNORECASE))), None)
        if match is not None:
            option = match.groupdict().get("option") or ""
            fix = refusal.fix.format(option=option, toggle=toggle(option)) if option else refusal.fix
            answer = refusal.answer
            said = [next(line for line in said if re.search(refusal.pattern, line, re.IGNORECASE))]
            break
    else:
        named = [option for option in TOGGLES if any(f"--{option}" in line for line in said)]
        if named:       # a site's own submit filter: its text is unknown, but it names the option
            fix = f"the site refuses --{named[0]}: {toggle(named[0])}"
    message = re.sub(r"^(?:sbatch|scontrol|squeue|scancel|sacct|sinfo|srun): (?:error: )?", "", said[-1])
    verb = "refused" if answer == "refused" else "does not answer"
    return SlurmError(f"Slurm {verb}: {message[:300]}", where=f"`{command}`, status {status}", answer=answer,
                      fix=fix or "run the command by hand; `scontrol ping` shows whether Slurm answers")


def names(error: UserError) -> set[str]:
    """Names of the table rows that an error matches: `accounting off`, `job id`, ..."""
    return {each.name for each in TABLE if re.search(each.pattern, error.what, re.IGNORECASE)}
