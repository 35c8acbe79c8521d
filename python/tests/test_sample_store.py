"""Samples of TransferQueue in a buffer, without TransferQueue."""

from collections.abc import Iterator
from typing import Any

import pytest

import engram

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def db() -> Iterator[engram.Database]:
    with engram.connect(config={"partitions": 8}) as db:
        yield db


def create(db: engram.Database, name: str) -> Any:
    from engram._tq_store import SampleStore

    return SampleStore(db, name, 20_000, 30.0)


def put(store: Any, fields: list[str], rows: int, start: int = 0) -> list[list[Any]]:
    import torch

    from engram import _tq_values as forms

    values = [forms.encode(field, torch.arange(start, start + rows)) for field in fields]
    handles: list[list[Any]] = store.put(values, [f"part@{row}" for row in range(rows)], [None] * rows)
    return handles


def read(store: Any, column: list[Any], field: str = "a") -> list[int]:
    return [int(value) for value in store.get(["0@a"] * len(column), [field] * len(column), column)]


def test_samples_survive_every_decay(db: engram.Database) -> None:
    from engram._tq_store import StaleHandleError

    store = create(db, "decay")
    (column,) = put(store, ["a"], 20)
    (other,) = put(store, ["a"], 1, start=20)
    db.decay(0.25)
    assert read(store, column) == list(range(20))
    for _ in range(5):
        db.decay(0.5)
    assert store.sweep() == 0 and read(store, column) == list(range(20))
    assert store.get_columns(["a"], [column]) is not None
    store.clear(["20@a"], other)
    with pytest.raises(StaleHandleError):
        read(store, other)
    assert store.sweep() == 1 and read(store, column) == list(range(20))


def test_cleared_samples_are_found_and_restored_after_every_decay(db: engram.Database) -> None:
    from engram._tq_store import StaleHandleError

    store = create(db, "decayed-checkpoints")
    (column,) = put(store, ["a"], 4)
    first = store.checkpoints.save()
    store.clear(["0@a"], column[:1])
    for _ in range(3):
        db.decay(0.5)
    # Its mark is renewed from the record of the clear.
    assert store.sweep() == 0
    with pytest.raises(StaleHandleError):
        read(store, column[:1])
    assert set(store.live("part@1")) == {"a"} and not store.live("part@0")
    assert store.checkpoints.restore(first) and read(store, column) == [0, 1, 2, 3]
    store.clear(["0@a"], column[:1])
    for _ in range(3):
        db.decay(0.5)
    store.checkpoints.save()
    store.clear(["1@a"], column[1:2])
    for _ in range(3):
        db.decay(0.5)
    store.checkpoints.save()
    # Left are two samples, and the one that the previous checkpoint needs.
    assert len(store.buffer) == 3 and read(store, column[2:]) == [2, 3]


def test_checkpoints_are_ordered_in_a_buffer_of_many_partitions(db: engram.Database) -> None:
    store = create(db, "ordered")
    (column,) = put(store, ["a"], 10)
    numbers = []
    for row in range(8):
        store.clear([f"{row}@a"], column[row : row + 1])
        numbers.append(store.checkpoints.save())
    assert [store.checkpoints.restore(number) for number in numbers[:6]] == [False] * 6
    assert store.checkpoints.restore(numbers[6]) and read(store, column[7:]) == [7, 8, 9]
    with pytest.raises(LookupError):
        read(store, column[5:6])


@pytest.mark.parametrize("failure", ["Timeout", "InvalidValue"])
def test_put_that_fails_in_a_later_part_leaves_no_items(db: engram.Database, monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    from engram import _tq_store

    store = create(db, f"failed-{failure}")
    (kept,) = put(store, ["a"], 3)
    fields = [f"f{number:02}" for number in range(9)]
    append, calls = _tq_store.SampleStore._append, []

    def failing(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            if failure == "Timeout":
                # Stored, but the answer is lost.
                append(self, *arguments[:-1], [])
            raise engram._errors.create(failure, "no answer")
        return append(self, *arguments)

    monkeypatch.setattr(_tq_store.SampleStore, "_append", failing)
    with pytest.raises(engram.EngramError, match="no answer"):
        put(store, fields, 5)
    monkeypatch.undo()
    assert len(store.buffer) == (13 if failure == "Timeout" else 3)
    (later,) = put(store, ["a"], 2, start=50)
    assert len(store.buffer) == 5 and read(store, kept) == [0, 1, 2] and read(store, later) == [50, 51]


def test_many_rows_and_fields_come_back(db: engram.Database) -> None:
    store = create(db, "many")
    fields = [f"f{number:02}" for number in range(9)]
    columns = put(store, fields, 5_000)
    assert len(store.buffer) == 10_000
    for field, column in ((fields[0], columns[0]), (fields[8], columns[8])):
        assert read(store, column[4_990:], field) == list(range(4_990, 5_000))
    assert store.sweep() == 0
    # So many that they are swept at once, with the items that the clear did not name.
    store.clear(["k"] * 5_000, columns[0])
    assert len(store.buffer) == 0 and len(store.checkpoints.cleared()) == 0
