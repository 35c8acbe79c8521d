"""Clusters of the tests: real processes of the `engram` program that ENGRAM_BIN names."""

from collections.abc import Iterator

import pytest

import engram


@pytest.fixture(scope="module")
def db() -> Iterator[engram.Database]:
    """A cluster of two workers with features, shared by the tests of a module; each uses ids of its own."""
    with engram.connect(workers=2, config={"features": {"dimension": 4}, "partitions": 8}) as db:
        yield db
