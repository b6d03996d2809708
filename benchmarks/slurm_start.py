"""`make bench-start`: measures the time from batch start to a report of every rank, on a private simulated Slurm.

All nodes are this machine: 32 supervisors and 256 ranks share its cores, unlike real nodes. The times are therefore an
upper bound of the launcher's own cost, and show how it grows with nodes. `--ray` runs the same jobs with Ray on every
node (`run.rehearse=ray`); its raylets start one after the other here, and at the same time on real nodes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from launch import processes
from launch.cluster.file import load_cluster
from tests.slurm.conftest import TOPOLOGY
from tests.slurm_cluster import REPOSITORY, Group, SlurmCluster, running
from tools.pages import write_blocks

NODES, GPUS = 32, 8
PAGE = REPOSITORY / "docs/slurm.md"
STAGES = ("leader", "supervisors", "preflight", "placement", "reports")
"""The leader has the job's facts, the last supervisor has greeted, the last node is checked, the ranks are placed, and
the last node's ranks have reported."""


@dataclass(frozen=True)
class Start:
    """One measured job: seconds from the start of the batch script to the end of each stage."""

    label: str
    nodes: int
    processes: int
    ends: tuple[float, ...]

    @property
    def total(self) -> float:
        return self.ends[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=180.0, help="time limit of one job in seconds")
    parser.add_argument("--ray", action="store_true", help="measure the start of Ray instead")
    parser.add_argument("--write", action="store_true", help="write the table and the recorded output to docs/slurm.md")
    arguments = parser.parse_args()

    with running([Group("h100", NODES)], TOPOLOGY) as slurm, tempfile.TemporaryDirectory() as folder:
        if arguments.ray:
            blocks = {"ray-start": ray_table([measure_ray(slurm, count, Path(folder) / str(count), arguments.timeout)
                                              for count in arguments.nodes])}
            print(blocks["ray-start"])
            if arguments.write:
                write_blocks(PAGE, blocks)
            return 0
        rows = [[measure(slurm, count, Path(folder) / f"{count}-{repeat}", arguments.timeout)
                 for repeat in range(arguments.repeats)] for count in arguments.nodes]
        if max(arguments.nodes) == NODES:
            rows.append([measure(slurm, None, Path(folder) / f"70b-{repeat}", arguments.timeout)
                         for repeat in range(arguments.repeats)])
        blocks = {"start-up": table(rows)}
        print(blocks["start-up"])
        if arguments.write:
            blocks |= recorded(slurm, Path(folder), arguments.timeout)
            write_blocks(PAGE, blocks)
    return 0


def recorded(slurm: SlurmCluster, folder: Path, timeout_s: float) -> dict[str, str]:
    """The report printed by a rehearsal."""
    job = slurm.submit(f"--output={folder}/log", "slurm/grpo_70b.sbatch", "run.rehearse=true", f"run.dir={folder}/runs")
    slurm.wait_for(job, "COMPLETED", timeout_s=timeout_s)
    lines = slurm.output(job).replace(f"{folder}/", "").splitlines()
    lines = lines[next(at for at, line in enumerate(lines) if line.startswith("rehearsal of attempt")):]
    nodes = [number for number, line in enumerate(lines) if line.startswith("leaf") and "h100-" in line]
    lines[nodes[3]:nodes[-2]] = ["..."]
    return {"rehearsal": "\n".join(lines)}


def measure(slurm: SlurmCluster, nodes: int | None, folder: Path, timeout_s: float) -> Start:
    """Rehearse one job and take the times of its files. `nodes` None: the shipped 70B script, unchanged."""
    label = "slurm/grpo_70b.sbatch" if nodes is None else "7B, half of the nodes train"
    job = submit(slurm, nodes, folder, "run.rehearse=true")
    began = batch_start(slurm, timeout_s)
    slurm.wait_for(job, "COMPLETED", timeout_s=timeout_s)
    (attempt,) = folder.glob("runs/*/attempts/*")
    report = json.loads((attempt / "rehearsal.json").read_text(encoding="utf-8"))
    if not report["ok"]:
        raise RuntimeError(f"the rehearsal failed:\n{(attempt / 'rehearsal.txt').read_text()}")
    stages = (attempt / "job.json", *(newest(attempt, name) for name in ("hello.json", "preflight.json")),
              attempt / "placement.json", newest(attempt, "rehearsal.json"))
    ends = tuple(file.stat().st_mtime - began for file in stages)
    return Start(label, len(report["nodes"]), report["processes"], ends)


def submit(slurm: SlurmCluster, nodes: int | None, folder: Path, *words: str) -> int:
    """Submit the job. Its files go into `folder`."""
    folder.mkdir(parents=True)
    common = (f"run.dir={folder}/runs", *words)
    if nodes is None:
        return slurm.submit(f"--output={folder}/job.log", "slurm/grpo_70b.sbatch", *common)
    return slurm.submit(f"--output={folder}/job.log", f"--nodes={nodes}", "slurm/grpo_7b.sbatch", *common,
                        f"cluster={cluster_file(folder, nodes)}", "trainer.tp=4", "trainer.pp=1", "trainer.cp=1",
                        f"trainer.dp={nodes}", "rollout.tp=4", f"rollout.replicas={nodes}")


@dataclass(frozen=True)
class RayStart:
    """Start-up times and memory of Ray in one job."""

    nodes: int
    each_s: float
    """Median over the nodes: from the start of a node's Ray until the control store lists the node."""
    counted_s: float
    actors_s: float
    mib: float
    """Mean proportional memory of all Ray processes of a node after all have started."""


def measure_ray(slurm: SlurmCluster, nodes: int, folder: Path, timeout_s: float) -> RayStart:
    """Rehearse one job with Ray, with a long deadline, because nodes wait for those before them."""
    job = submit(slurm, nodes, folder, "run.rehearse=ray", f"run.deadline_s={timeout_s}")
    deadline, used = time.monotonic() + timeout_s, 0
    while slurm.job(job)["JobState"] in ("PENDING", "RUNNING", "COMPLETING") and time.monotonic() < deadline:
        started = list(folder.glob("runs/*/attempts/1/nodes/*/ray.json"))
        if len(started) == nodes:
            used = max(used, memory_of_ray(str(started[0].parents[2].resolve())))
        time.sleep(0.5)     # between two polls of the processes
    slurm.wait_for(job, "COMPLETED", timeout_s=1.0)
    (attempt,) = folder.glob("runs/*/attempts/*")
    report = json.loads((attempt / "rehearsal.json").read_text(encoding="utf-8"))["ray"]
    each = [json.loads(file.read_text(encoding="utf-8"))["seconds"] for file in attempt.glob("nodes/*/ray.json")]
    return RayStart(nodes, statistics.median(each), report["counted_s"], report["actors_s"], used / nodes / 2**20)


def memory_of_ray(mark: str) -> int:
    """Bytes of all Ray processes that an attempt started, counting shared pages once."""
    found = 0
    for process in processes.marked(mark):
        try:
            if "/ray/" in (command := " ".join(process.cmdline())) or "ray.scripts" in command or "ray::" in command:
                found += process.memory_full_info().pss
        except psutil.Error:    # it has ended
            continue
    return found


def ray_table(rows: Sequence[RayStart]) -> str:
    """One line per size."""
    lines = [f"Ray on simulated nodes, all of them one machine of {psutil.cpu_count()} cores, one after the other.", "",
             f"{'nodes':>5}  {'one node':>10}  {'all counted':>11}  {'an actor on each':>16}  {'memory/node':>13}"]
    lines += [f"{row.nodes:>5}  {row.each_s:>8.1f} s  {row.counted_s:>9.1f} s  {'+':>5}{row.actors_s:>9.1f} s  "
              f"{row.mib:>9.0f} MiB" for row in rows]
    return "\n".join(lines)


def batch_start(slurm: SlurmCluster, timeout_s: float) -> float:
    """When slurmd wrote its copy of the batch script, just before running it. Slurm's own times are whole seconds."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for script in (slurm.folder / "spool").glob("*/job*/slurm_script"):
            return script.stat().st_mtime
        time.sleep(0.02)    # nothing announces a new file
    raise TimeoutError(f"no job started within {timeout_s:g} s")


def newest(attempt: Path, name: str) -> Path:
    """The file of this name that was written last."""
    return max(attempt.glob(f"nodes/*/{name}"), key=lambda path: path.stat().st_mtime)


def cluster_file(folder: Path, nodes: int) -> Path:
    """The cluster of the 70B template, with fewer nodes."""
    text = (REPOSITORY / "configs/clusters/h100x32.yaml").read_text(encoding="utf-8")
    path = folder / "cluster.yaml"
    path.write_text(text.replace("count: 32", f"count: {nodes}").replace("[001-032]", f"[001-{nodes:03d}]"),
                    encoding="utf-8")
    if len(load_cluster(str(path)).nodes) != nodes:
        raise ValueError("configs/clusters/h100x32.yaml does not have the form that this benchmark expects")
    return path


def table(rows: Sequence[Sequence[Start]]) -> str:
    """One line per size: the median end of each stage, and the minimum and median of the total."""
    head = (f"{'job':<28} {'nodes':>5} {'ranks':>5}  " + "  ".join(f"{stage:>11}" for stage in STAGES) + "  minimum")
    lines = [f"Seconds from the start of the batch script to the end of each stage, median of {len(rows[0])} jobs; all "
             f"nodes are one", f"machine of {psutil.cpu_count()} cores. The last column is the fastest job.", "", head]
    for starts in rows:
        medians = [statistics.median(each) for each in zip(*(start.ends for start in starts), strict=True)]
        first = starts[0]
        lines.append(f"{first.label:<28} {first.nodes:>5} {first.processes:>5}  " +
                     "  ".join(f"{value:>11.1f}" for value in medians) +
                     f"  {min(each.total for each in starts):>7.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
