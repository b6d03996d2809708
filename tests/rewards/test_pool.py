"""The pool with real processes: what hangs, raises or dies costs one sample, and nothing is left running."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from launch.config.schema import Reward as RewardConfig
from launch.errors import UserError
from megatron_rl.rewards.pool import RewardFailure, RewardPool
from megatron_rl.rewards.sample import Sample
from tests.patience import patient

pytestmark = pytest.mark.slow       # every pool starts processes

GRADERS = "tests.rewards.graders"


def config(*functions: str | dict, workers: int = 1, timeout_s: float = 30.0) -> RewardConfig:
    entries = [{"function": function} if isinstance(function, str) else function for function in functions]
    return RewardConfig.model_validate({"functions": entries, "workers": workers, "timeout_s": timeout_s})


def children() -> list[psutil.Process]:
    """Processes that run below this one. Multiprocessing's resource tracker lives as long as its process, by design."""
    return [process for process in psutil.Process().children(recursive=True)
            if process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline())]


@contextmanager
def pool(reward_config: RewardConfig, **options):
    before = {process.pid for process in children()}
    with RewardPool(reward_config, **options) as running:
        yield running
    assert {process.pid for process in children()} <= before


def assert_ended(pid: int) -> None:
    """Gone, or a zombie that whoever inherited it has not collected yet."""
    try:
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            process.wait(timeout=patient(10))
    except psutil.NoSuchProcess:
        pass
    except psutil.TimeoutExpired:
        assert process.status() == psutil.STATUS_ZOMBIE


def do(*actions: str) -> list[Sample]:
    return [Sample(action, "1", sample_index=i) for i, action in enumerate(actions)]


def test_each_misfortune_costs_its_own_sample_only(tmp_path):
    actions = ["fine", "hang", "fine", "raise", "fine", "exit", "segfault", "sys.exit", "nan", "none", "spin", "fine"]
    with pool(config(f"{GRADERS}:by_completion", workers=2, timeout_s=2.0), log_dir=tmp_path) as running:
        scores = running.score(do(*actions))
        assert [score.status for score in scores] == [
            "ok", "timeout", "ok", "error", "ok", "error", "error", "error", "error", "error", "timeout", "ok"]
        assert [score.total if score.graded else None for score in scores] == [
            1.0 if action == "fine" else None for action in actions]
        assert all(math.isnan(score.total) for score in scores if not score.graded)
        details = dict(zip(actions, (score.detail for score in scores), strict=True))
        assert "KeyError: 'no such unit'" in details["raise"] and "graders.py:" in details["raise"]
        assert "exit code 7" in details["exit"] and "SIGSEGV" in details["segfault"]
        assert "2 s" in details["hang"] and "not a finite number" in details["nan"]
        assert all(score.function == f"{GRADERS}:by_completion" for score in scores if score.status != "ok")
        assert [score.status for score in running.score(do(*["fine"] * 5))] == ["ok"] * 5
    assert "Segmentation fault" in "".join(path.read_text() for path in tmp_path.glob("reward-process-*.log"))


def test_scores_keep_their_order_over_workers():
    samples = [Sample("x" * i, None) for i in range(300)]
    with pool(config(f"{GRADERS}:length_of", workers=3)) as running:
        assert [score.total for score in running.score(samples)] == list(range(300))
        assert running.score([]) == []


def test_the_deadline_is_a_samples_and_not_a_chunks():
    """Fourteen samples of 0.15 s each, seven to a chunk: each is far from the deadline of 1 s, a chunk is past it."""
    with pool(config(f"{GRADERS}:slow", timeout_s=1.0)) as running:
        began = time.monotonic()
        scores = running.score(do(*["fine"] * 14))
        assert {score.status for score in scores} == {"ok"}
        assert 14 * 0.15 <= sum(score.seconds for score in scores) <= time.monotonic() - began


def test_calls_wait_neither_for_each_other_nor_for_a_call_that_has_failed(tmp_path):
    """A process hangs with a sample of one call, and another call fails at once."""
    with pool(config(f"{GRADERS}:by_completion", workers=2, timeout_s=patient(120))) as running:
        hanging = running.submit([Sample("child and hang", str(tmp_path / "pid"))], stop_on_failure=True)
        until = time.monotonic() + patient(30)
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        failing = running.submit(do("raise", *["fine"] * 200), stop_on_failure=True)
        others = [running.submit(do(*["fine"] * 5), stop_on_failure=True) for _ in range(20)]
        assert all([score.total for score in call.result(patient(60))] == [1.0] * 5 for call in others)
        assert isinstance(failing.exception(patient(10)), RewardFailure) and not hanging.done()
    assert "closed" in str(hanging.exception(0))
    with pytest.raises(RuntimeError, match="not running"):
        running.submit(do("fine"))


def test_weights_components_and_blame_with_several_functions():
    functions = [{"function": "exact_match", "weight": 2.0, "args": {"anywhere": "text"}},
                 {"function": f"{GRADERS}:by_completion", "weight": -0.5}]
    with pool(config(*functions, timeout_s=2.0)) as running:
        right, wrong, hangs, dies = running.score([Sample("1", "1"), Sample("fine", "1"), Sample("hang", "1"),
                                                   Sample("exit", "1")])
    assert (right.total, right.components) == (1.5, {"exact_match": 1.0, f"{GRADERS}:by_completion": 1.0})
    assert (wrong.status, wrong.total) == ("ok", -0.5)
    assert (hangs.status, hangs.function) == ("timeout", f"{GRADERS}:by_completion") and math.isnan(hangs.total)
    assert (dies.status, dies.function) == ("error", f"{GRADERS}:by_completion")


def test_math_scores_when_called_from_a_thread():
    """In a thread math-verify's signal raises and everything is wrong (verl#5635): here the thread only waits, the
    grader runs in the main thread of its process."""
    scores: list = []
    with pool(config("math", f"{GRADERS}:by_completion")) as running:
        samples = [Sample("\\boxed{0.5}", "1/2"), Sample("main thread", "1/2"), Sample("\\boxed{0.5}", "")]
        thread = threading.Thread(target=lambda: scores.extend(running.score(samples)))
        thread.start()
        thread.join(timeout=patient(60))
    assert [score.status for score in scores] == ["ok", "ok", "error"]
    assert scores[0].components["math"] == 1.0 and scores[1].components[f"{GRADERS}:by_completion"] == 1.0
    assert "cannot be parsed" in scores[2].detail and scores[2].function == "math"


def test_an_answer_that_hangs_the_grader_is_a_timeout():
    with pool(config("math", timeout_s=2.0)) as running:
        bomb, fine = running.score([Sample("\\boxed{9^{9^{9^{9^9}}}}", "5"), Sample("\\boxed{5}", "5")])
    assert (bomb.status, bomb.graded) == ("timeout", False) and (fine.status, fine.total) == ("ok", 1.0)


def test_what_a_reward_started_ends_with_it(tmp_path):
    pid_file = tmp_path / "pid"
    with pool(config(f"{GRADERS}:by_completion", timeout_s=2.0)) as running:
        (score,) = running.score([Sample("child and hang", str(pid_file))])
        assert score.status == "timeout"
        assert_ended(int(pid_file.read_text()))


def test_stop_at_the_first_failure_leaves_a_pool_that_works():
    with pool(config(f"{GRADERS}:by_completion", workers=2)) as running:
        with pytest.raises(RewardFailure) as caught:
            running.score(do("fine", "raise", "hang", "fine"), stop_on_failure=True)
        assert caught.value.index == 1 and caught.value.score.status == "error"
        assert [score.total for score in running.score(do("fine", "fine", "bool"))] == [1.0, 1.0, 1.0]


def test_a_worker_killed_while_idle_blames_no_sample():
    with pool(config(f"{GRADERS}:by_completion")) as running:
        (first,) = running.score(do("pid"))
        victim = psutil.Process(int(first.total))
        victim.kill()
        psutil.wait_procs([victim], timeout=patient(10))
        second, fine = running.score(do("pid", "fine"))
        assert (second.status, fine.total) == ("ok", 1.0) and second.total != first.total


def test_workers_end_with_the_process_that_started_them(tmp_path):
    """A pool whose process is killed by SIGKILL while its reward hangs."""
    script = (
        "from launch.config.schema import Reward\n"
        "from megatron_rl.rewards.pool import RewardPool\n"
        "from megatron_rl.rewards.sample import Sample\n"
        "if __name__ == '__main__':\n"
        f"    config = Reward.model_validate({{'functions': [{{'function': '{GRADERS}:by_completion'}}],"
        " 'timeout_s': 300})\n"
        "    pool = RewardPool(config)\n"
        "    pool.start()\n"
        "    print(int(pool.score([Sample('pid', None)])[0].total), flush=True)\n"
        "    pool.score([Sample('hang', None)])\n")
    (tmp_path / "owner.py").write_text(script)
    root = Path(__file__).parents[2]
    owner = subprocess.Popen([sys.executable, str(tmp_path / "owner.py")], stdout=subprocess.PIPE, text=True,
                             cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    worker = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.wait(timeout=patient(10))
    owner.stdout.close()
    assert_ended(worker.pid)


@pytest.mark.parametrize("function, message", [
    ("exact_mach", "no built-in reward is called 'exact_mach'"),
    (f"{GRADERS}:nothing", "has no 'nothing'"),
])
def test_rewards_that_do_not_load_end_the_start(function, message):
    before = {process.pid for process in children()}
    with pytest.raises(UserError, match=message):
        RewardPool(config(function, workers=2)).start()
    assert {process.pid for process in children()} <= before


def test_a_module_that_kills_its_process_on_import_ends_the_start(tmp_path, monkeypatch):
    (tmp_path / "deadly_grader.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="reward worker 0 did not start: .* exit code 3"):
        RewardPool(config("deadly_grader:f")).start()


def test_a_module_that_hangs_on_import_ends_the_start(tmp_path, monkeypatch):
    (tmp_path / "hanging_grader.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="did not start: no answer within 2 s"):
        RewardPool(config("hanging_grader:f"), start_timeout_s=2.0).start()
