"""The process behind `megatron-rl sync bench`. It needs torch and vLLM, which the launcher must not import."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from launch import envvars
from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.planner.prepare import prepare
from megatron_rl.sync_bench.check import check


def main() -> int:
    parser = argparse.ArgumentParser(prog="megatron-rl sync bench")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--on", choices=("local", "slurm"), default="local")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write")
    options = parser.parse_args()
    try:
        return _run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)


def _run(options: argparse.Namespace) -> int:
    prepared = check(prepare(options.config, options.overrides, options.device), options.on)
    # The environment of ranks and workers, set before anything imports torch or vLLM. Members fork from here.
    for role in ("trainer", "rollout"):
        envvars.set_for_this_process(envvars.environment(role, prepared.plan.device, prepared.config,
                                                         job="sync-bench"))
    from megatron_rl.sync_bench.measure import bench
    from megatron_rl.sync_bench.members import MemberError
    from megatron_rl.sync_bench.report import as_document, as_text
    from megatron_rl.sync_bench.sites import allocation, this_machine
    from megatron_rl.weight_sync.protocol import SyncError

    with tempfile.TemporaryDirectory(prefix="megatron-rl-sync-bench-") as folder:
        try:
            with (allocation if options.on == "slurm" else this_machine)(prepared, Path(folder)) as site:
                found = asyncio.run(bench(prepared, site, options.repeats))
        except (MemberError, SyncError) as error:
            raise UserError(f"the sync could not be measured: {error}", where=options.config,
                            fix="free memory and cores, or raise weight_sync.timeout_s",
                            exit_code=ExitCode.CRASH) from error
    print(json.dumps(as_document(found), indent=1) if options.json else as_text(found))
    if options.write:
        from launch.cluster.calibration import with_coefficients
        with_coefficients(options.write, found.found, f"megatron-rl sync bench {options.config}, {found.backend} on "
                                                      f"{found.what}")
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
