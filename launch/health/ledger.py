"""The ledger of bad nodes: observed failures, their evidence, and how long they exclude a node.

A node is excluded by one entry with evidence, or by entries of two different jobs without evidence. Three rules keep a
broken check from excluding the whole cluster: entries expire; a reason that affects more than half of the cluster's
nodes is ignored; and at most a fixed share of the nodes is excluded, worst first.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.errors import UserError
from launch.files.lock import held
from launch.files.shared import read_shared, write_atomically
from launch.files.waiting import listed

SCHEMA_VERSION = 1
FILE = "ledger.json"
"""In the run's folder, `runs/<name>/`."""
EXPIRY_S = 24 * 3600.0
MAX_SHARE = 0.25
"""Maximum share of the cluster's nodes that is excluded automatically, rounded down, but at least one node."""
SAME_REASON_SHARE = 0.5
MAX_WITHOUT_SIZE = 4
"""The cap if the number of nodes is unknown."""
LOCK_S = 30.0
"""How long a change waits for the lock, in seconds. Other jobs hold it for milliseconds."""
Seen = tuple[str, str, str | Path]
"""(failing node, reason, evidence)."""


@dataclass(frozen=True)
class LedgerEntry:
    """One observed failure of a node."""

    node: str
    reason: str
    """What failed. Starts with the name of the check, if a check found it: `gpu.ecc: 4 uncorrected errors`."""
    evidence: str
    """Path of the file with the evidence; empty for a mere suspicion."""
    job: str
    time: float
    expires: float

    @property
    def kind(self) -> str:
        return self.reason.partition(":")[0]


class Ledger:
    """A JSON file that several jobs may share. Every change reads, adds and renames under a lock.

    Args:
        path: the file; it need not exist.
        cluster_nodes: number of nodes in the partition, or in the allocation if the partition is unknown. The cap is a
            share of it.
        max_share, expiry_s: see the module docstring.
        lock_s: see `LOCK_S`.
    """

    def __init__(self, path: str | Path, *, cluster_nodes: int | None = None, max_share: float = MAX_SHARE,
                 expiry_s: float = EXPIRY_S, lock_s: float = LOCK_S) -> None:
        self.path, self.cluster_nodes, self.max_share, self.expiry_s = Path(path), cluster_nodes, max_share, expiry_s
        self.lock_s = lock_s

    @property
    def cap(self) -> int:
        """Maximum number of nodes that `excluded` returns."""
        if self.cluster_nodes is None:
            return MAX_WITHOUT_SIZE
        return max(1, math.floor(self.cluster_nodes * self.max_share))

    def add(self, node: str, reason: str, evidence: str | Path = "", job: str = "", *,
            now: float | None = None) -> LedgerEntry:
        """Record a failure and return its entry. The newest entry replaces one with the same node, reason and job.

        Raises:
            UserError: the lock did not become free in time, or the file is not a ledger of this version.
            OSError: the file cannot be written.
        """
        entry, = self._add([(node, reason, evidence)], job, time.time() if now is None else now)
        return entry

    def record(self, found: Iterable[Seen], job: str, say: Callable[[str], None]) -> None:
        """Add several entries at once. A ledger that cannot be written is reported and does not end the run."""
        found = list(found)
        if not found:
            return
        try:
            self._add(found, job, time.time())
        except (UserError, OSError) as error:
            nodes = listed(list(dict.fromkeys(node for node, _, _ in found)))
            say(f"warning: {nodes} could not be added to the ledger of bad nodes, and the run continues: {error}")

    def readable(self, say: Callable[[str], None]) -> Ledger | None:
        """This ledger; None if it cannot be read, which is reported and does not end the run."""
        try:
            self.entries()
        except (UserError, OSError) as error:
            say(f"warning: continuing without the ledger of bad nodes: {error}")
            return None
        return self

    def entries(self, now: float | None = None) -> list[LedgerEntry]:
        """All entries, oldest first; with `now` only those that have not expired.

        Raises:
            UserError: the file is not a ledger of this version.
            OSError: the file cannot be read.
        """
        try:
            text = read_shared(self.path, str)      # parsed below, so that an editing mistake is reported at once
            if text is None:
                return []
            document = json.loads(text)
            version = document["schema_version"]
            found = [LedgerEntry(**row) for row in document["entries"]] if version == SCHEMA_VERSION else []
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"the ledger of bad nodes is not readable: {error}", where=str(self.path.absolute()),
                            fix="remove or rename the file; a new ledger is then started") from error
        if version != SCHEMA_VERSION:
            raise UserError(f"the ledger of bad nodes has schema version {version}, this program reads "
                            f"{SCHEMA_VERSION}", where=str(self.path.absolute()), fix="remove or rename the file")
        return [entry for entry in sorted(found, key=lambda each: each.time) if now is None or entry.expires > now]

    def excluded(self, now: float | None = None) -> tuple[str, ...]:
        """Nodes to exclude at `now`, worst first (most entries, then newest), at most `cap`."""
        return tuple(node for node, _ in self._bad(now)[:self.cap])

    def over_cap(self, now: float | None = None) -> tuple[str, ...]:
        """Nodes that would be excluded without the cap. They are reported and used last."""
        return tuple(node for node, _ in self._bad(now)[self.cap:])

    def suspected(self, now: float | None = None) -> tuple[str, ...]:
        """Nodes with an entry that does not exclude them."""
        at = time.time() if now is None else now
        out = set(self.excluded(at))
        return tuple(dict.fromkeys(entry.node for entry in self.entries(at) if entry.node not in out))

    def reasons(self, node: str, now: float | None = None) -> list[LedgerEntry]:
        """The entries of a node at `now`, newest first."""
        at = time.time() if now is None else now
        return [entry for entry in reversed(self.entries(at)) if entry.node == node]

    def _bad(self, now: float | None) -> list[tuple[str, list[LedgerEntry]]]:
        at = time.time() if now is None else now
        entries = self.entries(at)
        blamed: dict[str, set[str]] = defaultdict(set)
        for entry in entries:
            blamed[entry.kind].add(entry.node)
        most = math.inf if self.cluster_nodes is None or self.cluster_nodes < 3 else \
            self.cluster_nodes * SAME_REASON_SHARE
        by_node: dict[str, list[LedgerEntry]] = defaultdict(list)
        for entry in entries:
            if len(blamed[entry.kind]) <= most:
                by_node[entry.node].append(entry)
        bad = [(node, found) for node, found in by_node.items()
               if any(entry.evidence for entry in found) or len({entry.job for entry in found}) > 1]
        return sorted(bad, key=lambda each: (-len(each[1]), -each[1][-1].time, each[0]))

    def _add(self, found: Sequence[Seen], job: str, at: float) -> list[LedgerEntry]:
        """Add entries under a lock, so that jobs do not lose each other's entries. The lock is a separate file, because
        the ledger itself is replaced."""
        new = [LedgerEntry(node, reason, str(evidence), job, at, at + self.expiry_s)
               for node, reason, evidence in found]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with held(self.path.with_name(f".{self.path.name}.lock"), self.lock_s):
            entries = {(entry.node, entry.kind, entry.job): entry for entry in (*self.entries(at), *new)}
            rows = [asdict(entry) for entry in entries.values()]
            write_atomically(self.path, json.dumps({"schema_version": SCHEMA_VERSION, "entries": rows}, indent=1))
        return new
