from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from launch.errors import UserError
from megatron_rl.layouts import step_folder as files


def _write(root: Path, step: int) -> Path:
    folder = files.checkpoint_folder(root, step)
    partial = files.begin(folder)
    files.write_durably(partial / "a.bin", b"x" * 100)
    files.write_durably(partial / "b.bin", b"y" * 7)
    assert files.publish(folder, {"step": step}) == 107
    return folder


def test_latest_is_the_newest_complete_one(tmp_path) -> None:
    assert files.latest_complete(tmp_path / "absent") is None
    first, second = _write(tmp_path, 50), _write(tmp_path, 1_000_000)
    assert files.latest_complete(tmp_path) == second
    assert files.step_of(second) == 1_000_000
    assert json.loads((first / files.COMPLETE).read_text())["files"] == {"a.bin": 100, "b.bin": 7}


@pytest.mark.parametrize("harm, said", [
    (lambda f: os.truncate(f / "a.bin", 60), "a.bin has 60 bytes, 100 were written"),
    (lambda f: (f / "b.bin").unlink(), "b.bin is missing"),
    (lambda f: (f / files.COMPLETE).unlink(), "complete.json is missing"),
    (lambda f: (f / files.COMPLETE).write_text('{"files": {"a.b'), "complete.json cannot be read"),
])
def test_damaged_checkpoint_is_passed_over(tmp_path, caplog, harm, said) -> None:
    good, bad = _write(tmp_path, 1), _write(tmp_path, 2)
    harm(bad)
    assert files.latest_complete(tmp_path) == good
    assert said in caplog.text


def test_half_written_one_is_never_seen_and_later_removed(tmp_path) -> None:
    good = _write(tmp_path, 1)
    partial = files.begin(files.checkpoint_folder(tmp_path, 2))
    files.write_durably(partial / "a.bin", b"x")
    assert files.latest_complete(tmp_path) == good
    again = _write(tmp_path, 2)
    assert not (again / "x").exists() and files.latest_complete(tmp_path) == again


def test_only_the_newest_are_kept(tmp_path) -> None:
    folders = [_write(tmp_path, step) for step in (1, 2, 3, 4)]
    (folders[3] / "a.bin").unlink()
    leftover = files.begin(files.checkpoint_folder(tmp_path, 9))
    assert files.remove_old(tmp_path, keep=2) == [folders[0]]
    assert files.complete_checkpoints(tmp_path) == folders[1:3], "a damaged one does not count as kept"
    assert not leftover.exists() and [f for f in tmp_path.iterdir() if f.name.startswith(".")] == []


def test_existing_checkpoint_is_not_overwritten(tmp_path) -> None:
    _write(tmp_path, 1)
    with pytest.raises(UserError, match="already exists"):
        files.begin(files.checkpoint_folder(tmp_path, 1))


def test_checkpoint_that_others_can_write_is_refused(tmp_path) -> None:
    folder = _write(tmp_path, 1)
    files.refuse_foreign(folder)
    (folder / "b.bin").chmod(0o664)
    with pytest.raises(UserError, match=r"others may write.*664(.|\n)*chmod -R go-w"):
        files.refuse_foreign(folder)


def test_link_in_a_checkpoint_is_refused(tmp_path) -> None:
    folder = _write(tmp_path, 1)
    (folder / "b.bin").unlink()
    (folder / "b.bin").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        files.refuse_foreign(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_checkpoint_of_another_user_is_refused(tmp_path) -> None:
    folder = _write(tmp_path, 1)
    os.chown(folder / "a.bin", 12345, 12345)
    with pytest.raises(UserError, match="belongs to user id 12345"):
        files.refuse_foreign(folder)


def test_full_disk_is_recognised_behind_other_errors() -> None:
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("could not write the tensor") from error
    except RuntimeError as error:
        assert files.is_disk_full(error)
    assert not files.is_disk_full(OSError(errno.EACCES, "denied")) and not files.is_disk_full(None)


def test_changes_since_the_checkpoint_are_named() -> None:
    assert files.changed_since({"data": "a", "plan": "p"}, {"data": "a", "plan": "p"}) == []
    assert files.changed_since({"data": "a", "old": "x"}, {"data": "b", "new": "y"}) == [
        "data has changed since the checkpoint: a -> b",
        "new has changed since the checkpoint: not recorded -> y",
        "old has changed since the checkpoint: x -> none",
    ]
