"""Who is dead when nobody is heard of: a node, or the file system."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from launch.config.load import load_config
from launch.plan.plan import Placement
from launch.run import node_files
from launch.run.attempts import Attempt
from launch.run.node_files import BeatWatch, NodeFiles
from launch.run.progress import Progress, Span, write_progress
from launch.runtime import supervisor, watch
from launch.runtime.supervisor import Ended, Supervisor
from tests.progress import doing


class Cluster:
    """Nodes that beat, a leader that looks every two seconds, and a clock."""

    def __init__(self, folder: Path, count: int) -> None:
        self.now, self.names = 1000.0, [f"n{number}" for number in range(1, count + 1)]
        self.paths = {name: folder / name for name in self.names}
        self.own = folder / "leader"
        self.watch = BeatWatch(self.paths, self.own, lambda: self.now)

    def live(self, seconds: float, *dead: str, leader: bool = True) -> None:
        for _ in range(int(seconds / 2)):
            self.now += 2
            for path in [self.paths[name] for name in self.names if name not in dead] + [self.own] * leader:
                path.touch()
                os.utime(path, (self.now, self.now))
            self.watch.look()


@pytest.fixture
def cluster(tmp_path) -> Cluster:
    made = Cluster(tmp_path, 4)
    made.live(10)
    return made


def test_a_node_that_stops_beating_is_silent(cluster):
    cluster.live(88, "n3")
    assert cluster.watch.silent(90) == []
    cluster.live(6, "n3")
    assert cluster.watch.silent(90) == ["n3"] and not cluster.watch.most(["n3"])


def test_a_look_that_took_minutes_is_not_the_silence_of_nodes(cluster):
    """A file server failed over: the leader stood still as everybody else did."""
    cluster.now += 200
    cluster.watch.look()
    assert cluster.watch.silent(90) == []
    cluster.live(10)
    assert cluster.watch.silent(5) == []


def test_time_does_not_pass_while_the_own_beat_cannot_be_written(cluster):
    cluster.live(200, *cluster.names, leader=False)
    assert cluster.watch.silent(90) == []


def test_time_does_not_pass_while_files_cannot_be_read(cluster, monkeypatch):
    def stale(path: Path) -> float:
        raise OSError(errno.ESTALE, "stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(node_files, "stamp", stale)
        cluster.live(200)
    assert cluster.watch.silent(30) == []
    cluster.live(2)
    assert cluster.watch.silent(30) == []


@pytest.fixture
def watched(tmp_path):
    """The leader's watch over four nodes, with a clock of the test."""
    attempt = Attempt(tmp_path / "attempts" / "1")
    for name in ("components", "errors"):
        (attempt.folder / name).mkdir(parents=True)
    nodes = ("n1", "n2", "n3", "n4")
    for node in nodes:
        NodeFiles(attempt, node).folder.mkdir(parents=True)
    said: list[str] = []
    made = watch.Watch(attempt, load_config("configs/tiny/grpo.yaml").config, Placement.model_construct(nodes=nodes),
                       None, None, lambda: None, said.append)
    made.said = said
    return made


def silent_for(watched, seconds: float, *nodes: str) -> None:
    watched.beats.watched_s = 1000.0 + seconds
    watched.beats._seen = {node: (1.0, 1000.0 if node in nodes else watched.beats.watched_s)
                           for node in watched.placement.nodes}


def test_one_silent_node_has_failed(watched):
    silent_for(watched, 91, "n3")
    outcome = watched._silent()
    assert (outcome.status, outcome.nodes) == ("node_failure", ("n3",))


def test_most_nodes_silent_together_are_not_failed_nodes(watched):
    for seconds in (91, 92):
        silent_for(watched, seconds, "n1", "n2", "n3")
        assert watched._silent() is None
    assert len(watched.said) == 1 and "3 of 4 nodes at the same time" in watched.said[0]
    silent_for(watched, 91 + watch.MANY_SILENT_S, "n1", "n2", "n3")
    outcome = watched._silent()
    assert (outcome.status, outcome.nodes) == ("node_failure", ()) and "no node is blamed" in outcome.message


def test_a_job_that_stands_still_with_a_node_about_to_be_silent_has_lost_the_node(watched, monkeypatch):
    """Nobody waits for the stacks of a dead node, and no rank is said never to have arrived."""
    for node in ("n1", "n2", "n4"):
        (NodeFiles(watched.attempt, node).folder / "stacks.json").write_text("[]")
    seconds = iter((80, 89, 91))
    monkeypatch.setattr(watched.beats, "look", lambda: silent_for(watched, next(seconds), "n3"))
    outcome = watched._hung(3, doing(3, "train").open)
    assert (outcome.status, outcome.nodes) == ("node_failure", ("n3",)) and list(seconds) == []


def test_a_hang_is_told_by_changes_seen_whatever_the_clocks_say(watched):
    """The driver's clock may be wrong, and a pause of the file system hides its progress."""
    at_limit = doing(3, "train", expected_s=1.0, at=5.0)
    assert not watched._overdue(at_limit)
    watched.beats.watched_s += 60
    assert not watched._overdue(at_limit)
    watched.beats.watched_s += 1
    assert watched._overdue(at_limit) == list(at_limit.open)
    assert not watched._overdue(doing(3, "train", expected_s=1.0, at=6.0))


def test_of_spans_that_overlap_each_is_judged_on_its_own(watched):
    """Rollouts that go on hide no update that hangs."""
    train, rollout = (Span(name, "", began=5.0, at=5.0, expected_s=1.0) for name in ("train", "rollout"))
    assert not watched._overdue(Progress(3, 2, (train, rollout)))
    watched.beats.watched_s += 40
    assert not watched._overdue(Progress(3, 2, (train, replace(rollout, at=45.0))))
    watched.beats.watched_s += 40
    assert watched._overdue(Progress(3, 2, (train, replace(rollout, at=45.0)))) == [train]


def test_a_supervisor_outlives_a_silent_leader_while_a_checkpoint_is_written(tmp_path):
    attempt = Attempt(tmp_path / "attempts" / "1")
    attempt.folder.mkdir(parents=True)
    one = Supervisor(attempt, "n1")
    one.leader.watched_s = supervisor.WITHOUT_LEADER_S + 1
    write_progress(attempt.folder, doing(3, "save"))
    one._check()
    write_progress(attempt.folder, doing(4, "train"))
    with pytest.raises(Ended, match="no sign of life from the leader"):
        one._check()
    write_progress(attempt.folder, doing(4, "save"))
    one.leader.watched_s = supervisor.SAVING_S + 1
    with pytest.raises(Ended):
        one._check()
