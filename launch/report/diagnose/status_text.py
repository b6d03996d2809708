"""`megatron-rl status` as text: one line of stages, then the details, at most 100 columns."""

from __future__ import annotations

from pathlib import Path

from launch.report.diagnose.status import Status
from launch.report.lines import WIDTH, duration, field, node_list


def status_text(status: Status) -> str:
    """The whole screen."""
    lines = [state_line(status)]
    add = lambda label, text: lines.append(field(label, text)) if text else None  # noqa: E731
    add("waiting", status.waiting)
    add("attempt", _attempt(status))
    add("job", _job(status))
    add("missing", f"{len(status.missing)} of {len(status.nodes)} nodes: {node_list(status.missing)}"
        if status.missing else "")
    add("silent", f"no sign of life from {node_list(status.silent)}" if status.silent else "")
    add("time left", _time_left(status))
    add("checkpoint", _checkpoint(status))
    add("nodes", node_list(status.nodes) + (f"; spare: {node_list(status.spares)}" if status.spares else "")
        if status.nodes and status.nodes != ("local",) else "")
    add("metrics", _metrics(status))
    for warning in status.warnings:
        add("warning", warning)
    add("outcome", _outcome(status))
    add("next", _next(status))
    return "\n".join(lines)


def state_line(status: Status) -> str:
    """`grpo-70b     QUEUED > PREFLIGHT 16/16 > RAY 14/16`, always one line. A long line loses its first stages."""
    stages = [str(stage) for stage in status.stages]
    head = f"{status.run:<12} "
    while len(stages) > 2 and len(head + " > ".join(stages)) > WIDTH:
        stages = ["...", *stages[2 if stages[0] == "..." else 1:]]
    return (head + " > ".join(stages))[:WIDTH].rstrip()


def _attempt(status: Status) -> str:
    if status.attempt is None:
        return ""
    parts = [f"{status.attempt} of {status.attempts}" if status.attempts > 1 else str(status.attempt)]
    if status.running_s is not None:
        parts.append(f"running {duration(status.running_s)}")
    if status.since_progress_s is not None:
        parts.append(f"last progress {duration(status.since_progress_s)} ago")
    parts.append(_short(f"{status.folder}/attempts/{status.attempt}"))
    return ", ".join(parts)


def _job(status: Status) -> str:
    if status.job is None:
        return ""
    parts = [status.job]
    if status.job_state:
        parts.append(f"{status.job_state} according to Slurm")
    elif status.outcome is None:
        parts.append("Slurm does not know it or does not answer")
    if status.partition:
        parts.append(f"partition {status.partition}")
    if status.restarts:
        parts.append(f"requeued {status.restarts} {'time' if status.restarts == 1 else 'times'}")
    return ", ".join(parts)


def _time_left(status: Status) -> str:
    parts = []
    if status.left_s is not None:
        parts.append(f"{duration(status.left_s)} until the time limit")
    if status.needed_s is not None and status.steps is not None:
        parts.append(f"{status.steps - status.step} steps need {duration(status.needed_s)} at the recent pace")
        if status.left_s is not None and status.needed_s > status.left_s:
            parts.append("another attempt will continue from the checkpoint")
    return "; ".join(parts)


def _checkpoint(status: Status) -> str:
    if status.checkpoint is None:
        return "none yet" if status.step else ""
    point = status.checkpoint
    behind = f", {status.step - point.step} steps ago" if status.step > point.step else ""
    return f"step {point.step}, {duration(point.age_s)} old{behind}, {_short(point.path)}"


def _metrics(status: Status) -> str:
    known = (("reward/mean", "reward {:.3f}"), ("throughput/tokens_per_s", "{:,.0f} tokens/s"),
             ("time/step", "{:.2f} s a step"), ("eval/accuracy", "accuracy {:.1%}"))
    parts = [text.format(status.metrics[name]) for name, text in known if name in status.metrics]
    return f"step {status.metrics['step']}: {', '.join(parts)}" if parts else ""


def _outcome(status: Status) -> str:
    if status.outcome is None:
        return "" if status.state != "GONE" else (
            "none was written, and no process of the attempt runs here: it was killed, its node is gone, or the run "
            "was launched on another machine")
    lines = str(status.outcome.get("message") or "").strip().splitlines()
    said = lines[0] if lines else f"{status.outcome['status']} after step {status.outcome['step']}"
    return said + (f"; then: {status.decision}" if status.decision else "")


def _next(status: Status) -> str:
    subject = status.run if status.folder else status.job or status.run
    if status.state in ("CRASHED", "HUNG", "ERROR", "FAULT", "UNFIT", "DIED", "GONE", "ENDED") and not status.waiting:
        return f"megatron-rl doctor {subject}"
    return "" if status.over or status.folder is None else f"megatron-rl logs {subject} -f"


def _short(path: str) -> str:
    """The path relative to the working directory, if that is shorter."""
    try:
        return min(str(Path(path).absolute().relative_to(Path.cwd())), path, key=len)
    except ValueError:
        return path
