"""Waiting for many components on one event loop. That their failures carry their names over a real Ray: tests/job."""

from __future__ import annotations

import asyncio
import time

import pytest

from megatron_rl.driver.cluster import ComponentFailed, StartTimeout, gather


async def _after(seconds: float, value: object) -> object:
    await asyncio.sleep(seconds)
    if isinstance(value, BaseException):
        raise value
    return value


def test_answers_come_by_name_in_the_order_asked_and_each_is_told():
    told: list[None] = []
    calls = {"a": _after(0.02, 1), "b": _after(0.0, 2), "c": _after(0.01, None)}
    found = asyncio.run(gather(calls, "count", arrived=lambda: told.append(None)))
    assert list(found.items()) == [("a", 1), ("b", 2), ("c", None)] and len(told) == 3


def test_the_first_failure_is_raised_while_others_still_run():
    began = time.monotonic()
    calls = {"slow": _after(60, 1), "bad": _after(0.01, ComponentFailed("bad", "boom"))}
    with pytest.raises(ComponentFailed, match="bad: boom"):
        asyncio.run(gather(calls, "count", timeout_s=60))
    assert time.monotonic() - began < 30


def test_at_the_deadline_those_that_did_not_answer_are_named():
    calls = {"late": _after(60, 1), "in time": _after(0.0, 2), "later": _after(60, 3)}
    with pytest.raises(StartTimeout, match=r"^start: no answer within 0.05 s from late, later$"):
        asyncio.run(gather(calls, "start", timeout_s=0.05))


def test_calls_overlap_with_what_else_the_loop_does():
    """The point of one event loop: while one part waits for its components, another goes on."""
    async def story() -> list[str]:
        order: list[str] = []
        rollout = asyncio.create_task(gather({"rollout-0": _after(0.05, "rollout")}, "generate"))
        await gather({"trainer-0": _after(0.0, "update")}, "update")
        order.append("update")
        order.append(str((await rollout)["rollout-0"]))
        return order

    assert asyncio.run(story()) == ["update", "rollout"]
