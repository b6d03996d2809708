from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from launch import envvars
from launch.runtime import caches


@pytest.fixture
def scratch(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in envvars.CACHES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_every_compiler_has_a_folder_of_its_own_on_this_node(scratch):
    found = caches.variables()
    assert set(found) == set(envvars.CACHES) and len(set(found.values())) == len(found)
    assert all(Path(folder).is_relative_to(scratch) for folder in found.values())


def test_another_version_has_another_folder(scratch, monkeypatch):
    before = caches.variables()
    monkeypatch.setattr(caches, "version_of", lambda name: "99.0")
    assert not set(before.values()) & set(caches.variables().values())


def test_what_is_set_already_stays(scratch, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    assert "TRITON_CACHE_DIR" not in caches.variables()


@pytest.mark.parametrize("make", [
    lambda folder, other: folder.symlink_to(other), lambda folder, other: folder.write_text("a file"),
    lambda folder, other: (folder.mkdir(), folder.chmod(0o777))])
def test_a_folder_that_somebody_else_may_have_made_is_not_used(scratch, tmp_path_factory, make):
    """In /tmp anybody can take the name first, and whoever writes there decides what the ranks run."""
    folder = next(iter(Path(each).parents[1] for each in caches.variables().values()))
    folder.rmdir()
    make(folder, tmp_path_factory.mktemp("others"))
    assert caches.variables() == {}
