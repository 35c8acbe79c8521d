"""Clusters of the tests: real processes of the `engram` program that ENGRAM_BIN names."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import engram


@pytest.fixture(scope="module")
def db() -> Iterator[engram.Database]:
    """A cluster of two workers with features, shared by the tests of a module; each uses ids of its own."""
    with engram.connect(workers=2, config={"features": {"dimension": 4}, "partitions": 8}) as db:
        yield db


@pytest.fixture
def stop_process() -> Callable[[int], None]:
    """Sends SIGSTOP and waits until every thread of the process is stopped: on a busy machine some run for milliseconds more."""

    def is_stopped(process_id: int) -> bool:
        try:
            stats = [path.read_text() for path in Path(f"/proc/{process_id}/task").glob("*/stat")]
        except (FileNotFoundError, ProcessLookupError):  # a thread ended meanwhile
            return False
        return all(stat.rsplit(")", 1)[1].split()[0] == "T" for stat in stats)

    def stop(process_id: int) -> None:
        os.kill(process_id, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while not is_stopped(process_id):
            assert time.monotonic() < deadline, f"process {process_id} still runs 10 s after SIGSTOP"
            time.sleep(0.001)

    return stop
