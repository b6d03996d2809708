"""A job on this machine: starts Ray and the driver, shows progress, stops on request, detects deaths and hangs, cleans
up. The launcher holds no state of the job; it reads the files that the job writes into the attempt's folder.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

from launch import envvars, processes
from launch.cluster import local
from launch.config.resolved import ResolvedConfig
from launch.planner.prepare import Prepared
from launch.planner.seats.local import LOCAL_NODE, LOOPBACK, place_local
from launch.ports import Ports, allocate
from launch.report.run.display import Display, make_display
from launch.run import components
from launch.run import progress as progress_file
from launch.run.attempts import Attempt, RunFolder
from launch.run.outcome import Outcome, read_outcome, write_outcome
from launch.run.stop import STOP_FILE, stop_requested
from launch.runtime import caches, endings, hang, teardown
from launch.runtime.ray_node import ADDRESS_VARIABLE, RaySession, ray_environment, start_head
from launch.runtime.watch import DRIVER_GRACE_S, View
from launch.runtime.workloads.train import DRIVER

LOOK_EVERY_S = 0.25


def run_local(prepared: Prepared, *, quiet: bool = False) -> tuple[Attempt, Outcome]:
    """Run a prepared configuration to its end on this machine.

    Returns the attempt and how it ended. No process of the job is left running.

    Raises:
        UserError: another job is using this run, or its ports are in use.
    """
    config = prepared.config
    with RunFolder(config.run) as run:
        ports = allocate(pinned=config.run.port_base, address=LOOPBACK)
        try:
            attempt = run.new_attempt()
            gpus = local.gpus() if prepared.plan.device == "gpu" else ()
            placement = place_local(prepared.plan, attempt.number, ports, gpus=gpus)
            attempt.write(prepared.loaded.config, prepared.plan, placement, envvars.recordable())
            job = LocalJob(attempt, config, prepared.plan.device, ports)
            with make_display(config.run.name, config.run.steps, quiet=quiet) as display:
                if prepared.plan.no_forecast:
                    display.message(f"this run has no forecast: {prepared.plan.no_forecast}")
                return attempt, job.run(display)
        finally:
            ports.release()


@dataclass
class LocalJob:
    """The processes of one attempt on this machine."""

    attempt: Attempt
    config: ResolvedConfig
    device: envvars.Device
    ports: Ports
    session: RaySession = field(init=False)
    interrupts: int = 0

    def __post_init__(self) -> None:
        self.session = RaySession(deadline_s=self.config.run.deadline_s)

    def run(self, display: Display) -> Outcome:
        restore = self._catch_signals(display)
        try:
            teardown.remove_leftovers(self.attempt)
            outcome = self._run(display)
            if outcome.status in ("crash", "hang"):
                self.session.keep_logs(self.attempt.logs / "ray")
        except OSError as error:
            outcome = endings.no_space(self.attempt, error)
        finally:
            teardown.end_all(self.attempt, grace_s=1.0)     # Ray drains for longer than needed once its actors are gone
            self.session.remove()
            restore()
        with contextlib.suppress(OSError):  # on a full disk only the exit code is left
            write_outcome(self.attempt.folder, outcome)
        return outcome

    def _run(self, display: Display) -> Outcome:
        ray, driver = self._start()
        view, mourning = View(self.attempt.folder, display), 0.0
        while driver.wait(LOOK_EVERY_S) is None:
            view.update()
            if self.interrupts > 1:
                return endings.ended(self.attempt, "interrupted", "interrupted twice: ended without a checkpoint")
            if ray.returncode is not None:
                return endings.ended(self.attempt, "crash", f"Ray ended with status {ray.returncode}", "ray",
                                     str(ray.log))
            progress = progress_file.read_progress(self.attempt.folder)
            if stop_requested(self.attempt.folder) and (progress is None or progress.is_in("start")):
                return endings.during_start_up(self.attempt)
            if progress is None or progress.is_in("end"):
                continue
            mourning = (mourning or time.monotonic()) if components.dead(self.attempt, LOCAL_NODE) else 0.0
            if mourning and time.monotonic() - mourning > DRIVER_GRACE_S:
                # A driver that has reported its error may take long to exit, while its actors are already dead.
                return endings.failed(self.attempt, components.first_failure(self.attempt, LOCAL_NODE))
            late = progress_file.overdue(progress, self.config, time.time())
            if late:
                return endings.hung(self.attempt, self.config, progress.step, late, hang.take_stacks(self.attempt))
        view.update()
        return read_outcome(self.attempt.folder) or endings.ended(
            self.attempt, "crash", f"the driver ended with status {driver.returncode} without an error", "driver",
            str(driver.log))

    def _start(self) -> tuple[processes.Child, processes.Child]:
        """Start Ray's head and the driver at the same time. The driver waits for the head."""
        environment = ray_environment(self.config, self.device, self.attempt.mark, LOOPBACK) | caches.variables()
        ray = start_head(self.session, self.ports, node=LOCAL_NODE, address=LOOPBACK, environment=environment,
                         log=self.attempt.logs / "ray.log")
        driver = processes.start("driver", [sys.executable, "-m", DRIVER, str(self.attempt.folder)],
                                 environment={**environment, **self.session.variables(), envvars.NODE: LOCAL_NODE,
                                              ADDRESS_VARIABLE: f"{LOOPBACK}:{self.ports.ray_gcs}"},
                                 log=self.attempt.logs / "driver.log")
        return ray, driver

    def _catch_signals(self, display: Display) -> Callable[[], None]:
        """The first Ctrl-C or SIGTERM asks the job to stop at the next step boundary. The second ends it."""
        def on_signal(number: int, frame: FrameType | None) -> None:
            self.interrupts += 1
            if self.interrupts == 1:
                (self.attempt.folder / STOP_FILE).touch()
                display.message("stopping after the current step, with a checkpoint; interrupt again to end at once")

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        return restore

