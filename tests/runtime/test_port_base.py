"""`run.port_base` holds on the nodes of a Slurm job."""

from __future__ import annotations

from launch import ports
from launch.health.expected import expected_of
from launch.health.gather import gather_reports
from launch.planner.prepare import prepare
from launch.run import node_files
from launch.run.attempts import RunFolder
from launch.run.node_files import Beat, NodeFiles
from launch.slurm.profiles import Profile
from tests.patience import patient
from tests.runtime.played_job import CONFIG, supervisor, until


def test_a_node_takes_the_block_that_the_user_pinned(tmp_path):
    free = ports.allocate(17)
    free.release()
    config = prepare(CONFIG, (f"run.dir={tmp_path}", f"run.port_base={free.base}"), "cpu").config
    with RunFolder(config.run) as run:
        attempt = run.new_attempt()
        expected_of(config, None, "cpu", profile=Profile()).write(attempt.folder)
        beat = Beat(attempt.folder / node_files.LEADER_BEAT)
        child = supervisor(attempt, "n1", 5)
        try:
            until(lambda: NodeFiles(attempt, "n1").hello() is not None, "the node's greeting", 30)
            assert NodeFiles(attempt, "n1").hello().ports == free.base
            gather_reports(attempt.folder, ["n1"], 60)      # answers the node's checks
        finally:
            (attempt.folder / node_files.END).write_text("{}")
            child.wait(patient(30))
            beat.stop()
    assert child.returncode == 0
