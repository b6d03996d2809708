"""Every rank writes and reads its share of a checkpoint, beside the steps, in the format that Megatron reads."""

from __future__ import annotations

import os
import resource
import signal
import threading
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.dist_checkpointing import load as megatron_load
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer import distrib_optimizer
from safetensors.numpy import load_file

from launch.errors import UserError
from megatron_rl.layouts import step_folder as files
from megatron_rl.layouts.boxes import flat_boxes
from megatron_rl.trainer import checkpoint_tensors
from tests.ranks import Rank, run_ranks
from tests.tiny_models import make_tiny
from tests.trainer.harness import make_plan
from tests.trainer.runs import assert_same_bits, batches, config_of, moments_of, start, whole_model

VOCAB = 320


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("llama"), num_hidden_layers=4)


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (1, 5), (5, 1)])
def test_boxes_of_a_range_hold_its_elements_in_order(shape) -> None:
    values = np.arange(prod(shape)).reshape(shape)
    for first, stop, most in product(range(values.size + 1), range(values.size + 1), (1, 4, 100)):
        held = [values[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))]
                for box in flat_boxes(shape, first, stop, most)]
        assert [x for part in held for x in part.flat] == list(range(first, stop))
        assert all(part.size <= max(most, prod(shape[1:])) for part in held)


# ---- who writes and reads what -------------------------------------------------------------------------------------

def _moved(name: str) -> int:
    """Bytes that this process has read (`rchar`) or written (`wchar`) by system calls on files."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())[name])


def _save_and_load(rank: Rank, config, folder: Path) -> dict[str, int]:
    trainer = start(rank, config)
    trainer.load_initial_weights()
    trainer.update(batches(VOCAB, 1)[0])
    before = _moved("wchar")
    trainer.save(folder, {})
    written = _moved("wchar") - before
    before = _moved("rchar")
    trainer.load(folder)
    read = _moved("rchar") - before
    return {"written": written, "read": read, "files": sum(file.stat().st_size for file in folder.iterdir()
                                                           if file.name.startswith(f"__{rank.rank}_"))}


@pytest.mark.parametrize(("dtype", "distributed", "each"), [
    ("bf16", True, 14), ("fp32", True, 16), ("fp32", False, 12)])
def test_four_dp_ranks_write_and_read_a_quarter_each(tmp_path, dtype, distributed, each) -> None:
    """Of `each` bytes a parameter: weights, two moments, and fp32 master weights unless plain Adam trains fp32."""
    model = make_tiny(tmp_path / "model", hidden_size=256, intermediate_size=1024)
    config = config_of(model, dp=4, dtype=dtype, distributed_optimizer=distributed)
    padding = 2 * 256 * (make_plan(config, "cpu").training.padded_vocab - VOCAB)
    parameters = sum(tensor.size for tensor in load_file(model / "model.safetensors").values()) + padding
    share = each * parameters / 4
    found = run_ranks(4, _save_and_load, config, files.checkpoint_folder(tmp_path, 1))
    sizes = [rank["files"] for rank in found]
    assert max(sizes) <= 1.2 * min(sizes) and share <= min(sizes) <= 1.1 * share, (share, sizes)
    for rank in found:
        assert rank["files"] <= rank["written"] and rank["read"] <= 1.2 * share, (share, rank)
        assert rank["read"] >= share, "counted something else"


def _read_by_megatron(rank: Rank, config, folder: Path):
    """Load with Megatron's own strategies, into the state dict that it makes for its own checkpoints."""
    trainer = start(rank, config)
    kind = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": True,
            "chained_optim_avoid_prefix": True}
    model, _ = extract_sharded_tensors_and_factories(trainer._chunks[0].sharded_state_dict(metadata=kind))
    (part,) = trainer.optimizer.parts
    moments, _ = extract_sharded_tensors_and_factories(part.sharded_state_dict(model, is_loading=True, metadata=kind))
    loaded = megatron_load({"model": model, "optimizer": moments}, str(folder), strict=StrictHandling.RAISE_ALL)
    trainer._chunks[0].load_state_dict(loaded["model"], strict=False)
    for state in part.optimizer.state.values():
        state.pop("step")
    part.load_parameter_state_from_fully_reshardable(loaded["optimizer"]["param_state"])
    for state in part.optimizer.state.values():
        state["step"] = torch.tensor(2.0)
    return {"weights": whole_model(trainer), "moments": moments_of(trainer)}


# ---- beside the steps ----------------------------------------------------------------------------------------------

def _resumed(rank: Rank, config, folder: Path):
    trainer = start(rank, config)
    loaded = trainer.load(folder)
    (batch,) = batches(VOCAB, 1, first=2)
    moments = [each.clone() for each in moments_of(trainer)]
    return {"weights": whole_model(trainer), "moments": moments, "loaded": loaded,
            "drawn": torch.rand(3).tolist(), "metrics": trainer.update(batch)}


def _goes_on(rank: Rank, config, root: Path):
    """Two updates, a save in the background that may not write before the third update is done, and another save."""
    trainer = start(rank, config)
    trainer.load_initial_weights()
    first, second, third = batches(VOCAB, 3)
    trainer.update(first), trainer.update(second)
    write, may_write, newest = checkpoint_tensors.write, threading.Event(), []

    def held_back(pieces, folder: Path, *rest):
        assert may_write.wait(60)
        newest.append(files.latest_complete(root))
        return write(pieces, folder, *rest)

    checkpoint_tensors.write = held_back
    state = {"weights": whole_model(trainer), "moments": [each.clone() for each in moments_of(trainer)]}
    trainer.begin_save(files.checkpoint_folder(root, 2), {"step": 2}, background=True)
    drawn, metrics = torch.rand(3).tolist(), trainer.update(third)
    progress = trainer.checkpoint_progress(0.0)
    assert not progress.finished and files.latest_complete(root) is None
    dist.barrier()
    may_write.set()
    trainer.begin_save(files.checkpoint_folder(root, 3), {"step": 3}, background=True)
    while not (progress := trainer.checkpoint_progress(60.0)).finished:
        pass
    return state | {"drawn": drawn, "metrics": metrics, "newest": newest, "moved": progress.nbytes}


@pytest.mark.parametrize("distributed", [True, False])
def test_a_save_beside_the_next_update_holds_the_state_before_it(model, tmp_path, distributed) -> None:
    config = config_of(model, dp=2, distributed_optimizer=distributed, overlap_param_gather=distributed)
    second, third = (files.checkpoint_folder(tmp_path, step) for step in (2, 3))
    unbroken = run_ranks(2, _goes_on, config, tmp_path)
    for rank in unbroken:
        assert rank["newest"] == [None, second], "the second save began before the first was complete"
        assert rank["moved"] > 0
    resumed = run_ranks(2, _resumed, config, second)
    assert_same_bits(resumed[0]["weights"], unbroken[0]["weights"])
    for a, b in zip(resumed, unbroken, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a["moments"], b["moments"], strict=True))
        assert (a["drawn"], a["metrics"]) == (b["drawn"], b["metrics"])
        assert (a["loaded"]["updates"], a["loaded"]["extra"]) == (2, {"step": 2})
    if distributed:
        megatrons = run_ranks(2, _read_by_megatron, config, second)
        assert_same_bits(megatrons[0]["weights"], unbroken[0]["weights"])
        for a, b in zip(megatrons, unbroken, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a["moments"], b["moments"], strict=True))
    assert files.latest_complete(tmp_path) == third
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def _killed_beside_an_update(rank: Rank, config, root: Path) -> int | str:
    """Rank 1 dies in the middle of its background write. Rank 0 returns what it was told, rank 1 its exit code."""
    if rank.rank == 1 and (child := os.fork()):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        trainer = start(rank, config)
        trainer.load_initial_weights()
        trainer.save(files.checkpoint_folder(root, 1), {})
        if rank.rank == 1:
            def die(tensor: torch.Tensor) -> None:
                (part, *_) = files.partial_of(files.checkpoint_folder(root, 2)).glob("__1_*.distcp")
                os.kill(os.getpid(), signal.SIGKILL)

            checkpoint_tensors._with_own_storage = die
        trainer.begin_save(files.checkpoint_folder(root, 2), {}, background=True)
        try:
            trainer.checkpoint_progress(60.0)
        except RuntimeError as error:
            return str(error)
        return "nothing"
    finally:
        if rank.rank == 1:
            os._exit(1)


def test_a_kill_in_the_middle_of_a_background_save_leaves_the_last_complete_one(model, tmp_path) -> None:
    config = config_of(model, tp=2)
    told, exit_code = run_ranks(2, _killed_beside_an_update, config, tmp_path)
    assert exit_code == -signal.SIGKILL and "onnection" in told
    assert files.latest_complete(tmp_path) == files.checkpoint_folder(tmp_path, 1)
    run_ranks(2, _resumed, config, files.checkpoint_folder(tmp_path, 1))


def _out_of_space_beside_an_update(rank: Rank, config, root: Path, asks: bool) -> str:
    """A file size limit on the last rank, which holds for the background save alone."""
    trainer = start(rank, config)
    trainer.load_initial_weights()
    (batch,) = batches(VOCAB, 1)
    if rank.rank == rank.world - 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    trainer.begin_save(files.checkpoint_folder(root, 1), {}, background=True)
    trainer.update(batch)
    with pytest.raises(UserError) as told:
        if asks:
            while True:
                trainer.checkpoint_progress(60.0)
        trainer.begin_save(files.checkpoint_folder(root, 2), {}, background=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    trainer.update(batch)
    trainer.save(files.checkpoint_folder(root, 3), {})      # told once; with room the run could go on
    return str(told.value)


@pytest.mark.parametrize("asks", [True, False])
def test_a_disk_that_fills_up_in_the_background_is_told_on_all_ranks(model, tmp_path, asks) -> None:
    for message in run_ranks(2, _out_of_space_beside_an_update, config_of(model, tp=2), tmp_path, asks):
        assert "no room for the checkpoint: it needs" in message and f"where: {tmp_path}" in message
    assert [each.name for each in tmp_path.iterdir()] == ["step-000003"]


# ---- Transformer Engine's Adam --------------------------------------------------------------------------------------

class FusedAdam(torch.optim.Optimizer):
    """Adam with the state of Transformer Engine's FusedAdam: the step count is a number of the parameter group, begun
    by the first step, and a parameter has its moments only."""

    def __init__(self, params, lr, betas, eps, weight_decay, adam_w_mode) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        assert adam_w_mode

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group["step"] + 1 if "step" in group else 1
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                assert state.keys() == {"exp_avg", "exp_avg_sq"}
                state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** group["step"])
                root = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt()
                parameter.sub_(group["lr"] * (mean / (root + group["eps"]) + group["weight_decay"] * parameter))


def _with_fused_adam(rank: Rank, config, folder: Path, resumes: bool):
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    megatron_optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    trainer = start(rank, config)
    if resumes:
        trainer.load(folder)
    else:
        trainer.load_initial_weights()
        for batch in batches(VOCAB, 2):
            trainer.update(batch)
        trainer.save(folder, {})
    (part,) = trainer.optimizer.parts
    assert isinstance(part.optimizer, FusedAdam)
    metrics = trainer.update(batches(VOCAB, 1, first=2)[0])
    return whole_model(trainer), [group["step"] for group in part.optimizer.param_groups if group["params"]], metrics


@pytest.mark.parametrize("dtype, distributed", [("bf16", False), ("fp32", False), ("bf16", True)])
def test_bias_correction_goes_on_with_transformer_engines_adam(model, tmp_path, dtype, distributed) -> None:
    """A restarted count would divide the third step's moments by those of a first step: ten times the step."""
    config = config_of(model, dp=2, dtype=dtype, distributed_optimizer=distributed)
    folder = files.checkpoint_folder(tmp_path, 2)
    weights, steps, metrics = run_ranks(2, _with_fused_adam, config, folder, False)[0]
    resumed = run_ranks(2, _with_fused_adam, config, folder, True)[0]
    assert set(steps) == set(resumed[1]) == {3} and resumed[2] == metrics
    assert_same_bits(resumed[0], weights)
