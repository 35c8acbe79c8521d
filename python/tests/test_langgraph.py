import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import engram

pytestmark = pytest.mark.langgraph
base = pytest.importorskip("langgraph.store.base", reason="langgraph-checkpoint is not installed")

WORDS = ["tea", "coffee", "milk", "bread"]


def embed(texts: list[str]) -> list[list[float]]:
    """Counts of four words."""
    return [[float(text.count(word)) for word in WORDS] for text in texts]


@pytest.fixture(scope="module")
def db() -> Iterator[engram.Database]:
    with engram.connect(config={"features": {"dimension": 4}, "partitions": 4}) as db:
        yield db


def store(db: engram.Database, group: int, **options: Any) -> Any:
    from engram.langgraph import EngramStore

    index = {"dims": 4, "embed": embed, "fields": ["text"]}
    return EngramStore(db, index=index, group=group, **options)  # type: ignore[arg-type]


def test_items_are_put_read_replaced_and_deleted(db: engram.Database) -> None:
    items = store(db, 1)
    items.put(("users", "ada"), "a", {"text": "tea", "n": 1})
    items.put(("users", "ada"), "b", {"text": "coffee", "n": 2})
    items.put(("users", "bob"), "a", {"text": "milk"})
    first = items.get(("users", "ada"), "a")
    assert (first.value, first.key, first.namespace) == ({"text": "tea", "n": 1}, "a", ("users", "ada"))
    items.put(("users", "ada"), "a", {"text": "bread"})
    second = items.get(("users", "ada"), "a")
    assert second.value == {"text": "bread"}
    assert second.created_at == first.created_at and second.updated_at > first.updated_at
    items.delete(("users", "ada"), "b")
    assert items.get(("users", "ada"), "b") is None and items.get(("users",), "a") is None
    assert items.list_namespaces() == [("users", "ada"), ("users", "bob")]
    assert items.list_namespaces(max_depth=1) == [("users",)]
    assert items.list_namespaces(suffix=("bob",)) == [("users", "bob")]
    assert items.list_namespaces(prefix=("*", "ada")) == [("users", "ada")]
    with pytest.raises(engram.InvalidValueError, match="no JSON"):
        items.put(("users", "ada"), "c", {"text": object()})
    with pytest.raises(NotImplementedError, match="TTL"):
        items.put(("users", "ada"), "c", {"text": "tea"}, ttl=1)


def test_search_orders_by_similarity_and_by_weight(db: engram.Database) -> None:
    items = store(db, 2)
    for number in range(10):
        items.put(("notes", str(number % 2)), f"n{number}", {"text": "tea " * number + "milk", "n": number})
    items.put(("notes", "none"), "unindexed", {"text": "tea"}, index=False)
    found = items.search(("notes",), query="tea tea tea", limit=3)
    assert [item.key for item in found] == ["n9", "n8", "n7"]
    assert found[0].score > found[1].score > found[2].score > 0
    assert [item.key for item in items.search(("notes", "0"), query="tea", limit=2, offset=1)] == ["n6", "n4"]
    assert [item.key for item in items.search(("notes",), query="tea", filter={"n": {"$lt": 5, "$gt": 1}})] == ["n4", "n3", "n2"]
    assert [item.key for item in items.search(("notes", "1"), filter={"n": 3})] == ["n3"]
    with pytest.raises(engram.InvalidValueError, match=r"filter has \['\$in'\]"):
        items.search(("notes",), filter={"n": {"$in": [1]}})
    # What is reinforced outweighs what is a little more similar, and is first without a query.
    items.decay(0.25)
    for _ in range(20):
        items.reinforce(("notes", "0"), "n4")
    assert items.search(("notes",), query="tea", limit=1)[0].key == "n4"
    assert items.search(("notes",), limit=1)[0].key == "n4"
    assert items.forget(below=0.3) == 10
    assert [item.key for item in items.search(("notes",))] == ["n4"]


def test_reading_reinforces_where_asked(db: engram.Database) -> None:
    items = store(db, 3, reinforcement=1.0)
    items.put(("m",), "read", {"text": "tea"})
    items.put(("m",), "unread", {"text": "tea"})
    items.get(("m",), "read")
    ranked = db.rank(group=3)
    assert ranked.keys == ['["m","read"]', '["m","unread"]'] and ranked.weights[0] > ranked.weights[1]


def test_awaitable_calls_and_batches_agree_with_langgraphs_own_store(db: engram.Database) -> None:
    from langgraph.store.memory import InMemoryStore

    ours, theirs = store(db, 4), InMemoryStore(index={"dims": 4, "embed": embed, "fields": ["text"]})
    random = np.random.default_rng(0)

    async def main() -> None:
        await ours.aput(("a",), "x", {"text": "tea"})
        assert (await ours.aget(("a",), "x")).value == {"text": "tea"}
        assert [item.key for item in await ours.asearch(("a",), query="tea")] == ["x"]
        assert await ours.alist_namespaces() == [("a",)]
        await ours.adelete(("a",), "x")
        assert await ours.aget(("a",), "x") is None

    asyncio.run(main())
    for number in range(60):
        words = random.integers(0, 5, 4)
        op = base.PutOp(
            namespace=("s", str(number % 3)),
            key=str(number % 40),
            value={"text": " ".join(word for word, count in zip(WORDS, words, strict=True) for _ in range(count)) or "tea", "n": number},
        )
        assert ours.batch([op]) == theirs.batch([op])
    reads = [base.GetOp(("s", str(n % 3)), str(n)) for n in range(45)]
    for mine, its in zip(ours.batch(reads), theirs.batch(reads), strict=True):
        assert (mine and mine.value) == (its and its.value)
    for query in (None, "tea milk", "bread"):
        search = base.SearchOp(("s",), limit=1000, query=query, filter={"n": {"$gte": 10}})
        (mine,), (its,) = ours.batch([search]), theirs.batch([search])
        assert {(item.namespace, item.key) for item in mine} == {(item.namespace, item.key) for item in its}
        if query:
            # All weights are equal here: theirs is the cosine.
            weight = db.rank(group=4, limit=1).weights[0]
            scores = {(item.namespace, item.key): item.score for item in its}
            assert all(item.score == pytest.approx(weight * scores[item.namespace, item.key], abs=1e-3) for item in mine)
