"""`make bench-sync`: compares weight sync between simulated hosts with the bound and with common methods.

Hosts are network namespaces with one NIC each, shaped in both directions, on one bridge, with two ranks per host and
gloo. The same weights go through our sync, and are then gathered on trainer rank 0 and broadcast to all rollout ranks,
per tensor and in packed buckets. A run is valid only if a plain transfer reached 90 % of the NIC rate and the CPU had
20 % to spare. Needs root on Linux. All namespaces are removed at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.sync_cases import CASES, MIB, MODEL, QUICK, QUICK_MODEL, Case, Setup, write_model
from benchmarks.sync_hosts import why_not
from launch import envvars
from launch.errors import UserError
from launch.exit_codes import ExitCode
from megatron_rl.sync_bench.members import Host, MemberError, Members
from megatron_rl.weight_sync.protocol import SyncError
from tools.pages import write_blocks

PAGE = Path(__file__).parents[1] / "docs/weight-sync.md"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-sync", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", metavar="HOSTS",
                        help=f"some of {', '.join(case.name for case in CASES)}; default: all")
    parser.add_argument("--quick", action="store_true", help="one case with two hosts and a model of 8 MiB")
    parser.add_argument("--route", choices=["auto", "direct", "chain", "tree"], default="auto")
    parser.add_argument("--rate-mbit", type=float, default=200.0, help="rate of a NIC in each direction")
    parser.add_argument("--bucket-mb", type=float, default=4.0, help="maximum MiB per packed bucket, ours and theirs")
    parser.add_argument("--timeout", type=float, default=240.0, help="time limit of one sync in seconds")
    parser.add_argument("--attempts", type=int, default=1, help="maximum measurements of a case until one is valid")
    parser.add_argument("--write-docs", action="store_true", help="write the table to docs/weight-sync.md")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupted)      # as Ctrl-C, until the event loop takes it
    try:
        cases = QUICK if options.quick else _chosen(options.cases)
        if options.write_docs and (options.quick or len(cases) < len(CASES)):
            raise UserError("the page needs the table of all cases", where="--write-docs",
                            fix="remove --cases and --quick, or remove --write-docs")
        if why := why_not():
            raise UserError(f"hosts cannot be simulated here: {why}",
                            fix="run it as root on Linux, with iproute2 installed")
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(Path(folder) / "model", QUICK_MODEL if options.quick else MODEL)
            return asyncio.run(_run([Setup(case, model, options.rate_mbit * 1e6, int(options.bucket_mb * MIB),
                                           options.timeout) for case in cases], options))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except (MemberError, SyncError) as error:
        print(f"error: the sync could not be measured: {error}", file=sys.stderr)
        return int(ExitCode.CRASH)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)


async def _run(setups: Sequence[Setup], options: argparse.Namespace) -> int:
    # TERM cancels this task where it waits, as asyncio does for Ctrl-C. An exception from the handler could strike
    # while `ip` is started: nobody would then wait for it, and the namespace that it adds would stay.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    # The environment of ranks and workers, set before anything imports torch or vLLM. Members fork from here.
    for role in ("trainer", "rollout"):
        envvars.set_for_this_process(envvars.environment(role, "cpu", setups[0].config, job="sync-bench"))
    from benchmarks.sync_measure import expected_nics, measure, worst_share
    from benchmarks.sync_table import table
    from megatron_rl.sync_bench.world import PRELOAD, RATES

    logs = setups[0].folder.parent
    with Members(PRELOAD, logs) as members:
        probe = members.start("rates", Host("this machine"), RATES, "bfloat16", "cpu")
        rates = await probe.call("measure")
    rows, cores = [], len(os.sched_getaffinity(0))
    for setup in setups:
        route = setup.case.route if options.route == "auto" else options.route
        row = await measure(setup, rates, cores, logs, route)
        for _ in range(1, options.attempts):
            if row.verdict.reasons:
                print(f"{setup.case.name} again: {'; '.join(row.verdict.reasons)}", flush=True)
                row = await measure(setup, rates, cores, logs, route)
        rows.append(row)
        off = worst_share(row.nics, expected_nics(setup, row.manifest))
        print(f"{setup.case.name}: {row.manifest.total_bytes / 1e6:.1f} MB in {row.seconds['ours']:.2f} s; the NICs "
              f"carried the bytes of the manifest within {off:.1%}", flush=True)
    text = table(rows, rates)
    print(f"\n{text}")
    if options.write_docs:
        write_blocks(PAGE, {"bench-sync": table(rows, rates, page=True)})
    return 0


def _chosen(names: Sequence[str] | None) -> list[Case]:
    known = {case.name: case for case in CASES}
    for name in names or ():
        if name not in known:
            raise UserError(f"there is no case {name}", where="--cases", fix=f"use some of {', '.join(known)}")
    return [known[name] for name in names] if names else list(CASES)


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
