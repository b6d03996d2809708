"""Diagnoses a job that makes no progress: takes the Python stacks of all its processes and names the guilty rank.

Every component registers `faulthandler` for SIGUSR1 with a file of its own. The handler runs in C, so it answers even
if the rank is stuck in a collective. A process that does not answer is reported as stopped or dead.
"""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from launch import processes
from launch.errors import UserError
from launch.files.shared import names_in, read_shared, write_atomically
from launch.run.attempts import Attempt
from launch.run.components import ComponentRecord, components

STACK_SIGNAL = signal.SIGUSR1
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_WAITS = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py",
          "megatron/core/pipeline_parallel/p2p_communication.py", "megatron_rl/weight_sync/wire/transport.py",
          "launch/files/waiting.py")
"""A process with one of these files near the top of a stack waits for its peers: in a collective or a point-to-point
call, which waits in C++ below the caller, or for a file that a peer writes."""
_IDLE = ("ray/_private/workers/default_worker.py",)
_BESIDE = "megatron_rl/trainer/background.py"
"""Runs a thread beside the main one, which reads or writes a checkpoint while the main one goes on or waits for it."""
_BOTTOM = re.compile(r" in (<module>|_run_module_as_main)\n\Z")
"""The entry point of a Python process: the last line of its main thread's stack."""
SETTLED_LOOKS = 10
"""A dump with another last line is complete if it has not grown in this many polls."""
ANSWER_S = 5.0
"""How long a process may take to write its stack, in seconds."""
LOOK_EVERY_S = 0.05
_LOOK_AT_FRAMES = 12


@dataclass(frozen=True)
class Stack:
    """The position of one process when its stack was taken."""

    name: str
    state: str
    """`waiting`: waits for its peers in a collective, a send or a receive. `idle`: has nothing to do. `running`:
    anything else. `stopped`, `dead`, `silent`: could not answer."""
    at: str
    """Innermost frame of the main thread: `file:line in function`."""
    file: Path


_STACKS = TypeAdapter(list[Stack])


def stack_file(attempt: Attempt, name: str) -> Path:
    return attempt.folder / "stacks" / f"{name}.txt"


def take_stacks(attempt: Attempt, node: str | None = None) -> list[Stack]:
    """Request the stacks of every component of the attempt and collect them. Processes that a library started for a
    component do not have the handler; py-spy inspects them from outside.

    Args:
        node: the name of this node, if the attempt has several. Only its components are asked.
    """
    asked: list[tuple[ComponentRecord, int]] = []
    stacks = []
    for record in components(attempt, node):
        file = stack_file(attempt, record.name)
        if not record.alive():
            stacks.append(Stack(record.name, "dead", "", file))
        elif record.process.stopped():
            stacks.append(Stack(record.name, "stopped", "", file))
        else:
            asked.append((record, file.stat().st_size if file.exists() else 0))
            psutil.Process(record.process.pid).send_signal(STACK_SIGNAL)
        for each in record.needs:
            _look_into(each.pid, stack_file(attempt, f"{record.name}-pid{each.pid}"))
    stacks += [_collect(attempt, record, size) for record, size in asked]
    return sorted(stacks, key=lambda stack: stack.name)


def write_stacks(attempt: Attempt, node: str, stacks: list[Stack]) -> None:
    """Write the stacks of one node for the leader of a job on several nodes."""
    folder = attempt.folder / "nodes" / node
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "stacks.json", _STACKS.dump_json(stacks).decode(), durable=True)


def read_stacks(attempt: Attempt) -> list[Stack]:
    """The stacks that all nodes have written, by name."""
    folder = attempt.folder / "nodes"
    found = [stack for node in names_in(folder)
             for stack in read_shared(folder / node / "stacks.json", _STACKS.validate_json) or ()]
    return sorted(found, key=lambda stack: stack.name)


def _look_into(pid: int, file: Path) -> None:
    """Write a stack for users to read, or the reason why there is none (no permission, no py-spy)."""
    py_spy = Path(sys.executable).with_name("py-spy")
    try:
        done = processes.output_of([str(py_spy), "dump", "--nonblocking", "--pid", str(pid)], timeout_s=ANSWER_S)
        file.write_text(done.stdout + done.stderr, encoding="utf-8")
    except UserError as error:
        file.write_text(str(error), encoding="utf-8")


def _collect(attempt: Attempt, record: ComponentRecord, before: int) -> Stack:
    file = stack_file(attempt, record.name)
    process = psutil.Process(record.process.pid)
    text, same = "", 0
    for _ in range(int(ANSWER_S / LOOK_EVERY_S)):
        seen, text = text, file.read_text(errors="replace")[before:] if file.exists() else ""
        same = same + 1 if text == seen else 0
        if whole(text, same):
            state, at = judge(text)
            return Stack(record.name, state, at, file)
        try:
            process.wait(timeout=LOOK_EVERY_S)  # paces the poll, and ends it early if the process dies
            return Stack(record.name, "dead", "", file)
        except psutil.TimeoutExpired:
            continue
    return Stack(record.name, "silent", "", file)


def whole(dump: str, looks: int) -> bool:
    """Whether a faulthandler dump is complete. It is written piece by piece without an end mark; the main thread is
    last.

    Args:
        looks: number of polls in which it has not grown.
    """
    return bool(_FRAME.search(dump)) and (bool(_BOTTOM.search(dump)) or looks >= SETTLED_LOOKS)


def judge(dump: str) -> tuple[str, str]:
    """(state, innermost frame) of a faulthandler dump of all threads.

    The main thread is last in a dump. If any thread waits for peers, the process waits: gloo and NCCL wait in the
    thread that made the call. A thread that reads or writes a checkpoint counts only if the main thread has nothing to
    do or waits for it.
    """
    threads = [block for block in re.split(r"\n(?=(?:Current thread|Thread) 0x)", dump) if "most recent call" in block]
    frames = [[match.groupdict() for match in _FRAME.finditer(block)] for block in threads]
    beside = [thread for thread in frames if any(_in_background(frame) == "_run" for frame in thread)]
    others = [thread for thread in frames if thread not in beside]
    state, at = _judge(others)
    if beside and others and (state == "idle" or any(map(_in_background, others[-1]))):
        state, at = _judge(beside)
        if state == "running":      # in a file of ours, from where the system's call was made
            at = next(_say(frame) for frame in beside[-1] if "megatron_rl/" in frame["file"])
    return state, at


def _in_background(frame: dict[str, str]) -> str | None:
    return frame["function"] if frame["file"].endswith(_BESIDE) else None


def _judge(frames: list[list[dict[str, str]]]) -> tuple[str, str]:
    for thread in frames:
        for frame in thread[:_LOOK_AT_FRAMES]:
            if frame["file"].endswith(_WAITS):
                return "waiting", _say(next((f for f in thread if "torch/distributed" not in f["file"]), frame))
    main = frames[-1] if frames else []
    if not main:
        return "running", ""
    if any(frame["file"].endswith(_IDLE) for frame in main[:3]):
        return "idle", _say(main[0])
    return "running", _say(main[0])


def absent(stacks: list[Stack]) -> list[Stack]:
    """The processes that the others wait for. A dead or stopped component explains everything. Otherwise these are the
    training ranks that do not wait while another rank does: silent ones first, then running, then idle ones."""
    gone = [stack for stack in stacks if stack.state in ("dead", "stopped")]
    if gone:
        return gone
    ranks = [stack for stack in stacks if stack.name.startswith("trainer-")]
    if not any(stack.state == "waiting" for stack in ranks):
        return []
    order = {"silent": 0, "running": 1, "idle": 2}
    missing = [stack for stack in ranks if stack.state != "waiting"]
    worst = min((order[stack.state] for stack in missing), default=None)
    return [stack for stack in missing if order[stack.state] == worst]


def explain(stacks: list[Stack]) -> str:
    """The message of a hang: the processes that never arrived, and the position of every process."""
    guilty = absent(stacks)
    names = ", ".join(f"{stack.name} ({stack.state}{', ' + stack.at if stack.at else ''})" for stack in guilty)
    head = f"never arrived: {names}" if guilty else "no rank stands out"
    lines = [f"  {stack.name:<12} {stack.state:<10} {stack.at}" for stack in stacks]
    return "\n".join([head, *lines])


def _say(frame: dict[str, str]) -> str:
    return f"{'/'.join(Path(frame['file']).parts[-2:])}:{frame['line']} in {frame['function']}"
