"""The only module that runs Slurm's commands. It counts them: each one is a query to the controller, and frequent
queries from thousands of jobs would overload it.

Commands get an environment without Slurm's variables: `SBATCH_TIMELIMIT` overrides the script, `SQUEUE_FORMAT` and
`SLURM_TIME_FORMAT` change the output, and a submission from inside a job would inherit that job's shape.
"""

from __future__ import annotations

import copy
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launch import envvars, processes
from launch.cluster.spec import Switch
from launch.errors import UserError
from launch.slurm import show
from launch.slurm.records import (
    QUEUE_FORMAT,
    Account,
    Estimate,
    JobRecord,
    Queued,
    estimate_of,
    job_records,
    names_of,
    queued,
)
from launch.slurm.refusals import SlurmError, explain
from launch.slurm.show import Node

TIMEOUT_S = 60.0
PATIENCE_S = 300.0
"""How long a job repeats a query to a controller that does not answer, in seconds: no user is there to try again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
PREFIXES = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SQUEUE", "SINFO", "SCONTROL", "SCANCEL", "SACCT")
KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_SACK_SOCKET"})
"""Variables with which a command finds and authenticates to its controller."""
USABLE = ("idle", "mixed", "allocated", "completing", "planned")
"""Node states as printed by sinfo. An asterisk marks a node that does not respond, a dollar sign one in maintenance."""


class Slurm:
    """Slurm's commands, one method each. All calls are counted.

    Every method raises `SlurmError` (exit code SLURM, with the remedy if the message is known) if the command fails or
    does not exist. A failed command is never an empty answer.

    Args:
        environment: the commands' environment, before Slurm's variables are removed; None: this process's.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.environment, self.dropped = scrubbed(envvars.inherited() if environment is None else environment)
        self.timeout_s = timeout_s
        self.calls: list[str] = []
        self._patience = lambda: _Patience(0.0, FIRST_PAUSE_S, print)

    def patient(self, say: Callable[[str], None], patience_s: float = PATIENCE_S,
                pause_s: float = FIRST_PAUSE_S) -> Slurm:
        """This client for a job's first and last queries. If the controller does not answer, queries are repeated for
        `patience_s` seconds, first after `pause_s`, then at growing intervals. Calls are counted together."""
        other = copy.copy(self)
        other._patience = lambda: _Patience(patience_s, pause_s, say)
        return other

    def show_job(self, job_id: str, *, local: bool = False) -> JobRecord:
        """One job that is running, waiting or has ended recently (MinJobAge).

        Args:
            local: whether it is a job of this cluster. If not set, Slurm first asks its controller about a federation.
        """
        text = self._ask("scontrol", *(["--local"] if local else []), "show", "job", job_id)
        records = job_records(text)
        found = [record for record in records if record.job_id == job_id] or records
        if not found:
            raise SlurmError(f"Slurm returned no record of job {job_id}", where=f"`scontrol show job {job_id}`",
                             fix="`squeue --me` lists your jobs")
        return found[0]

    def nodes(self, names: Sequence[str] = ()) -> tuple[Node, ...]:
        """States and resources of these nodes, or all, in one query."""
        arguments = [",".join(names)] if names else []
        found = show.nodes(self._ask("scontrol", "show", "node", "-o", *arguments))
        missing = sorted(set(names) - {node.name for node in found})
        if missing or not found:
            raise SlurmError(f"Slurm does not know {', '.join(missing[:8]) or 'any node'}",
                             where="`scontrol show node -o`", fix="`sinfo -N` lists all nodes")
        return found

    def usable(self, partition: str, reservation: str = "") -> dict[str, bool]:
        """Whether a job can get each node of a partition, or of a reservation in it, now or after other jobs end."""
        text = self._ask("sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N|%T")
        states = dict(line.strip().split("|") for line in text.splitlines() if line.strip())
        fit: tuple[str, ...] = USABLE
        if reservation:
            record = show.key_values(self._ask("scontrol", "--oneliner", "show", "reservation", reservation))
            reserved, fit = set(names_of(record.get("Nodes", "").replace("(null)", ""))), (*USABLE, "reserved")
            states = {name: state for name, state in states.items() if name in reserved} or states
        return {name: state.rstrip("~#!%@^-") in fit for name, state in states.items()}

    def topology(self, *, blocks: bool = False) -> tuple[Switch, ...]:
        """The switch tree; () if Slurm has none (no topology plug-in).

        Args:
            blocks: treat the blocks of topology/block as leaves, see `show.topology`. Otherwise they are an error.
        """
        try:
            text = self._ask("scontrol", "show", "topology")
        except SlurmError as error:
            if "no topology information" in error.what.lower():     # printed as an error, with status 0
                return ()
            raise
        return show.topology(text, blocks=blocks)

    def queue(self, *, name: str | None = None) -> tuple[Queued, ...]:
        """This user's waiting and running jobs, or only those with this name."""
        arguments = ["--noheader", "--me", f"--format={QUEUE_FORMAT}", *([f"--name={name}"] if name else [])]
        return tuple(queued(line) for line in self._ask("squeue", *arguments).splitlines() if line.strip())

    def account(self, job_id: str) -> Account:
        """The accounting record, available long after the job. SlurmError if this Slurm has no accounting."""
        text = self._ask("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job_id}",
                         "--format=State,ExitCode")
        lines = [line.split("|") for line in text.splitlines() if "|" in line]
        if not lines:
            raise SlurmError(f"the accounting holds no job {job_id}", where=f"`sacct --jobs={job_id}`",
                             fix="check the number: `squeue --me` lists running jobs")
        return Account(*lines[-1][:2])

    def test_only(self, script: Path, options: Sequence[str] = ()) -> Estimate:
        """The expected result of a submission, without submitting."""
        done = self._run(("sbatch", "--test-only", *options, str(script)))
        text = (done.stderr.strip() or done.stdout.strip())        # the estimate comes on stderr
        return estimate_of(text.removeprefix("sbatch: "))

    def submit(self, script: Path, words: Sequence[str] = (), options: Sequence[str] = (), *,
               cwd: Path | None = None) -> str:
        """Submit a batch script with its arguments. Returns the job's id."""
        answer = self._run(("sbatch", "--parsable", *options, str(script), *words), cwd).stdout.strip()
        job_id = answer.splitlines()[-1].split(";")[0] if answer else ""
        if not job_id.isdecimal():
            raise SlurmError(f"sbatch printed no job id: {answer[:100]!r}", where=f"`sbatch {script}`",
                             fix="check `squeue --me`: the job may have been submitted")
        return job_id

    def submit_once(self, script: Path, words: Sequence[str] = (), options: Sequence[str] = (), *,
                    name: str, cwd: Path | None = None) -> str:
        """Submit a script, given by its full path, so that there is never more than one job of it: if Slurm gives no
        answer, the queue is searched for the job before it is submitted again.

        Args:
            name: name of the job.
        """
        patience = self._patience()
        while True:
            try:
                return self.submit(script, words, options, cwd=cwd)
            except SlurmError as error:
                if error.answer != "none" or not patience.wait(error):
                    raise
            command = " ".join((str(script), *words))
            for job in reversed(self.queue(name=name)):
                if not job.of_array and self.show_job(job.job_id).command == command:
                    return job.job_id

    def batch_script(self, job_id: str) -> str:
        """The script of a job as it was submitted, even if its file has changed since."""
        done = self._run(("scontrol", "write", "batch_script", job_id, "-"))
        if not done.stdout.startswith("#!"):        # the status is always 0
            raise explain(f"scontrol write batch_script {job_id} -", done.returncode, done.stderr)
        return done.stdout

    def requeue(self, job_id: str) -> None:
        """End the job and put it back into the queue. A caller inside the job ends with it."""
        self._ask("scontrol", "requeue", job_id)

    def cancel(self, job_id: str, *, signal: str | None = None, batch: bool = False) -> None:
        """Cancel a job, or send it a signal (`batch`: only to its batch script). Slurm reports no error for a job that
        has ended or never existed."""
        options = ([f"--signal={signal}"] if signal else []) + (["--batch"] if batch else [])
        self._ask("scancel", *options, job_id)

    def _ask(self, *command: str) -> str:
        return self._run(command).stdout

    def _run(self, command: Sequence[str], cwd: Path | None = None):
        """Run a command, and repeat it while the controller does not answer and patience remains. A submission that may
        have succeeded is not repeated."""
        patience = self._patience()
        while True:
            try:
                return self._once(command, cwd)
            except SlurmError as error:
                again = error.answer == "absent" or error.answer == "none" and command[0] != "sbatch"
                if not again or not patience.wait(error):
                    raise

    def _once(self, command: Sequence[str], cwd: Path | None):
        self.calls.append(shlex.join(command))
        try:
            done = processes.output_of(command, timeout_s=self.timeout_s, environment=self.environment, cwd=cwd)
        except UserError as error:
            absent = "cannot run" in error.what
            raise SlurmError(error.what, where=f"`{shlex.join(command)}`", answer="refused" if absent else "none",
                             fix="run this on a machine in a Slurm cluster (a login node)" if absent else error.fix
                             ) from error
        failed = done.returncode or re.search(r"^\w+: error: ", done.stderr, re.MULTILINE) and not done.stdout.strip()
        if failed:
            raise explain(shlex.join(command), done.returncode, done.stderr.strip() or done.stdout)
        return done


class _Patience:
    """Waits between the attempts of one query."""

    def __init__(self, seconds: float, pause_s: float, say: Callable[[str], None]) -> None:
        self._ends, self._pause_s, self._say = time.monotonic() + seconds, pause_s, say

    def wait(self, error: SlurmError) -> bool:
        """Wait for the next attempt. Returns False at once if it would be too late."""
        if time.monotonic() + self._pause_s > self._ends:
            return False
        self._say(f"{error.what} ({error.where}): trying again in {self._pause_s:g} s")
        time.sleep(self._pause_s)       # there is no event for a controller that answers again
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return True


def scrubbed(environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """(an environment in which Slurm's commands follow only their arguments, names of the removed variables)."""
    dropped = tuple(sorted(name for name in environment if name.startswith(PREFIXES) and name not in KEPT))
    kept = {name: value for name, value in environment.items() if name not in dropped}
    return {**kept, "SLURM_TIME_FORMAT": "%s"}, dropped        # seconds, which are unambiguous at clock changes
