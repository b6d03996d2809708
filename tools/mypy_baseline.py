"""The type check of `make lint`: mypy's errors are compared with those of mypy-baseline.txt, which may only shrink.

A new error fails. A fixed one fails too, until `make lint ARGS=--shrink` has taken it out of the file: otherwise it
could come back unseen. An error is known by its file and text, without its line, so that other edits do not move it.
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
CLEAN = ("launch/plan/", "launch/config/", "megatron_rl/algorithms/")
"""Where no error is tolerated, in the baseline neither."""
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
    """An error of mypy as the baseline has it: without line numbers."""
    found = ERROR.match(line)
    assert found, f"no error of mypy: {line}"
    return f"{found['file']}: {re.sub(r'on line [0-9]+', 'on line N', found['text'])}"


def judge(lines: Iterable[str], allowed: Iterable[str]) -> list[str]:
    """What keeps the check from passing.

    Args:
        lines: what mypy printed; its notes are passed over.
        allowed: the lines of the baseline, one an error.
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
        complaints.append(f"take what is fixed out of {FILE.name}: make lint ARGS=--shrink")
    return complaints


def why_not(lines: Iterable[str], allowed: Sequence[str]) -> str | None:
    """Why these errors may not become the baseline. A renamed file or a reworded error may, as long as there are no
    more errors than before."""
    errors = [line for line in lines if ERROR.match(line)]
    if len(errors) > len(allowed):
        return f"{FILE.name} only shrinks: it has {len(allowed)} errors, mypy finds {len(errors)}"
    unclean = [line for line in errors if line.startswith(CLEAN)]
    return f"no error is tolerated in {', '.join(CLEAN)}:\n" + "\n".join(unclean) if unclean else None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
