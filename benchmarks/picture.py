"""`make picture`: runs the tiny configuration and writes its final output into README.md."""

from __future__ import annotations

import re
import time
from pathlib import Path

from benchmarks.ours import train
from tools.pages import indented, with_block

README = Path("README.md")


def main() -> int:
    run_dir = Path("runs/picture") / time.strftime("%Y%m%d-%H%M%S")
    log = run_dir.with_suffix(".log")
    train("configs/tiny/grpo.yaml", run_dir, [], timeout_s=900, log=log)
    lines = log.read_text(encoding="utf-8").splitlines()
    steps = [line for line in lines if re.match(r"step \d", line)]
    curve = lines[next(i for i, line in enumerate(lines) if "reward/mean:" in line):]
    plan, model = (next(i for i, line in enumerate(curve) if line.startswith(word)) for word in ("plan ", "model "))
    shown = [*steps[:3], "...", *steps[-2:], *curve[:plan], *curve[model:]]     # without the comparison with the plan
    picture = indented("\n".join(shown)).replace(str(run_dir), "runs/tiny")
    README.write_text(with_block(README.read_text(encoding="utf-8"), "picture", picture), encoding="utf-8")
    print(picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
