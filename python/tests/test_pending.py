"""Single items that are collected, without a cluster."""

import time
from typing import Any

import numpy as np
import pytest

import engram
from engram import _pending
from engram._deadline import Deadline
from engram._errors import create, invalid
from engram._pending import Pending


class Store:
    """Stores items; raises failures first, and refuses negative values."""

    def __init__(self, *failures: Exception) -> None:
        self.failures, self.rows = list(failures), list[float]()

    def extend(self, data: Any, priority: Any = None, /, *, version: Any, trajectory: Any, tag: Any, timeout: float | None) -> None:
        if self.failures:
            raise self.failures.pop(0)
        values = [float(value) for value in data["x"]]
        if min(values) < 0:
            raise invalid("x is negative")
        self.rows += values


def add(pending: Pending, value: float) -> None:
    pending.add({"x": np.asarray(value)}, None, 0, 0, "", None)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread sends nothing while a test runs."""
    monkeypatch.setattr(_pending, "GROUPING_SECONDS", 3600.0)


def test_items_of_a_failed_send_stay_and_are_sent_by_the_next(by_hand: None) -> None:
    store = Store(create("Timeout", "too late"), create("Unavailable", "gone"))
    pending = Pending(store)
    for value in range(5):
        add(pending, value)
    with pytest.raises(engram.TimeoutError, match="too late"):
        pending.flush(Deadline(10.0))
    add(pending, 5)
    with pytest.raises(engram.UnavailableError, match="gone"):
        pending.close()
    pending.close()
    assert store.rows == [0, 1, 2, 3, 4, 5]


def test_deadline_that_passed_loses_no_items(by_hand: None) -> None:
    store = Store()
    pending = Pending(store)
    add(pending, 1)
    with pytest.raises(engram.TimeoutError):
        pending.flush(Deadline(1e-9))
    pending.flush(Deadline(None))
    assert store.rows == [1]


def test_failure_of_the_thread_is_raised_once_and_its_items_are_sent_again() -> None:
    store = Store(create("Unavailable", "gone"))
    pending = Pending(store)
    add(pending, 1)
    deadline = time.monotonic() + 30
    while pending._failure is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    with pytest.raises(engram.UnavailableError, match="gone"):
        add(pending, 2)
    pending.close()
    assert store.rows == [1], "the call that raised took no item"


def test_only_items_that_are_refused_are_dropped(by_hand: None) -> None:
    store = Store()
    pending = Pending(store)
    for value in (1, -1, 2, 3, -4):
        add(pending, value)
    with pytest.raises(engram.InvalidValueError, match="2 items of add are refused and dropped: x is negative"):
        pending.flush(Deadline(None))
    assert store.rows == [1, 2, 3]
    pending.flush(Deadline(None))


def test_item_unlike_the_first_is_refused(by_hand: None) -> None:
    store = Store()
    pending = Pending(store)
    add(pending, 1.5)
    for fields in ({"x": np.zeros(2)}, {"y": np.asarray(1.0)}, {"x": np.asarray(1.0), "y": np.asarray(1.0)}, {"x": np.asarray(1j)}):
        with pytest.raises(engram.InvalidValueError, match="first item"):
            pending.add(fields, None, 0, 0, "", None)
    with pytest.raises(engram.InvalidValueError, match="priority"):
        pending.add({"x": np.asarray(1.0)}, -1.0, 0, 0, "", None)
    add(pending, 2)
    pending.close()
    assert store.rows == [1.5, 2]
