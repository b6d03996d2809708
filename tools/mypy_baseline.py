"""The type check of `make lint`: compares mypy's errors with those in mypy-baseline.txt, which may only shrink.

A new error fails. A fixed one also fails until `make lint ARGS=--shrink` has removed it from the file, because it could
otherwise return unnoticed. An error is identified by file and text, without its line, so other edits do not move it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "mypy-baseline.txt"
CLEAN = ("launch/plan/", "launch/planner/", "launch/config/", "megatron_rl/algorithms/")
"""Folders where no error is tolerated, not even in the baseline."""
ERROR = re.compile(r"^(?P<file>[^:]+):(?P<line>\d+): error: (?P<text>.*)$")


def main(arguments: Sequence[str]) -> int:
    if set(arguments) - {"--shrink"}:
        print("usage: python -m tools.mypy_baseline [--shrink]", file=sys.stderr)
        return 2
    done = subprocess.run([sys.executable, "-m", "mypy", "--no-error-summary", "--no-pretty"], cwd=ROOT,
                          capture_output=True, text=True)
    if done.returncode not in (0, 1):
        print(done.stdout + done.stderr, file=sys.stderr)
        return done.returncode
    lines = done.stdout.splitlines()
    allowed = FILE.read_text(encoding="utf-8").splitlines()
    if "--shrink" in arguments:
        if refusal := why_not(lines, allowed):
            print(refusal, file=sys.stderr)
            return 1
        allowed = sorted(known(line) for line in lines if ERROR.match(line))
        FILE.write_text("".join(line + "\n" for line in allowed), encoding="utf-8")
    complaints = judge(lines, allowed)
    print(*complaints, f"mypy: {FILE.name} has {len(allowed)} errors, mypy finds "
                       f"{'others' if complaints else 'the same'}", sep="\n")
    return 1 if complaints else 0


def known(line: str) -> str:
    """An error of mypy in the form of the baseline, without line numbers."""
    found = ERROR.match(line)
    assert found, f"no error of mypy: {line}"
    return f"{found['file']}: {re.sub(r'on line [0-9]+', 'on line N', found['text'])}"


def judge(lines: Iterable[str], allowed: Iterable[str]) -> list[str]:
    """The reasons why the check fails; [] if it passes.

    Args:
        lines: output of mypy; its notes are ignored.
        allowed: the lines of the baseline, one per error.
    """
    errors = [line for line in lines if ERROR.match(line)]
    left, complaints = Counter(allowed), []
    for line in errors:
        if left[known(line)] > 0 and not line.startswith(CLEAN):
            left[known(line)] -= 1
        else:
            complaints.append(line)
            left[known(line)] -= 1
    fixed = sorted((+left).elements())
    if fixed:
        complaints += [f"fixed: {line}" for line in fixed]
        complaints.append(f"remove fixed errors from {FILE.name}: make lint ARGS=--shrink")
    return complaints


def why_not(lines: Iterable[str], allowed: Sequence[str]) -> str | None:
    """Why these errors may not become the baseline. Renamed files and reworded errors are allowed as long as there are
    no more errors than before."""
    errors = [line for line in lines if ERROR.match(line)]
    if len(errors) > len(allowed):
        return f"{FILE.name} only shrinks: it has {len(allowed)} errors, mypy finds {len(errors)}"
    unclean = [line for line in errors if line.startswith(CLEAN)]
    return f"no error is tolerated in {', '.join(CLEAN)}:\n" + "\n".join(unclean) if unclean else None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
