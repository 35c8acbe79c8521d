"""Samples of TransferQueue in a replay buffer, and the fence by handle."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np

from . import _tq_values as forms
from ._aio import run
from ._arrays import U64
from ._columns import split_rows
from ._database import Database
from ._deadline import Waiting
from ._errors import CapacityError, EngramError, InvalidValueError
from ._replay import ReplayBuffer
from ._tq_checkpoints import LIVE, REQUEST, Checkpoints, owners_of

#: Fields of a row that one item holds: more are split.
COLUMNS = 8
#: Bytes of a row that one item holds; an item of the cluster may have 4 MiB, with the description.
ROW_BYTES = (4 << 20) - (64 << 10)
#: Cleared samples after which what they left behind is searched for, at least: the search lists all items.
SWEEP = 4096

#: The handle of one field of a sample: the sample (its first item), the item, the column in it. Never valid for another sample or version.
Handle: TypeAlias = "tuple[int, int, int]"


class StaleHandleError(EngramError, LookupError):
    """The sample was cleared, or never existed. Nothing was read or changed. ``keys`` are those whose handle is stale."""

    def __init__(self, operation: str, keys: Sequence[str]) -> None:
        super().__init__(f"{operation} refused: {len(keys)} of the handles are stale, the first of {keys[0]}; get new metadata")
        self.operation, self.keys = operation, list(keys)

    def __reduce__(self) -> tuple[Any, ...]:
        return (StaleHandleError, (self.operation, self.keys))


class SampleStore:
    """Samples as items of a buffer. Safe to use from several threads.

    A put appends items and returns a handle per value. An item is never changed: a field that is put again is a new item, and the old version
    stays readable by its handle until the sample is cleared. A clear hides samples, so that a checkpoint before it can be restored; what no
    checkpoint needs is deleted later.
    """

    def __init__(self, db: Database, name: str, capacity: int, timeout: float) -> None:
        fields: dict[str, Any] = {"form": (np.uint8, (None,))}
        fields |= {_column(number): (np.uint8, (None,)) for number in range(COLUMNS)}
        options: dict[str, Any] = {"capacity": capacity, "remover": "refuse", "max_priority": 1.0}
        self.buffer = ReplayBuffer(db, name, fields=fields, timeout=timeout, **options)
        #: Checkpoints, and what they need.
        self.checkpoints = Checkpoints(self.buffer, capacity, timeout)
        self._timeout = timeout
        self._cleared = 0
        #: Numbers of puts that failed, and whether items of theirs may be left.
        self._failed, self._is_left = list[int](), False
        self._lock = threading.Lock()

    def put(
        self, fields: Sequence[forms.Values], tags: Sequence[str], owners: Sequence[int | None]
    ) -> list[list[Handle]]:
        """Appends rows: for each field the handle of each row. ``owners`` are the samples of rows that exist already, by their metadata.

        A put that fails leaves no items: those that cannot be deleted at once are deleted by the next put or sweep of this store.
        """
        if self._is_left:
            self.sweep()
        held = np.array([owner or 0 for owner in owners], np.uint64)
        self._check("put", held[held > 0], [tag for tag, owner in zip(tags, owners, strict=True) if owner])
        samples, handles, appended, number = held, list[list[Handle]](), list[U64](), secrets.randbits(63) | 1
        try:
            for group in _grouped(fields):
                items = self._append(group, tags, samples, number, appended)
                # The first item of a new sample is the sample.
                samples = np.where(samples == 0, items, samples)
                for column in range(len(group)):
                    handles.append(list(zip(samples.tolist(), items.tolist(), repeat(column))))
            # The sample may have been cleared meanwhile, and its slot given to another.
            self._check("put", held[held > 0], [tag for tag, owner in zip(tags, owners, strict=True) if owner])
        except BaseException as failure:
            # What a request has stored that failed otherwise has no handles: a sweep finds it by the number of the put.
            self._failed.append(number)
            self._is_left = True
            if isinstance(failure, (StaleHandleError, InvalidValueError, CapacityError)):
                with suppress(EngramError):
                    self.checkpoints.delete(np.concatenate([np.empty(0, np.uint64), *appended]))
                    self._is_left = False
            raise
        return handles

    def discard(self, handles: Sequence[Handle]) -> None:
        """Deletes the items of handles that no caller has got."""
        self.checkpoints.delete(np.array([item for _, item, _ in handles], np.uint64))

    def _deadline(self) -> Waiting:
        return Waiting(self._timeout)

    def _append(
        self, group: Sequence[forms.Values], tags: Sequence[str], samples: U64, number: int, done: list[U64]
    ) -> U64:
        """Appends an item per row, and returns the items; those of every request are added to ``done`` when it ends."""
        rows, first = len(tags), len(done)
        lengths, descriptions = forms.describe(group)
        columns = [("form", lengths, descriptions), *((_column(n), values.lengths, values.data) for n, values in enumerate(group))]
        empty = (np.zeros(rows, np.uint32), np.empty(0, np.uint8))
        columns += [(_column(number), *empty) for number in range(len(group), COLUMNS)]
        deadline = self._deadline()
        native = run(self.buffer._existing(deadline))
        ends = [np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) for _, lengths, _ in columns]
        for start in range(0, rows, REQUEST):
            end = min(start + REQUEST, rows)
            parts: list[Any] = [
                (name, "uint8", [], lengths[start:end].tolist(), data[int(at[start]) : int(at[end])])
                for (name, lengths, data), at in zip(columns, ends, strict=True)
            ]
            options = {
                "priorities": np.full(end - start, LIVE),
                "versions": np.full(end - start, number, np.uint64),
                "trajectories": samples[start:end],
                "tags": [tag.encode() for tag in tags[start:end]],
            }
            try:
                appended = native.append(end - start, parts, **deadline.options(f"{start} of {rows} rows are stored"), **options).wait()
            except CapacityError:
                # Cleared samples take room until they are swept.
                if not self.sweep():
                    raise
                appended = native.append(end - start, parts, **deadline.options(f"{start} of {rows} rows are stored"), **options).wait()
            done.append(appended[0])
        result: U64 = np.concatenate(done[first:])
        return result

    def get(self, keys: Sequence[str], fields: Sequence[str], handles: Sequence[Handle | None]) -> list[Any]:
        """Returns values by handle. Transfers only their columns."""
        absent = [key for key, handle in zip(keys, handles, strict=True) if handle is None]
        if absent:
            raise StaleHandleError("get", absent)
        known = [handle for handle in handles if handle is not None]
        # With its type: numbers on both sides of 2^63 would become floats.
        samples, items, columns = np.array(known, np.uint64).T
        # A sample that consists of one item is alive if that is.
        self._check("get", np.unique(samples[samples != items]), keys)
        result: list[Any] = [None] * len(keys)
        unique, place = np.unique(items, return_inverse=True)
        wanted = np.zeros(len(unique), np.int64)
        np.bitwise_or.at(wanted, place, np.int64(1) << columns.astype(np.int64))
        # Items of which the same columns are read: all of a put, as a rule.
        for mask in np.unique(wanted).tolist():
            chosen = np.flatnonzero(wanted == mask)
            for start in range(0, len(chosen), REQUEST):
                part = chosen[start : start + REQUEST]
                rows = self._read(unique[part], [number for number in range(COLUMNS) if mask >> number & 1])
                self._place(rows, np.flatnonzero(np.isin(place, part)), (keys, fields), (items, columns), result)
        return result

    def get_columns(self, fields: Sequence[str], handles: Sequence[Sequence[Handle | None]]) -> dict[str, Any] | None:
        """Returns whole fields, as tensors without a copy, by the handles of each field's rows.

        ``None`` unless all fields were put together and the rows of a field have one type and shape: :meth:`get` reads any, and names what is
        stale.
        """
        if any(None in column for column in handles):
            return None
        found = [np.array(column, np.uint64) for column in handles]
        items, numbers = np.ascontiguousarray(found[0][:, 1]), [int(column[0, 2]) for column in found]
        if any(
            not np.array_equal(column[:, 1], items) or (column[:, 2] != number).any()
            for column, number in zip(found, numbers, strict=True)
        ):
            return None
        try:
            self._check("get", np.unique(found[0][found[0][:, 0] != items, 0]), [])
        except StaleHandleError:
            return None
        read = self._read(items, numbers)
        if not np.array_equal(read["handles"], items) or (read["priorities"] != LIVE).any():
            return None
        description = forms.common_row(*read["parts"]["form"])
        if description is None:
            return None
        by_field = forms.forms_of(description)
        columns = {field: (by_field[field], read["parts"][_column(number)][1]) for field, number in zip(fields, numbers, strict=True)}
        return forms.tensors(columns, len(items))

    def _read(self, items: U64, columns: Sequence[int]) -> dict[str, Any]:
        deadline = self._deadline()
        native = run(self.buffer._existing(deadline))
        names = ["form", *map(_column, columns)]
        read: dict[str, Any] = native.get(items, fields=names, timeout=deadline.left("fields are not read")).wait()
        read["parts"] = {name: (lengths, data) for name, _, _, lengths, data in read["columns"]}
        return read

    @staticmethod
    def _place(
        read: dict[str, Any], numbers: Any, names: tuple[Sequence[str], Sequence[str]], at: tuple[U64, U64], result: list[Any]
    ) -> None:
        """Puts the values of some keys, by their numbers, into their places."""
        (keys, fields), (items, columns) = names, at
        gone = np.isin(items[numbers], _gone(read["missing"], read["handles"], read["priorities"]))
        if gone.any():
            raise StaleHandleError("get", [keys[int(number)] for number in numbers[gone]])
        order = np.argsort(read["handles"])
        rows = order[np.searchsorted(read["handles"], items[numbers], sorter=order)]
        descriptions = [forms.forms_of(row.tobytes()) for row in split_rows(*read["parts"]["form"])]
        for column in np.unique(columns[numbers]).tolist():
            chosen = columns[numbers] == column
            places, lines = numbers[chosen].tolist(), rows[chosen].tolist()
            lengths, data = read["parts"][_column(column)]
            shapes = [descriptions[line][fields[number]] for number, line in zip(places, lines, strict=True)]
            if shapes[0][0] == "torch" and len(lines) == len(lengths) and len(set(shapes)) == 1:
                values = forms.decode_all(shapes[0], len(lengths), data)
                for number, line in zip(places, lines, strict=True):
                    result[number] = values[line]
                continue
            ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).tolist()
            for number, line, form in zip(places, lines, shapes, strict=True):
                result[number] = forms.decode(form, data[ends[line] : ends[line + 1]])

    def clear(self, keys: Sequence[str], handles: Sequence[Handle | None]) -> None:
        """Deletes the samples of handles, whole, or nothing. A key without a handle names a field that was never written."""
        pairs = [(key, handle) for key, handle in zip(keys, handles, strict=True) if handle is not None]
        if not pairs:
            return
        items = np.array([handle[:2] for _, handle in pairs], np.uint64)
        self._check("clear", np.unique(items), [key for key, _ in pairs], items)
        samples = np.unique(items[:, 0])
        self.checkpoints.hide(samples)
        with self._lock:
            self._cleared += len(samples)
            due = self._cleared >= max(SWEEP, self.buffer.stats()["items"] // 2)
            self._cleared = 0 if due else self._cleared
        if due:
            self.sweep()

    def sweep(self) -> int:
        """Deletes items that no handle reaches, and no checkpoint needs; returns their number."""
        swept = self.checkpoints.sweep(list(self._failed))
        self._is_left = False
        return swept

    def live(self, tag: str) -> dict[str, tuple[Handle, forms.Form]]:
        """Returns handle and form of the newest version of each field of the live sample with a tag. Lists all items with the tag."""
        listed = self.buffer.list(tag=tag)
        if not len(listed.index):
            return {}
        owners = owners_of(listed)
        samples = listed.index[(owners == listed.index) & ~np.isin(owners, self.checkpoints.cleared())]
        if not len(samples):
            return {}
        newest = int(samples[-1])
        # An item of a later put is newer than the first item, which may be listed after it: they are in different partitions.
        items = np.concatenate([samples[-1:], listed.index[(owners == newest) & (listed.index != newest)]])
        found: dict[str, tuple[Handle, forms.Form]] = {}
        for item, description in zip(items.tolist(), self.buffer.get(items, fields=["form"])["form"], strict=True):
            for column, (field, form) in enumerate(forms.forms_of(description.tobytes()).items()):
                found[field] = ((newest, item, column), form)
        return found

    def _check(self, operation: str, handles: U64, keys: Sequence[str], named: U64 | None = None) -> None:
        """Raises an error unless all items exist."""
        if not len(handles):
            return
        read = self.buffer.get(np.unique(handles), fields=[])
        gone = _gone(read.missing, read.index, read.priorities)
        if len(gone):
            if named is None:
                raise StaleHandleError(operation, keys)
            rows = np.flatnonzero(np.isin(named, gone).any(axis=1))
            raise StaleHandleError(operation, [keys[int(row)] for row in rows])


def _gone(missing: U64, found: U64, priorities: Any) -> U64:
    """Returns the items that are deleted or hidden."""
    return np.concatenate([missing, found[priorities != LIVE]])


def _column(number: int) -> str:
    return f"c{number}"


def _grouped(fields: Sequence[forms.Values]) -> list[list[forms.Values]]:
    """Returns the fields of each item of a row."""
    groups: list[list[forms.Values]] = []
    size = 0
    for values in fields:
        if not groups or len(groups[-1]) == COLUMNS or size + values.largest > ROW_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(values)
        size += values.largest
    return groups


