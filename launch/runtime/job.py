"""A Slurm job (`megatron-rl job CONFIG`): the process that replaces the batch shell on the first node.

It reads the history of the run, then leads one attempt (`launch.runtime.leader`). It starts one supervisor per node
with one `srun`, collects their checks, places the plan on the accepted nodes, watches, and decides what follows
(`launch.runtime.decide`). It communicates with the supervisors only through files, and queries Slurm once at the start.
"""

from __future__ import annotations

from collections.abc import Sequence

from launch.config.load import load_config
from launch.exit_codes import ExitCode
from launch.files.waiting import listed
from launch.health.ledger import FILE as LEDGER
from launch.health.ledger import Ledger
from launch.run.attempt_log import chain, close_open_attempts
from launch.run.attempts import RunFolder
from launch.runtime.decide import may_start
from launch.runtime.leader import Leader, say
from launch.runtime.stop_clock import Signals
from launch.slurm import job_facts
from launch.slurm.client import Slurm

LOCK_S = 120.0
"""Seconds that a dead leader may hold the run's lock: on NFS the lock outlives its holder's node for a while."""


def run_job(path: str, words: Sequence[str]) -> int:
    """Run this Slurm job's attempt to its end, and do what follows. Returns the exit code of the job.

    Raises:
        UserError: the configuration is invalid, or this is not a Slurm job.
    """
    signals, slurm = Signals(), Slurm()
    facts = job_facts.read(slurm.patient(say))
    loaded = load_config(path, words)
    say(f"job {facts.job_id} on {len(facts.nodes)} node(s): {listed(facts.nodes)}"
        + (f", restart {facts.restart_count}" if facts.restart_count else ""))
    with RunFolder(loaded.config.run, wait_s=LOCK_S, say=say) as run:
        ledger = Ledger(run.folder / LEDGER, cluster_nodes=len(facts.nodes))
        whole, died = close_open_attempts(run.folder)
        for past in died:
            say(f"attempt {past.attempt} (job {past.job_id}): {past.status}, {past.message}")
            if past.status == "died":
                evidence = run.folder / "attempts" / str(past.attempt)
                ledger.record([(node, f"died: {past.message}", evidence) for node in past.nodes], past.job_id, say)
        replaced = next((past for past in whole if past.job_id == facts.job_id and past.successor), None)
        if replaced is not None:
            say(f"job {replaced.successor} continues this run: nothing to do here")
            return int(ExitCode.UNFINISHED)
        before = chain(whole, facts.job_id)
        refusal = may_start(before, loaded.config.run.max_attempts)
        if refusal is not None:
            say(f"not started: {refusal.why}")
            return int(refusal.exit_code)
        return Leader(slurm, facts, signals, loaded, path, tuple(words), run.new_attempt(), ledger, whole, before).run()
