from __future__ import annotations

import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from launch.errors import UserError
from megatron_rl.layouts import step_folder as files
from megatron_rl.trainer import checkpoint
from megatron_rl.trainer.checkpoint_index import read_index
from megatron_rl.trainer.checkpoint_pieces import pieces_of
from tests.conftest import NO_MOUNT
from tests.ranks import Rank, RankError, run_ranks
from tests.tiny_models import make_tiny
from tests.trainer.harness import assert_gradients_equal, hugging_face
from tests.trainer.runs import (
    assert_same_bits,
    batches,
    config_of,
    keep_next_gradient,
    moments_of,
    start,
    whole_model,
    worst_difference,
)

VOCAB = 320
EXTRA = {"step": 2, "data": {"epoch": 0, "position": 12}, "eval_done": [0, 2],
         "identity": {"data": "aaaa", "tokenizer": "bbbb"}}


def _updates(trainer, count: int, first: int = 0) -> list[dict[str, float]]:
    return [trainer.update(batch) for batch in batches(trainer.plan.architecture.vocab, count, first)]


def _unbroken(rank: Rank, config, folder: Path | None, total: int = 4):
    """Two updates, a checkpoint, and the rest; the draws before and after the checkpoint stand for whatever uses RNG.
    """
    trainer = start(rank, config)
    trainer.load_initial_weights()
    _updates(trainer, 2)
    torch.rand(1), np.random.rand(), random.random()    # else the states are still those of the seed
    at_checkpoint = whole_model(trainer)
    if folder:
        trainer.save(folder, EXTRA)
    drawn = (torch.rand(3).tolist(), np.random.rand(), random.random())
    metrics = _updates(trainer, total - 2, first=2)
    return {"at_checkpoint": at_checkpoint, "metrics": metrics, "weights": whole_model(trainer),
            "moments": moments_of(trainer), "drawn": drawn}


def _resumed(rank: Rank, config, folder: Path, updates: int = 2, identity=None):
    trainer = start(rank, config)
    loaded = trainer.load(folder, identity)
    at_checkpoint = whole_model(trainer)
    drawn = (torch.rand(3).tolist(), np.random.rand(), random.random())
    gradients = keep_next_gradient(trainer)
    metrics = _updates(trainer, updates, first=2)
    return {"at_checkpoint": at_checkpoint, "metrics": metrics, "weights": whole_model(trainer), "loaded": loaded,
            "moments": moments_of(trainer), "drawn": drawn, "gradients": gradients}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("llama"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def written(llama, tmp_path_factory):
    """A run of TP2 x DP2 and its checkpoint; tests that harm a checkpoint copy it."""
    folder = files.checkpoint_folder(tmp_path_factory.mktemp("run") / "checkpoints", 2)
    config = config_of(llama, tp=2, dp=2)
    return config, folder, run_ranks(4, _unbroken, config, folder)


@pytest.fixture(scope="module")
def resumed(written):
    config, folder, _ = written
    return run_ranks(4, _resumed, config, folder)


@pytest.fixture(scope="module")
def third_step(written):
    """The weights after the update that follows the checkpoint, without a stop."""
    return run_ranks(4, _unbroken, written[0], None, 3)[0]["weights"]


@pytest.fixture(scope="module")
def third_gradient(written, llama):
    """Hugging Face's gradient of the third batch at the checkpoint's weights."""
    (batch,) = batches(VOCAB, 1, first=2)
    _, _, gradients = hugging_face(llama, batch, entropy_bonus=0.0, weights=written[2][0]["at_checkpoint"])
    return gradients


@pytest.fixture
def copy(written, tmp_path) -> Path:
    return Path(shutil.copytree(written[1], files.checkpoint_folder(tmp_path, 2)))


def test_resumed_run_equals_the_unbroken_one_bit_for_bit(written, resumed) -> None:
    _, _, unbroken = written
    assert resumed[0]["metrics"] == unbroken[0]["metrics"], "loss, learning rate, gradient norm, all of them"
    assert_same_bits(resumed[0]["weights"], unbroken[0]["weights"])
    for a, b in zip(resumed, unbroken, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a["moments"], b["moments"], strict=True))
        assert a["drawn"] == b["drawn"] and a["loaded"]["rng_restored"]
    assert len({rank["drawn"][1] for rank in resumed}) == 2, "TP peers share the default stream, DP ranks do not"
    assert resumed[0]["loaded"]["extra"] == EXTRA and resumed[0]["loaded"]["updates"] == 2
    assert resumed[0]["loaded"]["changes"] == []


def test_learning_rate_goes_on_where_it_was(resumed) -> None:
    """Warm-up of 2 to 1e-2, then linear to 0 at the tenth step: counted once, not twice, not from the start."""
    assert [m["train/lr"] for m in resumed[0]["metrics"]] == pytest.approx([1e-2, 1e-2 * 6 / 7])


@pytest.mark.parametrize("world, sizes", [
    (1, {}), (2, {"pp": 2}), (4, {"pp": 2, "vpp": 2, "cp": 2}), (4, {"tp": 2, "pp": 2, "sequence_parallel": True})],
    ids=["one-rank", "pp2", "pp2-vpp2-cp2", "tp2-pp2-sp"])
def test_another_layout_goes_on_from_the_same_weights(written, third_step, third_gradient, llama, world,
                                                      sizes) -> None:
    """The step after it has Hugging Face's gradient, and ends at the weights of the run that never stopped."""
    _, folder, unbroken = written
    resumed = run_ranks(world, _resumed, config_of(llama, **sizes), folder, 1)[0]
    assert_same_bits(resumed["at_checkpoint"], unbroken[0]["at_checkpoint"])
    assert resumed["metrics"][0]["train/grad_norm"] == pytest.approx(
        unbroken[0]["metrics"][0]["train/grad_norm"], rel=1e-5)
    assert_gradients_equal(resumed["gradients"][0], third_gradient)
    norm = np.sqrt(sum((gradient.astype(np.float64) ** 2).sum() for gradient in third_gradient.values()))
    assert resumed["metrics"][0]["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert resumed["metrics"][0]["train/lr"] == unbroken[0]["metrics"][0]["train/lr"]
    # One step moves a weight by up to 1e-2; with restarted moments the two would differ by as much.
    assert worst_difference(resumed["weights"], third_step) < 1e-5
    assert resumed["loaded"]["rng_restored"] is False
    assert any(line.startswith("trainer.tp has changed") for line in resumed["loaded"]["changes"]) == (
        sizes.get("tp") != 2)


@pytest.mark.parametrize("distributed", [True, False])
def test_bf16_with_tied_embeddings_changes_its_layout(tmp_path, distributed) -> None:
    """fp32 master weights come back too: from the bf16 weights alone the next update would differ."""
    model = make_tiny(tmp_path / "model", "qwen2", tie_word_embeddings=True)
    folder = files.checkpoint_folder(tmp_path, 2)
    same = {"dtype": "bf16", "distributed_optimizer": distributed, "optimizer": {"lr": 1e-4}}
    config = config_of(model, pp=2, **same)
    unbroken = run_ranks(2, _unbroken, config, folder, 3)
    resumed = run_ranks(2, _resumed, config, folder, 1)
    for a, b in zip(resumed, unbroken, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a["moments"], b["moments"], strict=True))
    assert_same_bits(resumed[0]["weights"], unbroken[0]["weights"])
    other = run_ranks(2, _resumed, config_of(model, tp=2, **same), folder, 1)
    assert_same_bits(other[0]["at_checkpoint"], unbroken[0]["at_checkpoint"])


def test_a_norm_that_is_cut_over_tp_changes_its_layout(tmp_path) -> None:
    """OLMo-2's q and k norms: each rank's weights are a part of the tensor, and of the gradient's norm."""
    model = make_tiny(tmp_path / "model", "olmo2")
    folder = files.checkpoint_folder(tmp_path, 2)
    unbroken = run_ranks(2, _unbroken, config_of(model, tp=2), folder, 3)[0]
    resumed = run_ranks(1, _resumed, config_of(model), folder, 1)[0]
    assert_same_bits(resumed["at_checkpoint"], unbroken["at_checkpoint"])
    assert worst_difference(resumed["weights"], unbroken["weights"]) < 1e-5
    norms = resumed["metrics"][0]["train/grad_norm"], unbroken["metrics"][0]["train/grad_norm"]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_changed_data_tokenizer_and_settings_are_reported(written, llama) -> None:
    _, folder, _ = written
    config = config_of(llama, tp=2, dp=2, run={"steps": 20}, optimizer={"lr": 3e-3})
    loaded = run_ranks(4, _resumed, config, folder, 0, {"data": "cccc", "tokenizer": "bbbb"})[0]["loaded"]
    told = "\n".join(loaded["changes"])
    for line in ("data has changed since the checkpoint: aaaa -> cccc",
                 "run.steps has changed since the checkpoint: 10 -> 20",
                 "trainer.optimizer.lr has changed since the checkpoint: 0.01 -> 0.003", "plan has changed"):
        assert line in told
    assert "tokenizer has" not in told


def test_other_model_or_precision_is_refused(written, llama, tmp_path) -> None:
    _, folder, _ = written
    with pytest.raises(RankError, match="another model or precision: dtype was fp32, is bf16"):
        run_ranks(1, _resumed, config_of(llama, dtype="bf16"), folder)
    wider = make_tiny(tmp_path, num_hidden_layers=2)
    with pytest.raises(RankError, match="layers was 4, is 2"):
        run_ranks(1, _resumed, config_of(wider), folder)


def _save_without_moments(rank: Rank, config, folder: Path):
    trainer = start(rank, config)
    trainer.load_initial_weights()
    checkpoint.pieces_of = lambda *args: [piece for piece in pieces_of(*args) if "exp_avg" not in piece.key]
    trainer.save(folder, {})


def test_checkpoint_without_optimizer_state_is_refused(llama, tmp_path) -> None:
    folder = files.checkpoint_folder(tmp_path, 2)
    run_ranks(1, _save_without_moments, config_of(llama), folder)
    with pytest.raises(RankError, match=r"UserError: the checkpoint does not fit this run's model and optimizer.*"
                                        r"(.|\n)*optimizer.state.exp_avg"):
        run_ranks(1, _resumed, config_of(llama), folder)


def test_forged_index_is_refused_before_anything_of_it_runs(written, copy) -> None:
    config, _, _ = written
    proof = copy.parent / "it-ran"

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(proof),)

    sound = (copy / ".metadata").stat().st_size
    (copy / ".metadata").write_bytes(pickle.dumps(Payload()).ljust(sound, b"\0"))
    with pytest.raises(RankError, match=r"was not written by this program: it names \w+.mkdir"):
        run_ranks(4, _resumed, config, copy)
    assert not proof.exists()


@pytest.mark.parametrize("owner, name, known", [
    (_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT", True), (_MEM_FORMAT_ENCODING, "__reduce__", False),
    (Metadata, "__init__", False)])
def test_index_written_by_python_before_3_11_4(owner, name, known, tmp_path) -> None:
    """Those write a member of an enum as getattr(class, name): taken for members of enums, refused for all else."""
    class Early:
        def __reduce__(self):
            return getattr, (owner, name)

    index = Metadata({}, planner_data=Early(), storage_data={})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    if known:
        assert read_index(tmp_path) == {}
    else:
        with pytest.raises(UserError, match="names builtins.getattr"):
            read_index(tmp_path)


def test_index_that_rewrites_the_enum_before_it_asks_for_a_member_is_refused(tmp_path) -> None:
    """BUILD with slot state sets attributes of a class: here the map in which an enum looks its members up."""
    enum = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    rewritten = pickle.dumps({"__init__": 1}, protocol=2)[2:-1]
    forged = (b"\x80\x02" + enum + b"(N" + b"}X\x0c\x00\x00\x00_member_map_" + rewritten + b"s" + b"tb0"
              + b"cbuiltins\ngetattr\n(" + enum + b"X\x08\x00\x00\x00__init__tR.")
    (tmp_path / ".metadata").write_bytes(forged)
    before = dict(_MEM_FORMAT_ENCODING.__dict__)["_member_map_"]
    try:
        with pytest.raises(UserError, match="names builtins.getattr"):
            read_index(tmp_path)
        assert _MEM_FORMAT_ENCODING.__members__.keys() == {"__init__"}, "the forgery did not get as far as it should"
    finally:
        type.__setattr__(_MEM_FORMAT_ENCODING, "_member_map_", before)


def test_truncated_checkpoint_is_refused_by_name(written, copy) -> None:
    config, _, _ = written
    os.truncate(copy / "__1_0.distcp", 1000)
    with pytest.raises(RankError, match=r"not complete: __1_0.distcp has 1,000 bytes"):
        run_ranks(4, _resumed, config, copy)


def _killed(rank: Rank, config, folder: Path) -> int | str:
    """Rank 0 dies after the tensors were written and before the checkpoint is visible.

    Returns rank 0's exit code, and what rank 1 was told. Rank 0 runs in a child, so that its death can be told.
    """
    if rank.rank == 0 and (child := os.fork()):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        return _save_until_killed(rank, config, folder)
    finally:
        if rank.rank == 0:
            os._exit(1)


def _save_until_killed(rank: Rank, config, folder: Path) -> str:
    trainer = start(rank, config)
    trainer.load_initial_weights()
    trainer.save(files.checkpoint_folder(folder, 1), {})

    def die(target: Path, facts: dict) -> None:
        assert all((files.partial_of(target) / f"__{r}_0.distcp").stat().st_size > 0 for r in range(rank.world))
        os.kill(os.getpid(), signal.SIGKILL)

    files.publish = die
    with pytest.raises(RuntimeError) as seen:
        trainer.save(files.checkpoint_folder(folder, 2), {})
    return str(seen.value)


def test_kill_in_the_middle_leaves_the_last_good_one(llama, tmp_path) -> None:
    exit_code, told = run_ranks(2, _killed, config_of(llama, tp=2), tmp_path)
    assert exit_code == -signal.SIGKILL
    assert "Connection closed by peer" in told or "Connection reset by peer" in told
    assert files.partial_of(files.checkpoint_folder(tmp_path, 2)).is_dir()
    assert files.latest_complete(tmp_path) == files.checkpoint_folder(tmp_path, 1)
    run_ranks(2, _resumed, config_of(llama, tp=2), files.checkpoint_folder(tmp_path, 1), 0)


def _until_full(rank: Rank, config, root: Path, limit: int | None):
    """Checkpoints until one does not fit; returns the message that this rank saw."""
    trainer = start(rank, config)
    trainer.load_initial_weights()
    trainer.save(files.checkpoint_folder(root, 1), {})
    if limit is not None and rank.rank == rank.world - 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        trainer.save(files.checkpoint_folder(root, 2), {})
    except UserError as error:
        told = str(error)
    else:
        raise AssertionError("the second checkpoint should not have fitted")
    dist.barrier()
    _updates(trainer, 1)
    return told


def _assert_disk_full_was_told(told: list[str], root: Path) -> None:
    for message in told:
        assert "no room for the checkpoint: it needs" in message and f"where: {root}" in message
    assert files.latest_complete(root) == files.checkpoint_folder(root, 1)
    assert sorted(f.name for f in root.iterdir()) == ["step-000001"], "the partial checkpoint gave its space back"


def test_write_that_fails_on_one_rank_is_told_on_all(llama, tmp_path) -> None:
    """A file size limit on the last rank: the system refuses the write half-way, like a quota."""
    _assert_disk_full_was_told(run_ranks(2, _until_full, config_of(llama, tp=2), tmp_path, 500_000), tmp_path)


def _on_a_full_device(rank: Rank, config, root: Path):
    """The last rank's tensors go to /dev/full: the kernel's own ENOSPC, for any user."""
    begin = files.begin

    def begin_full(folder: Path) -> Path:
        partial = begin(folder)
        if files.step_of(folder) == 2:
            (partial / f"__{rank.world - 1}_0.distcp").symlink_to("/dev/full")
        return partial

    files.begin = begin_full
    return _until_full(rank, config, root, None)


def test_full_disk_is_told_on_all_ranks(llama, tmp_path) -> None:
    _assert_disk_full_was_told(run_ranks(2, _on_a_full_device, config_of(llama, tp=2), tmp_path), tmp_path)


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 20 MB, where mounting is allowed; the two tests above run everywhere."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"{NO_MOUNT}: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_with_too_little_room_is_told_before_anything_is_written(llama, small_disk) -> None:
    _assert_disk_full_was_told(run_ranks(2, _until_full, config_of(llama, tp=2), small_disk, None), small_disk)
