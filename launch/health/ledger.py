"""The ledger of bad nodes: who was seen failing, with what evidence, and for how long that keeps a node out.

A node is kept out by one entry that names its evidence, or by two entries of different jobs without any. Three things
keep a black hole or a broken check from eating the cluster: entries expire, a reason given for more than half of the
cluster's nodes counts against the reason and not against the nodes, and never more than a share of the nodes is kept
out, the worst first.
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
"""Most of the cluster's nodes that are kept out automatically, rounded down; always one."""
SAME_REASON_SHARE = 0.5
MAX_WITHOUT_SIZE = 4
"""The cap where the number of nodes is not known."""
LOCK_S = 30.0
"""How long a change waits for the lock. Another job holds it for milliseconds."""
Seen = tuple[str, str, str | Path]
"""A node that was seen failing, the reason, the evidence."""


@dataclass(frozen=True)
class LedgerEntry:
    """A node was seen failing."""

    node: str
    reason: str
    """What failed; begins with the check's name where a check found it: `gpu.ecc: 4 uncorrected errors`."""
    evidence: str
    """Path of the file that shows it; empty where there is only suspicion."""
    job: str
    time: float
    expires: float

    @property
    def kind(self) -> str:
        return self.reason.partition(":")[0]


class Ledger:
    """A JSON file that several jobs may share: every change reads, adds and renames under a lock.

    Args:
        path: the file; it need not exist.
        cluster_nodes: nodes of the partition, or of the allocation where that is all one knows; the cap is a share of
            them.
        max_share, expiry_s: see the module.
        lock_s: see `LOCK_S`.
    """

    def __init__(self, path: str | Path, *, cluster_nodes: int | None = None, max_share: float = MAX_SHARE,
                 expiry_s: float = EXPIRY_S, lock_s: float = LOCK_S) -> None:
        self.path, self.cluster_nodes, self.max_share, self.expiry_s = Path(path), cluster_nodes, max_share, expiry_s
        self.lock_s = lock_s

    @property
    def cap(self) -> int:
        """Most nodes that `excluded` names."""
        if self.cluster_nodes is None:
            return MAX_WITHOUT_SIZE
        return max(1, math.floor(self.cluster_nodes * self.max_share))

    def add(self, node: str, reason: str, evidence: str | Path = "", job: str = "", *,
            now: float | None = None) -> LedgerEntry:
        """Record a failure and return its entry. The same node, reason and job count once, and the newest counts.

        Raises:
            UserError: the lock did not become free in time, or the file is not a ledger of this version.
            OSError: the file cannot be written.
        """
        entry, = self._add([(node, reason, evidence)], job, time.time() if now is None else now)
        return entry

    def record(self, found: Iterable[Seen], job: str, say: Callable[[str], None]) -> None:
        """`add` of all these at once. What keeps the ledger from being written is said, and ends no run."""
        found = list(found)
        if not found:
            return
        try:
            self._add(found, job, time.time())
        except (UserError, OSError) as error:
            nodes = listed(list(dict.fromkeys(node for node, _, _ in found)))
            say(f"warning: {nodes} could not be written into the ledger of bad nodes, and the run goes on: {error}")

    def readable(self, say: Callable[[str], None]) -> Ledger | None:
        """This ledger; None where it cannot be read, which is said, and ends no run."""
        try:
            self.entries()
        except (UserError, OSError) as error:
            say(f"warning: going on without the ledger of bad nodes: {error}")
            return None
        return self

    def entries(self, now: float | None = None) -> list[LedgerEntry]:
        """All entries, oldest first; with `now` only those that have not expired.

        Raises:
            UserError: the file is not a ledger of this version.
            OSError: the file cannot be read.
        """
        try:
            text = read_shared(self.path, str)      # not parsed in there: who edits it by hand hears of it at once
            if text is None:
                return []
            document = json.loads(text)
            version = document["schema_version"]
            found = [LedgerEntry(**row) for row in document["entries"]] if version == SCHEMA_VERSION else []
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"the ledger of bad nodes is not readable: {error}", where=str(self.path.absolute()),
                            fix="remove or rename the file: nodes are then judged afresh") from error
        if version != SCHEMA_VERSION:
            raise UserError(f"the ledger of bad nodes has schema version {version}, this program reads "
                            f"{SCHEMA_VERSION}", where=str(self.path.absolute()), fix="remove or rename the file")
        return [entry for entry in sorted(found, key=lambda each: each.time) if now is None or entry.expires > now]

    def excluded(self, now: float | None = None) -> tuple[str, ...]:
        """Nodes to keep out at `now`, worst first (most entries, then newest), never more than `cap`."""
        return tuple(node for node, _ in self._bad(now)[:self.cap])

    def over_cap(self, now: float | None = None) -> tuple[str, ...]:
        """Nodes that would be kept out if there were no cap: to be told, and used last."""
        return tuple(node for node, _ in self._bad(now)[self.cap:])

    def suspected(self, now: float | None = None) -> tuple[str, ...]:
        """Nodes with an entry that are not kept out by it."""
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
        """Two jobs do not lose each other's entries. The lock is a file of its own: the ledger itself is replaced."""
        new = [LedgerEntry(node, reason, str(evidence), job, at, at + self.expiry_s)
               for node, reason, evidence in found]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with held(self.path.with_name(f".{self.path.name}.lock"), self.lock_s):
            entries = {(entry.node, entry.kind, entry.job): entry for entry in (*self.entries(at), *new)}
            rows = [asdict(entry) for entry in entries.values()]
            write_atomically(self.path, json.dumps({"schema_version": SCHEMA_VERSION, "entries": rows}, indent=1))
        return new
