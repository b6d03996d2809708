"""One process of a rehearsal: writes a report about itself to standard output, then waits until it is ended.

The script runs as `python -I -S rank_report.py NAME INDEX`, once for each GPU of a node. It reads its initial
environment from /proc/self/environ and does not know the plan or placement. It imports almost nothing, because 256 of
them may share one machine: it takes 8 ms of CPU, and `json` alone would double that. Hence its plain format: fields of
`key=value` terminated by NUL, an empty field, the environment as the kernel provides it, `end`.
"""

import os
import select
import sys

END = b"\0end\n"


def main() -> None:
    name, index = sys.argv[1], int(sys.argv[2])
    with open("/proc/self/environ", "rb") as file:
        environ = file.read()
    variables = dict(entry.split("=", 1) for entry in os.fsdecode(environ).split("\0") if "=" in entry)
    fields = {"process": name, "pid": os.getpid(), "host": os.uname().nodename,
              "node": variables.get("SLURMD_NODENAME", ""),
              "gpu": entry_of(variables.get("CUDA_VISIBLE_DEVICES", ""), index),
              "nic": entry_of(variables.get("MEGATRON_RL_NICS", ""), index),
              "switches": variables.get("SLURM_TOPOLOGY_ADDR", ""), "cpus": len(os.sched_getaffinity(0))}
    said = "".join(f"{key}={value}\0" for key, value in fields.items())
    sys.stdout.buffer.write(os.fsencode(said) + b"\0" + environ + END)
    sys.stdout.buffer.flush()
    select.poll().poll()    # polls nothing, so waits until a signal ends the process


def entry_of(listed, index):
    """The `index`-th number of "4,5,6,7", or "". As in CUDA, the list ends at the first entry that is not a number."""
    entries = listed.split(",")
    return entries[index] if index < len(entries) and all(each.isdigit() for each in entries[:index + 1]) else ""


if __name__ == "__main__":
    main()
