"""`make mutants`: puts known faults into a copy of the tree, one at a time. The test named beside each must fail."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from launch.report.run.display import duration
from tools.mutants.listed import MUTANTS
from tools.mutants.run import run


def main() -> int:
    """Exit code 1 if a mutant survives or no longer applies."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants with one of these in their name, file or test")
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time (default 2)")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run none")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not arguments.words or any(
        word in text for word in arguments.words for text in (mutant.name, mutant.file, mutant.test))]
    if not chosen:
        parser.error(f"no mutant has {' or '.join(arguments.words)} in its name, file or test")
    if arguments.list:
        print("\n".join(f"{mutant.file}: {mutant.name}\n    {mutant.test}" for mutant in chosen))
        return 0
    began, counts = time.monotonic(), Counter[str]()
    try:
        for result in run(chosen, Path(__file__).parents[2], max(1, arguments.workers)):
            counts[result.verdict] += 1
            print(result, flush=True)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{counts['killed']} of {len(chosen)} mutants killed, {counts['SURVIVED']} survived, {counts['BROKEN']} "
          f"broken, in {duration(time.monotonic() - began)}")
    return 0 if counts["killed"] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
