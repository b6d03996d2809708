"""What was asked for a job on sbatch's command line, so that another job of its script asks for it too. Pure.

The script's own options come with the script. What its submission added or replaced is read from Slurm's record of the
job. Slurm does not tell of --signal, --dependency and --export: what must hold for every job of a run belongs into the
site profile (`sbatch:`). A --nodelist is left behind: it may name the node that has failed.
"""

from __future__ import annotations

import re

from launch.slurm.records import JobRecord

NOTHING = ("", "(null)", "N/A", "None", "*", "0")
FIELDS = {"constraint": "Features", "licenses": "Licenses", "switches": "Switches", "mail-user": "MailUser",
          "mail-type": "MailType", "wckey": "WCKey", "network": "Network", "core-spec": "CoreSpec",
          "tmp": "MinTmpDiskNode", "time-min": "TimeMin"}
"""Option of sbatch -> field of `scontrol show job`, for those that say the same."""


def options_like(record: JobRecord, script: str) -> list[str]:
    """Options of sbatch with which `script` becomes a job like the recorded one; without the number of nodes and the
    excluded ones, and without the folder."""
    given = {"job-name": record.name, "partition": record.partition, "account": record.account, "qos": record.qos,
             "reservation": record.reservation, "time": record.time_limit, "comment": record.comment.strip(),
             "output": output_of_next(record.stdout, record.job_id), "error": _errors(record),
             **{option: record.fields.get(field) for option, field in FIELDS.items()},
             "nice": _nice(record), "mem": _memory(record, script), **_per_node(record, script)}
    flags = [*(["--contiguous"] if record.fields.get("Contiguous") == "1" else []),
             *(["--no-requeue"] if _asks(script, "requeue") is not None and not record.requeue else [])]
    return [f"--{option}={value}" for option, value in given.items() if value and value not in NOTHING] + flags


def output_of_next(log: str, job_id: str) -> str | None:
    """The output file's pattern for the next job, from this job's file; None where the file's name does not hold the
    job's id."""
    folder, _, name = log.rpartition("/")
    pattern, count = re.subn(rf"(?<!\d){job_id}(?!\d)", "%j", name.replace("%", "%%"))
    return f"{folder.replace('%', '%%')}/{pattern}" if count and folder else None


def _errors(record: JobRecord) -> str | None:
    """Where errors go to a file of their own."""
    errors = record.fields.get("StdErr", "")
    return output_of_next(errors, record.job_id) if errors != record.stdout else None


def _nice(record: JobRecord) -> str | None:
    """Only an operator may ask for a negative one, and has then done so for this job."""
    nice = record.fields.get("Nice", "0")
    return nice if nice.isdecimal() else None


def _memory(record: JobRecord, script: str) -> str | None:
    """Memory a node, where the submission replaced what the script asks for. A script that asks for none leaves it to
    the partition."""
    asked, given = _asks(script, "mem"), record.fields.get("MinMemoryNode")
    return given if asked is not None and given != asked else None


def _per_node(record: JobRecord, script: str) -> dict[str, str]:
    """`gres:gpu:h100:8,gres:nvme:1`, in newer versions `gres/gpu:h100:8`, as the script asks for GPUs: a second option
    that asks for them in the other way would be added to the first."""
    parts = [part.removeprefix("gres:").removeprefix("gres/") for part in
             record.fields.get("TresPerNode", "").split(",") if part not in NOTHING]
    gpus = [part.removeprefix("gpu:") for part in parts if part.startswith("gpu:")]
    others = [part for part in parts if not part.startswith("gpu:")]
    if _asks(script, "gpus-per-node") is not None:
        return {"gpus-per-node": ",".join(gpus), "gres": ",".join(others)}
    return {"gres": ",".join(parts)}


def _asks(script: str, option: str) -> str | None:
    """What the script says of an option: "" for one without a value, None where it does not hold the option."""
    found = re.findall(rf"^#SBATCH --{option}(?:=(\S+))?\s*$", script, re.MULTILINE)
    return found[-1] if found else None
