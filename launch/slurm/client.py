"""The one module that runs Slurm's commands. It counts them: each is a question to the controller, and a controller
that thousands of jobs ask often serves nobody.

Commands get an environment without Slurm's variables: `SBATCH_TIMELIMIT` beats what a script says, `SQUEUE_FORMAT`
and `SLURM_TIME_FORMAT` change what is printed, and a submission from inside a job would inherit that job's shape.
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
"""How long a job asks a controller that does not answer: nobody is there to try again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
PREFIXES = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SQUEUE", "SINFO", "SCONTROL", "SCANCEL", "SACCT")
KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_SACK_SOCKET"})
"""How a command finds its controller and proves who asks."""
USABLE = ("idle", "mixed", "allocated", "completing", "planned")
"""States of nodes, as sinfo writes them; one that does not answer has an asterisk, one in maintenance a dollar."""


class Slurm:
    """Slurm's commands, one method each, all of them counted.

    Every method raises `SlurmError` (exit code SLURM, with the remedy where the text is known) if the command fails
    or is not there: a failed command is never an empty answer.

    Args:
        environment: what the commands are run in, before Slurm's variables are taken out; None: this process's.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.environment, self.dropped = scrubbed(envvars.inherited() if environment is None else environment)
        self.timeout_s = timeout_s
        self.calls: list[str] = []
        self._patience = lambda: _Patience(0.0, FIRST_PAUSE_S, print)

    def patient(self, say: Callable[[str], None], patience_s: float = PATIENCE_S,
                pause_s: float = FIRST_PAUSE_S) -> Slurm:
        """This client for a job's first and last questions: where the controller does not answer, it is asked again
        for `patience_s`, first after `pause_s`, then after longer and longer. Calls are counted together."""
        other = copy.copy(self)
        other._patience = lambda: _Patience(patience_s, pause_s, say)
        return other

    def show_job(self, job_id: str, *, local: bool = False) -> JobRecord:
        """One job, running, waiting or ended not long ago (MinJobAge).

        Args:
            local: it is a job of this cluster; without that, Slurm first asks its controller about a federation.
        """
        text = self._ask("scontrol", *(["--local"] if local else []), "show", "job", job_id)
        records = job_records(text)
        found = [record for record in records if record.job_id == job_id] or records
        if not found:
            raise SlurmError(f"Slurm said nothing of job {job_id}", where=f"`scontrol show job {job_id}`",
                             fix="`squeue --me` lists your jobs")
        return found[0]

    def nodes(self, names: Sequence[str] = ()) -> tuple[Node, ...]:
        """States and resources of these nodes, or all, in one question."""
        arguments = [",".join(names)] if names else []
        found = show.nodes(self._ask("scontrol", "show", "node", "-o", *arguments))
        missing = sorted(set(names) - {node.name for node in found})
        if missing or not found:
            raise SlurmError(f"Slurm does not know {', '.join(missing[:8]) or 'any node'}",
                             where="`scontrol show node -o`", fix="`sinfo -N` lists all nodes")
        return found

    def usable(self, partition: str, reservation: str = "") -> dict[str, bool]:
        """Every node of a partition, or of a reservation in it: whether a job can have it, now or once others have
        ended."""
        text = self._ask("sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N|%T")
        states = dict(line.strip().split("|") for line in text.splitlines() if line.strip())
        fit: tuple[str, ...] = USABLE
        if reservation:
            record = show.key_values(self._ask("scontrol", "--oneliner", "show", "reservation", reservation))
            reserved, fit = set(names_of(record.get("Nodes", "").replace("(null)", ""))), (*USABLE, "reserved")
            states = {name: state for name, state in states.items() if name in reserved} or states
        return {name: state.rstrip("~#!%@^-") in fit for name, state in states.items()}

    def topology(self, *, blocks: bool = False) -> tuple[Switch, ...]:
        """The switch tree; () on a Slurm that has none (topology plug-in absent).

        Args:
            blocks: take the blocks of topology/block for leaves, see `show.topology`; an error otherwise.
        """
        try:
            text = self._ask("scontrol", "show", "topology")
        except SlurmError as error:
            if "no topology information" in error.what.lower():     # said as an error, with status 0
                return ()
            raise
        return show.topology(text, blocks=blocks)

    def queue(self, *, name: str | None = None) -> tuple[Queued, ...]:
        """This user's waiting and running jobs, or those of one name."""
        arguments = ["--noheader", "--me", f"--format={QUEUE_FORMAT}", *([f"--name={name}"] if name else [])]
        return tuple(queued(line) for line in self._ask("squeue", *arguments).splitlines() if line.strip())

    def account(self, job_id: str) -> Account:
        """What the accounting knows, long after the job. SlurmError where this Slurm keeps no accounts."""
        text = self._ask("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job_id}",
                         "--format=JobID,State,ExitCode,NodeList")
        lines = [line.split("|") for line in text.splitlines() if line.count("|") >= 3]
        if not lines:
            raise SlurmError(f"the accounting holds no job {job_id}", where=f"`sacct --jobs={job_id}`",
                             fix="check the number: `squeue --me` lists running jobs")
        return Account(*lines[-1][:4])

    def test_only(self, script: Path, words: Sequence[str] = (), options: Sequence[str] = (), *,
                  cwd: Path | None = None) -> Estimate:
        """What would happen to a submission, without making it."""
        done = self._run(("sbatch", "--test-only", *options, str(script), *words), cwd)
        text = (done.stderr.strip() or done.stdout.strip())        # the estimate comes on stderr
        return estimate_of(text.removeprefix("sbatch: "))

    def submit(self, script: Path, words: Sequence[str] = (), options: Sequence[str] = (), *,
               cwd: Path | None = None) -> str:
        """Submit a batch script with its words; the job's id."""
        answer = self._run(("sbatch", "--parsable", *options, str(script), *words), cwd).stdout.strip()
        job_id = answer.splitlines()[-1].split(";")[0] if answer else ""
        if not job_id.isdecimal():
            raise SlurmError(f"sbatch printed no job id: {answer[:100]!r}", where=f"`sbatch {script}`",
                             fix="see `squeue --me`: the job may have been submitted")
        return job_id

    def submit_once(self, script: Path, words: Sequence[str] = (), options: Sequence[str] = (), *,
                    name: str, cwd: Path | None = None) -> str:
        """`submit` for a script, named by its whole path, of which there is never more than one job: where Slurm gives
        no answer, the job is looked for before it is submitted again.

        Args:
            name: of the job.
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
        """The script of a job as it was submitted, whatever has become of its file since."""
        done = self._run(("scontrol", "write", "batch_script", job_id, "-"))
        if not done.stdout.startswith("#!"):        # its status is 0 in any case
            raise explain(f"scontrol write batch_script {job_id} -", done.returncode, done.stderr)
        return done.stdout

    def requeue(self, job_id: str) -> None:
        """End the job and put it back into the queue; the caller, if it is a part of the job, ends with it."""
        self._ask("scontrol", "requeue", job_id)

    def cancel(self, job_id: str, *, signal: str | None = None, batch: bool = False) -> None:
        """Cancel a job, or send it a signal (`batch`: to its batch script only). To cancel one that has ended, or
        never was, is no error to Slurm."""
        options = ([f"--signal={signal}"] if signal else []) + (["--batch"] if batch else [])
        self._ask("scancel", *options, job_id)

    def _ask(self, *command: str) -> str:
        return self._run(command).stdout

    def _run(self, command: Sequence[str], cwd: Path | None = None):
        """Run a command, again and again while the controller does not answer and there is patience left. What may have
        been submitted is not submitted again."""
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
                             fix="run this on a machine of a Slurm cluster (a login node)" if absent else error.fix
                             ) from error
        failed = done.returncode or re.search(r"^\w+: error: ", done.stderr, re.MULTILINE) and not done.stdout.strip()
        if failed:
            raise explain(shlex.join(command), done.returncode, done.stderr.strip() or done.stdout)
        return done


class _Patience:
    """Waits between the tries of one question."""

    def __init__(self, seconds: float, pause_s: float, say: Callable[[str], None]) -> None:
        self._ends, self._pause_s, self._say = time.monotonic() + seconds, pause_s, say

    def wait(self, error: SlurmError) -> bool:
        """Wait for the next try; False, at once, where it would come too late."""
        if time.monotonic() + self._pause_s > self._ends:
            return False
        self._say(f"{error.what} ({error.where}): asked again in {self._pause_s:g} s")
        time.sleep(self._pause_s)       # nothing tells when the controller answers again
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return True


def scrubbed(environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """(an environment in which a command of Slurm does what its words say, names of what was left out)."""
    dropped = tuple(sorted(name for name in environment if name.startswith(PREFIXES) and name not in KEPT))
    kept = {name: value for name, value in environment.items() if name not in dropped}
    return {**kept, "SLURM_TIME_FORMAT": "%s"}, dropped        # seconds: no clock change makes an hour ambiguous
