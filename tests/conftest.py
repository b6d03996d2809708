"""What holds for every test: those marked `gpu` are skipped, and said to be, where there is no NVIDIA GPU; those
marked `slurm` where Slurm is not installed, except in CI, where that is a failure."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest

from tests import fast
from tests.launch.conftest import cli, run_yaml  # noqa: F401 (fixtures, for every folder)
from tests.patience import measure, patience, patient

FIRST = ("slurm/test_real_job.py", "slurm", "job", "runtime", "weight_sync", "trainer", "rollout")
"""The files that take longest: started first, so that what is left at the end, when a worker may have nothing to do, is
short. Slurm's files stay together, because they share a cluster."""
NO_GPU = "needs an NVIDIA GPU, and torch sees none"
NO_MOUNT = "needs a small file system, and this user may not mount one"
NO_SLURM = "needs Slurm's programs, which tests/install_slurm.sh could not install"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="what starts no Ray, no engine and no Slurm (tests/fast.py)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    fast_only = config.getoption("fast") and collection_path.suffix == ".py"
    return True if fast_only and fast.is_heavy(fast.module_of(collection_path)) else None


@pytest.hookimpl(tryfirst=True)     # before pytest-timeout reads its limit
def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:   # a shell's `pytest &`; what tests start would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    measure()
    if config.getoption("fast"):
        fast.configure()
    if config.getoption("timeout", None) is None:
        os.environ["PYTEST_TIMEOUT"] = str(patient(float(config.getini("timeout"))))


def pytest_report_header() -> str:
    return f"deadlines of tests: {patience():g} times what they are on the machine that they were written on"


def pytest_itemcollected(item: pytest.Item) -> None:
    if "slurm" in getattr(item, "fixturenames", ()):
        item.add_marker("slurm")
    if own := item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(patient(own.args[0])), append=False)


@pytest.hookimpl(tryfirst=True)     # before any fixture starts a daemon
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slurm"):
        from tests.slurm_cluster import missing_programs  # it needs pytest's markers, which are read after this file

        if missing := missing_programs():
            if os.environ.get("CI"):
                pytest.fail(f"in CI the tests of a live Slurm may not be skipped; not installed: {', '.join(missing)}")
            pytest.skip(f"{NO_SLURM}: {', '.join(missing)}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("fast"):
        fast.deselect(config, items)
    items.sort(key=_turn)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # seconds to import: only paid when a GPU test was collected

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_collection_finish() -> None:
    """The collector need not look through thousands of tests and imported modules again and again."""
    gc.collect()
    gc.freeze()


def _turn(item: pytest.Item) -> int:
    file = item.path.relative_to(Path(__file__).parent)
    return next((number for number, first in enumerate(FIRST) if file.is_relative_to(first)), len(FIRST))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_GPU in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} GPU tests were skipped: this machine has no GPU that torch can "
                                    "use (run `make gpu-check DEVICE=gpu` on one that has)")
    unmounted = [report for report in terminalreporter.stats.get("skipped", []) if NO_MOUNT in str(report.longrepr)]
    if unmounted:
        terminalreporter.write_line(f"{len(unmounted)} tests of a disk that fills were skipped: {NO_MOUNT} (root may; "
                                    "the test that writes to /dev/full ran)")
    slurmless = [report for report in terminalreporter.stats.get("skipped", []) if NO_SLURM in str(report.longrepr)]
    if slurmless:
        terminalreporter.write_line(f"{len(slurmless)} tests of a live Slurm were skipped: install slurmctld, slurmd, "
                                    "slurm-client and munge (tests/install_slurm.sh says what kept it from doing so)")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """`make gpu-check` with no GPU test at all is not a failure of the project."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.option.markexpr == "gpu":
        session.config.get_terminal_writer().line("\nno test is marked gpu: nothing was checked on a GPU")
        session.exitstatus = pytest.ExitCode.OK
