"""`outcome.json`: how an attempt ended. It is authoritative; exit codes and the scheduler's state are only hints."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from launch.exit_codes import ExitCode
from launch.files.shared import read_shared, write_atomically

FILE = "outcome.json"
Status = Literal["finished", "stopped", "user_error", "crash", "hang", "interrupted", "hardware_fault", "node_failure",
                 "preflight", "died"]
"""`died`: the attempt wrote no outcome, so the next attempt did. The last four occur only in jobs on a cluster."""
EXIT_CODES: dict[Status, ExitCode] = {
    "finished": ExitCode.OK, "stopped": ExitCode.OK, "user_error": ExitCode.USER_ERROR, "crash": ExitCode.CRASH,
    "hang": ExitCode.HANG, "interrupted": ExitCode.INTERRUPTED, "hardware_fault": ExitCode.HARDWARE_FAULT,
    "node_failure": ExitCode.HARDWARE_FAULT, "preflight": ExitCode.PREFLIGHT, "died": ExitCode.HARDWARE_FAULT}


class Outcome(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    status: Status
    step: int
    """Steps completed when the attempt ended."""
    message: str = ""
    """Readable reason, with the first error if there is one."""
    component: str | None = None
    """The process at fault, such as `trainer-2`."""
    log: str | None = None
    """Log of that process."""
    nodes: tuple[str, ...] = ()
    """Nodes at fault, or the node of the process at fault."""

    @property
    def exit_code(self) -> ExitCode:
        return EXIT_CODES[self.status]


def write_outcome(attempt_folder: Path, outcome: Outcome) -> None:
    write_atomically(attempt_folder / FILE, outcome.model_dump_json(indent=2))


def read_outcome(attempt_folder: Path) -> Outcome | None:
    """The outcome; None if the attempt has not ended or died silently."""
    return read_shared(attempt_folder / FILE, Outcome.model_validate_json)
