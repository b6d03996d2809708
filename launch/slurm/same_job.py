"""Finds the sbatch command-line options of a job, so that another job of its script can use them too. Pure.

The script contains its own options. Options that the submission added or replaced are read from Slurm's record of the
job. Slurm does not report --signal, --dependency and --export; options for every job of a run belong in the site
profile (`sbatch:`). --nodelist is dropped, because it may name the failed node.
"""

from __future__ import annotations

import re

from launch.slurm.records import JobRecord

NOTHING = ("", "(null)", "N/A", "None", "*", "0")
FIELDS = {"constraint": "Features", "licenses": "Licenses", "switches": "Switches", "mail-user": "MailUser",
          "mail-type": "MailType", "wckey": "WCKey", "network": "Network", "core-spec": "CoreSpec",
          "tmp": "MinTmpDiskNode", "time-min": "TimeMin"}
"""sbatch option -> field of `scontrol show job` with the same value."""


def options_like(record: JobRecord, script: str) -> list[str]:
    """sbatch options with which `script` becomes a job like the recorded one, except for the number of nodes, the
    excluded nodes and the folder."""
    given = {"job-name": record.name, "partition": record.partition, "account": record.account, "qos": record.qos,
             "reservation": record.reservation, "time": record.time_limit, "comment": record.comment.strip(),
             "output": output_of_next(record.stdout, record.job_id), "error": _errors(record),
             **{option: record.fields.get(field) for option, field in FIELDS.items()},
             "nice": _nice(record), "mem": _memory(record, script), **_per_node(record, script)}
    flags = [*(["--contiguous"] if record.fields.get("Contiguous") == "1" else []),
             *(["--no-requeue"] if _asks(script, "requeue") is not None and not record.requeue else [])]
    return [f"--{option}={value}" for option, value in given.items() if value and value not in NOTHING] + flags


def output_of_next(log: str, job_id: str) -> str | None:
    """The output file pattern for the next job, from this job's output file; None if the file name does not contain the
    job's id."""
    folder, _, name = log.rpartition("/")
    pattern, count = re.subn(rf"(?<!\d){job_id}(?!\d)", "%j", name.replace("%", "%%"))
    return f"{folder.replace('%', '%%')}/{pattern}" if count and folder else None


def _errors(record: JobRecord) -> str | None:
    """The pattern of the error file, if errors have their own file."""
    errors = record.fields.get("StdErr", "")
    return output_of_next(errors, record.job_id) if errors != record.stdout else None


def _nice(record: JobRecord) -> str | None:
    """The nice value if it is not negative: an operator sets negative values, and only for one job."""
    nice = record.fields.get("Nice", "0")
    return nice if nice.isdecimal() else None


def _memory(record: JobRecord, script: str) -> str | None:
    """Memory per node, if the submission replaced the script's request. A script without a request leaves it to the
    partition."""
    asked, given = _asks(script, "mem"), record.fields.get("MinMemoryNode")
    return given if asked is not None and given != asked else None


def _per_node(record: JobRecord, script: str) -> dict[str, str]:
    """`gres:gpu:h100:8,gres:nvme:1`, in newer versions `gres/gpu:h100:8`, as the option that the script uses for GPUs:
    a second option of the other kind would be added to the first."""
    parts = [part.removeprefix("gres:").removeprefix("gres/") for part in
             record.fields.get("TresPerNode", "").split(",") if part not in NOTHING]
    gpus = [part.removeprefix("gpu:") for part in parts if part.startswith("gpu:")]
    others = [part for part in parts if not part.startswith("gpu:")]
    if _asks(script, "gpus-per-node") is not None:
        return {"gpus-per-node": ",".join(gpus), "gres": ",".join(others)}
    return {"gres": ",".join(parts)}


def _asks(script: str, option: str) -> str | None:
    """The value of an option in the script: "" for an option without a value, None if the script does not have it."""
    found = re.findall(rf"^#SBATCH --{option}(?:=(\S+))?\s*$", script, re.MULTILINE)
    return found[-1] if found else None
