"""Cleared samples and checkpoints of TransferQueue: a cleared sample stays until no checkpoint needs it.

What was cleared is recorded as items of a second buffer, which no decay changes. The priority of a sample is a mark that reads check without this
record: 0, which no decay changes either, or 1 after a clear, which every checkpoint and every sweep renews.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._arrays import U64
from ._replay import ReplayBuffer

#: Priorities of samples. A clear hides a sample with the second.
LIVE, HIDDEN = 0.0, 1.0
#: Tags of checkpoints, and of records of cleared samples.
MARKER, RECORD = "checkpoint", "cleared"
#: Items of one request.
REQUEST = 4096
#: Samples of a record, of 8 bytes each.
RECORDED = 65_536
#: Trajectory of all records: they are in one partition, in the order of their appends.
ORDER = 1


@dataclass(frozen=True)
class Record:
    """Samples that were cleared together."""

    item: int
    #: Number of the last checkpoint at that time; 0 = none.
    checkpoint: int
    samples: U64


class Checkpoints:
    """The last two checkpoints of a buffer of samples, and the cleared samples that they need.

    Two, because TransferQueue replaces the previous checkpoint only after this one is saved.
    """

    def __init__(self, buffer: ReplayBuffer, capacity: int, timeout: float) -> None:
        self.buffer = buffer
        fields = {"samples": (np.uint64, (None,))}
        # A record per clear, and at most one clear per sample.
        self._log = ReplayBuffer(
            buffer.db, f"{buffer.name}.cleared", capacity=capacity, remover="refuse", fields=fields, timeout=timeout
        )

    def save(self) -> int:
        """Creates a checkpoint, and returns its handle. Deletes what only the checkpoint before the previous one needs."""
        before = self._markers()
        last = before[-1][0] if before else 0
        # First of all: until it exists, the previous one is the last.
        handle = int(self._append([np.empty(0, np.uint64)], last + 1, MARKER)[0])
        self._forget([marker for _, marker in before[:-1]])
        records = self._records()
        ended = [record for record in records if record.checkpoint < last]
        listed = self.buffer.list()
        self.delete(listed.index[np.isin(owners_of(listed), _samples(ended))])
        self._forget([record.item for record in ended])
        self._renew(listed, _samples(records))
        return handle

    def restore(self, handle: int) -> bool:
        """Makes the samples live that were cleared since a checkpoint; returns whether it is one of the last two."""
        markers = self._markers()
        number = next((number for number, marker in markers if marker == handle), None)
        if number is None:
            return False
        listed, records = self.buffer.list(), self._records()
        since = [record for record in records if record.checkpoint >= number]
        earlier = _samples([record for record in records if record.checkpoint < number])
        owners, slots = owners_of(listed), [tag.rpartition("@")[2] for tag in listed.tags]
        slot_of = dict(zip(owners.tolist(), slots, strict=True))
        # Of a slot the sample that was cleared first: the others were put after the checkpoint.
        restored: dict[str, int] = {}
        for sample in _samples(since).tolist():
            if sample in slot_of:
                restored.setdefault(slot_of[sample], sample)
        kept = np.array([restored.get(slot, owner) for slot, owner in zip(slots, owners.tolist(), strict=True)], np.uint64)
        self._mark(np.array(list(restored.values()), np.uint64), LIVE)
        # Those that an earlier checkpoint needs stay.
        self.delete(listed.index[(kept != owners) & ~np.isin(owners, earlier)])
        self._forget([record.item for record in since])
        self._forget([marker for other, marker in markers if other > number])
        return True

    def hide(self, samples: U64) -> None:
        """Records samples as cleared, and hides them."""
        markers = self._markers()
        parts = [samples[start : start + RECORDED] for start in range(0, len(samples), RECORDED)]
        # The record comes first: what is hidden has one.
        self._append(parts, markers[-1][0] if markers else 0, RECORD)
        self._mark(samples, HIDDEN)

    def cleared(self) -> U64:
        """Returns the samples that were cleared and are not deleted."""
        return _samples(self._records())

    def delete(self, items: U64) -> None:
        """Deletes items."""
        for start in range(0, len(items), REQUEST):
            self.buffer.delete(items[start : start + REQUEST])

    def sweep(self, failed: Sequence[int] = ()) -> int:
        """Deletes items that no handle reaches: of deleted samples, of ``failed`` puts, and of cleared samples if there is no checkpoint.

        Returns their number.
        """
        listed = self.buffer.list()
        # In this order: a listed sample that is hidden has a record, and these records are older than a checkpoint that is not there yet.
        records = self._records()
        unused = _samples([] if self._markers() else records)
        owners = owners_of(listed)
        # A sample that was put while the items were listed may be missing in the list.
        deleted = self._deleted(np.unique(owners[~np.isin(owners, listed.index)]))
        gone = np.isin(owners, deleted) | np.isin(owners, unused) | np.isin(listed["version"], np.array(failed, np.uint64))
        self.delete(listed.index[gone])
        if len(unused):
            self._forget([record.item for record in records])
        self._renew(listed, _samples(records))
        return int(gone.sum())

    def _renew(self, listed: Any, cleared: U64) -> None:
        """Sets the marks again that a decay or a reinforcement of the memories has changed."""
        samples, hidden = listed.trajectories == 0, np.isin(listed.index, cleared)
        self._mark(listed.index[samples & hidden & (listed.priorities != HIDDEN)], HIDDEN)
        self._mark(listed.index[samples & ~hidden & (listed.priorities != LIVE)], LIVE)

    def _markers(self) -> list[tuple[int, int]]:
        """Returns numbers and handles of the checkpoints, in their order."""
        listed = self._log.list(tag=MARKER)
        return sorted(zip(listed["version"].tolist(), listed.index.tolist(), strict=True))

    def _records(self) -> list[Record]:
        """Returns the records of cleared samples, in the order of the clears."""
        listed = self._log.list(tag=RECORD)
        records: list[Record] = []
        for start in range(0, len(listed.index), REQUEST):
            read = self._log.get(listed.index[start : start + REQUEST])
            rows = zip(read.index.tolist(), read["version"].tolist(), read["samples"], strict=True)
            records += [Record(item, checkpoint, samples) for item, checkpoint, samples in rows]
        return sorted(records, key=lambda record: record.checkpoint)

    def _append(self, samples: Sequence[U64], checkpoint: int, tag: str) -> U64:
        return self._log.extend({"samples": samples}, version=checkpoint, trajectory=ORDER, tag=tag)

    def _forget(self, items: Sequence[int]) -> None:
        if items:
            self._log.delete(np.array(items, np.uint64))

    def _deleted(self, items: U64) -> U64:
        """Returns those of some items that do not exist."""
        parts = [self.buffer.get(items[start : start + REQUEST], fields=[]).missing for start in range(0, len(items), REQUEST)]
        return np.concatenate([np.empty(0, np.uint64), *parts])

    def _mark(self, samples: U64, priority: float) -> None:
        for start in range(0, len(samples), REQUEST):
            self.buffer.update_priority(samples[start : start + REQUEST], priority)


def owners_of(listed: Any) -> U64:
    """Returns the sample of each item."""
    owners: U64 = np.where(listed.trajectories == 0, listed.index, listed.trajectories)
    return owners


def _samples(records: Sequence[Record]) -> U64:
    """Returns the samples of records, in their order."""
    return np.concatenate([np.empty(0, np.uint64), *(record.samples for record in records)])
