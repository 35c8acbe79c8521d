"""Checkpoints of TransferQueue: what was cleared since one stays until no checkpoint needs it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._arrays import U64
from ._replay import ReplayBuffer

#: Priorities of the items of samples. Items are appended with the first; a clear hides them with the second, and the next checkpoint with the third.
LIVE, CLEARED, CLEARED_BEFORE = 1.0, 0.5, 0.25
#: Tag of the items that are checkpoints. Tags of samples have an ``@``.
MARKER = "checkpoint"
#: Items of one request.
REQUEST = 4096
#: Limit of a list of all items.
ALL = 0xFFFF_FFFF


class Checkpoints:
    """The last two checkpoints of a buffer of samples, and the cleared samples that they need.

    Two, because TransferQueue replaces the previous checkpoint only after this one is saved.
    """

    def __init__(self, buffer: ReplayBuffer, fields: list[str]) -> None:
        self.buffer, self._fields = buffer, fields

    def save(self) -> int:
        """Creates a checkpoint, and returns its number. Deletes what only the checkpoint before the previous one needs."""
        before = self.buffer.list(tag=MARKER).index
        # First of all: until it exists, the previous one is the last.
        number = int(self.buffer.extend({name: [np.empty(0, np.uint8)] for name in self._fields}, tag=MARKER)[0])
        listed = self.buffer.list(limit=ALL)
        self.delete(listed.index[listed.priorities == CLEARED_BEFORE])
        self._mark(listed.index[listed.priorities == CLEARED], CLEARED_BEFORE)
        self.delete(before[:-1])
        return number

    def restore(self, number: int) -> bool:
        """Makes the samples live that were cleared since a checkpoint; returns whether it is one of the last two."""
        markers = self.buffer.list(tag=MARKER).index
        if number not in markers:
            return False
        later = markers[int(np.flatnonzero(markers == number)[0]) + 1 :]
        listed = self.buffer.list(limit=ALL)
        back = listed.priorities == CLEARED
        if len(later):
            back |= listed.priorities == CLEARED_BEFORE
        replaced = _replaced(listed, back)
        self._mark(listed.index[back & ~replaced], LIVE)
        self.delete(listed.index[replaced])
        self.delete(later)
        return True

    def hide(self, items: U64) -> None:
        """Hides items of cleared samples."""
        self._mark(items, CLEARED)

    def delete(self, items: U64) -> None:
        """Deletes items."""
        for start in range(0, len(items), REQUEST):
            self.buffer.delete(items[start : start + REQUEST])

    def sweep(self) -> int:
        """Deletes items that no handle reaches: of deleted samples, and hidden ones if there is no checkpoint. Returns their number."""
        listed = self.buffer.list(limit=ALL)
        owners = owners_of(listed)
        alive = listed.index
        if MARKER not in listed.tags:
            alive = alive[listed.priorities == LIVE]
        unreachable = listed.index[~np.isin(owners, alive) | ~np.isin(listed.index, alive)]
        self.delete(unreachable)
        return len(unreachable)

    def _mark(self, items: U64, priority: float) -> None:
        for start in range(0, len(items), REQUEST):
            self.buffer.update_priority(items[start : start + REQUEST], priority)


def owners_of(listed: Any) -> U64:
    """Returns the sample of each item."""
    owners: U64 = np.where(listed.trajectories == 0, listed.index, listed.trajectories)
    return owners


def _replaced(listed: Any, back: Any) -> Any:
    """Returns which items are of later samples than the restored ones, in the same slots. In a slot the first that was cleared is restored."""
    owners, slots = owners_of(listed), [tag.rpartition("@")[2] for tag in listed.tags]
    first: dict[str, int] = {}
    for row in np.flatnonzero(back).tolist():
        first.setdefault(slots[row], int(owners[row]))
    kept = np.array([first.get(slot, owner) for slot, owner in zip(slots, owners.tolist(), strict=True)], np.uint64)
    return kept != owners
