"""One process of a rehearsal: writes what it finds in itself to standard output, then waits to be ended.

A script run as `python -I -S rank_report.py NAME INDEX`; a node starts one for each of its GPUs. It reads
/proc/self/environ, which is what it was started with, and knows nothing of plan or placement. It imports next to
nothing (8 ms of CPU; `json` alone would double that, and 256 of them may share one machine), hence its plain format:
fields of `key=value` that NUL ends, an empty field, the environment as the kernel gives it, `end`.
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
    select.poll().poll()    # of nothing: until a signal ends it


def entry_of(listed, index):
    """`index`-th number of "4,5,6,7", or "". As CUDA reads it: the list ends at what is no number."""
    entries = listed.split(",")
    return entries[index] if index < len(entries) and all(each.isdigit() for each in entries[:index + 1]) else ""


if __name__ == "__main__":
    main()
