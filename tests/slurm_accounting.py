"""Accounting for a simulated Slurm: a private mariadbd and slurmdbd, in the foreground as children of the cluster."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from launch import processes
from tests.patience import patient
from tests.slurm_conf import free_block

PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "my_print_defaults", "sacct")
NO_ACCOUNTING = "needs slurmdbd and mariadb, which tests/install_slurm.sh could not install"


def missing_programs(path: str) -> list[str]:
    return [name for name in PROGRAMS if not shutil.which(name, path=path)]


class Accounting:
    """Database and slurmdbd of one cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database_port, self.port = (base := free_block(2)), base + 1
        self.password = secrets.token_hex(16)

    @property
    def settings(self) -> str:
        """Lines for slurm.conf. To slurmdbd the controller authenticates by a munge of its own:
        AccountingStoragePass."""
        return (f"AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\n"
                f"AccountingStoragePort={self.port}\nAccountingStoragePass={self.folder}/munge/socket\n")

    def start(self, environment: Mapping[str, str], daemon: Callable[..., None], wait: Callable[..., None],
              deadline: float) -> None:
        """Start the database, then slurmdbd; both are up when this returns. munged must run.

        Args:
            environment: of the cluster's commands.
            daemon: starts one, by name and words.
            wait: waits for a condition, by what it is, until the deadline.
        """
        me = pwd.getpwuid(os.getuid()).pw_name
        data = self.folder / "mysql"
        install = shutil.which("mariadb-install-db", path=environment["PATH"]) or "mariadb-install-db"
        done = processes.output_of(
            [install, "--no-defaults", f"--datadir={data}", f"--user={me}",
             "--auth-root-authentication-method=normal", "--skip-test-db"],
            timeout_s=patient(60), environment=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        grants = self.folder / "etc/grants.sql"
        grants.touch(mode=0o600)
        grants.write_text(f"CREATE DATABASE slurm;\nCREATE USER slurm@'127.0.0.1' IDENTIFIED BY '{self.password}';\n"
                          "GRANT ALL ON slurm.* TO slurm@'127.0.0.1';\n")
        daemon(
            "mariadbd", "mariadbd", "--no-defaults", f"--datadir={data}", f"--user={me}", f"--socket={data}/socket",
            f"--pid-file={data}/pid", "--bind-address=127.0.0.1", f"--port={self.database_port}",
            "--skip-name-resolve", "--innodb-buffer-pool-size=32M", "--innodb-log-file-size=8M",
            "--innodb-lock-wait-timeout=900",
            "--performance-schema=OFF", f"--init-file={grants}")
        wait(lambda: answers(self.database_port), "the database to answer", deadline)
        conf = self.folder / "etc/slurmdbd.conf"
        conf.touch(mode=0o600)
        conf.write_text("\n".join((
            "AuthType=auth/munge", f"AuthInfo=socket={self.folder}/munge/socket", "DbdHost=localhost",
            "DbdAddr=127.0.0.1", f"DbdPort={self.port}", f"SlurmUser={me}",
            f"PidFile={self.folder}/spool/slurmdbd.pid",
            "StorageType=accounting_storage/mysql", "StorageHost=127.0.0.1", f"StoragePort={self.database_port}",
            "StorageUser=slurm", f"StoragePass={self.password}", "StorageLoc=slurm", "")))
        daemon("slurmdbd", "slurmdbd", "-D")
        wait(lambda: answers(self.port), "slurmdbd to answer", deadline)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
