"""LangGraph: a ``BaseStore`` over recall and decay. Needs ``langgraph`` (or ``langgraph-checkpoint``, which has the interface).

>>> import engram
>>> from engram.langgraph import EngramStore
>>> with engram.connect() as db:
...     store = EngramStore(db)
...     store.put(("users", "ada"), "tea", {"text": "likes green tea"})
...     store.get(("users", "ada"), "tea").value, store.list_namespaces()
({'text': 'likes green tea'}, [('users', 'ada')])

An item is a memory: its weight decays with :meth:`EngramStore.decay` and grows with :meth:`EngramStore.reinforce`. A search with a query
orders by similarity times weight; without one by weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, cast

import numpy as np
from langgraph.store.base import (
    BaseStore,
    GetOp,
    IndexConfig,
    Item,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    ensure_embeddings,
    get_text_at_path,
    tokenize_path,
)

from ._aio import Steps, arun, calls, run, steps
from ._arrays import F32
from ._database import Database, group_number
from ._errors import invalid
from ._results import Memories, WriteResult

#: Most memories that a recall returns.
RECALLED = 4096
#: Items whose values are read at a time.
READ = 256

Namespace = tuple[str, ...]


class EngramStore(BaseStore):
    """A LangGraph store whose items are memories of a group of a cluster.

    ``index`` is LangGraph's: ``embed`` (a function or an object with embeddings), ``dims`` (the cluster's ``features.dimension``), and
    ``fields``. An item has one vector: that of the texts of its fields, one per line. A search considers the 4,096 most similar memories. ``reinforcement`` is the quality with which items that
    ``get`` and ``search`` return are reinforced; 0 leaves them as they are. Values are JSON of at most 64 KiB. A time to live is not supported: items decay.
    """

    supports_ttl = False

    def __init__(
        self, db: Database, *, index: IndexConfig | None = None, group: int = 0, reinforcement: float = 0.0
    ) -> None:
        if not 0.0 <= reinforcement <= 1.0:
            raise invalid(f"reinforcement is {reinforcement}; allowed: 0 to 1")
        self.db, self.reinforcement = db, reinforcement
        self._group = cast(int, group_number(group))
        self._embeddings = None if index is None else ensure_embeddings(index["embed"])
        self._fields = [] if index is None else list(index.get("fields") or ["$"])
        self._dimension = 0 if index is None else db.status().dimension
        if index is not None and index["dims"] != self._dimension:
            raise invalid(f"index.dims is {index['dims']}; required: {self._dimension}, the cluster's features.dimension")

    # The interface of LangGraph: get, put, search, delete and list_namespaces are calls of these.

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Runs operations: first what reads, then what writes; of several writes of an item the last."""
        ops = list(ops)
        texts = self._texts(ops)
        vectors = self._embeddings.embed_documents(texts) if self._embeddings is not None and texts else []
        return run(self._run(ops, dict(zip(texts, vectors, strict=True))))

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """Runs operations on the event loop."""
        ops = list(ops)
        texts = self._texts(ops)
        vectors = await self._embeddings.aembed_documents(texts) if self._embeddings is not None and texts else []
        return await arun(self._run(ops, dict(zip(texts, vectors, strict=True))))

    # Recall and decay

    @calls
    def decay(self, amount: float) -> Steps[WriteResult]:
        """Decays every memory of the cluster by ``amount`` in [0, 1]."""
        return (yield from steps(Database.decay)(self.db, amount))

    @calls
    def reinforce(self, namespace: Namespace, key: str, quality: float = 1.0) -> Steps[WriteResult]:
        """Reinforces an item by a quality in [0, 1]."""
        return (yield from steps(Database.reinforce)(self.db, [_name(namespace, key)], [quality]))

    @calls
    def forget(self, below: float = 0.0) -> Steps[int]:
        """Deletes the items whose weight is at most ``below``; returns their number."""
        found = yield from steps(Database.rank)(self.db, 0, group=self._group)
        ids = found.ids[found.weights <= below]
        if len(ids):
            yield from steps(Database.remove)(self.db, ids)
        return len(ids)

    # Steps

    def _texts(self, ops: Sequence[Op]) -> list[str]:
        """Returns what is to be embedded, each text once."""
        if self._embeddings is None:
            return []
        texts = [self._text(op) for op in ops if isinstance(op, PutOp)]
        texts += [op.query for op in ops if isinstance(op, SearchOp)]
        return list(dict.fromkeys(text for text in texts if text))

    def _text(self, op: PutOp) -> str | None:
        """Returns the text of an item that its vector is of; ``None`` without one."""
        if self._embeddings is None or op.value is None or op.index is False:
            return None
        fields = self._fields if op.index is None else op.index
        paths = ("$" if field == "$" else tokenize_path(field) for field in fields)
        lines = [text for path in paths for text in get_text_at_path(op.value, path)]
        return "\n".join(lines) or None

    def _run(self, ops: Sequence[Op], vectors: Mapping[str, Sequence[float]]) -> Steps[list[Result]]:
        results: list[Result] = [None] * len(ops)
        gets = [number for number, op in enumerate(ops) if isinstance(op, GetOp)]
        items = yield from self._read([_name(ops[number].namespace, ops[number].key) for number in gets])  # type: ignore[union-attr]
        returned = [item for item in items if item is not None]
        for number, item in zip(gets, items, strict=True):
            results[number] = item
        for number, op in enumerate(ops):
            if isinstance(op, SearchOp):
                found = yield from self._search(op, vectors.get(op.query or ""))
                results[number] = found
                returned += found
            elif isinstance(op, ListNamespacesOp):
                results[number] = yield from self._list(op)
        if self.reinforcement and returned:
            names = list(dict.fromkeys(_name(item.namespace, item.key) for item in returned))
            yield from steps(Database.reinforce)(self.db, names, self.reinforcement)
        yield from self._write({_name(op.namespace, op.key): op for op in ops if isinstance(op, PutOp)}, vectors)
        return results

    def _read(self, names: list[str]) -> Steps[list[Item | None]]:
        if not names:
            return []
        unique = list(dict.fromkeys(names))
        found: Memories = yield from steps(Database.get)(self.db, unique, payloads=True)
        payloads = zip(found.keys, found.payloads or [], strict=True)
        items = {name: _item(name, payload) for name, payload in payloads if name is not None}
        return [items.get(name) for name in names]

    def _search(self, op: SearchOp, vector: Sequence[float] | None) -> Steps[list[SearchItem]]:
        wanted, found = op.offset + op.limit, list[SearchItem]()
        candidates: list[tuple[str, float | None]]
        if vector is None:
            ranked = yield from steps(Database.rank)(self.db, 0, group=self._group)
            candidates = [(name, None) for name in ranked.keys if name is not None]
        else:
            similar = yield from steps(Database.recall)(self.db, np.asarray(vector, np.float32), RECALLED, group=self._group)
            assert similar.scores is not None, "a recall has scores"
            pairs = zip(similar.keys, similar.scores.tolist(), strict=True)
            candidates = [(name, score) for name, score in pairs if name is not None]
        prefix = tuple(op.namespace_prefix)
        candidates = [pair for pair in candidates if _parts(pair[0])[:-1][: len(prefix)] == prefix]
        for start in range(0, len(candidates), READ):
            part = candidates[start : start + READ]
            items = yield from self._read([name for name, _ in part])
            for item, (_, score) in zip(items, part, strict=True):
                if item is not None and _matches(item.value, op.filter or {}):
                    found.append(SearchItem(item.namespace, item.key, item.value, item.created_at, item.updated_at, score))
            if len(found) >= wanted:
                break
        return found[op.offset : wanted]

    def _list(self, op: ListNamespacesOp) -> Steps[list[Namespace]]:
        ranked = yield from steps(Database.rank)(self.db, 0, group=self._group)
        namespaces = {_parts(name)[:-1] for name in ranked.keys if name is not None}
        kept = (space for space in namespaces if all(_fits(match, space) for match in op.match_conditions or ()))
        cut = {space if op.max_depth is None else space[: op.max_depth] for space in kept}
        return sorted(cut)[op.offset : op.offset + op.limit]

    def _write(self, puts: Mapping[str, PutOp], vectors: Mapping[str, Sequence[float]]) -> Steps[None]:
        deleted = [name for name, op in puts.items() if op.value is None]
        kept = {name: op for name, op in puts.items() if op.value is not None}
        payloads = [_payload(op) for op in kept.values()]
        if deleted:
            yield from steps(Database.remove)(self.db, deleted)
        if not kept:
            return
        existing = yield from self._read(list(kept))
        stamped = [
            json.dumps({**payload, "created": item.created_at.isoformat() if item else payload["updated"]}).encode()
            for payload, item in zip(payloads, existing, strict=True)
        ]
        features = None
        if self._embeddings is not None:
            features = self._vectors([self._text(op) for op in kept.values()], vectors)
        insert = steps(Database.insert)
        yield from insert(self.db, list(kept), groups=self._group, features=features, payloads=stamped)

    def _vectors(self, texts: list[str | None], vectors: Mapping[str, Sequence[float]]) -> F32:
        """Returns a vector per item; without a text it is zero, which is similar to nothing."""
        zero = np.zeros(self._dimension, np.float32)
        return np.array([zero if text is None else vectors[text] for text in texts], np.float32)


def _name(namespace: Sequence[str], key: str) -> str:
    """Returns the key of an item's memory."""
    return json.dumps([*namespace, key], separators=(",", ":"), ensure_ascii=False)


def _parts(name: str) -> tuple[str, ...]:
    """Returns namespace and key of a memory; of one that is no item, its name."""
    try:
        parts = json.loads(name)
    except ValueError:
        return (name,)
    return tuple(parts) if isinstance(parts, list) else (name,)


def _payload(op: PutOp) -> dict[str, Any]:
    try:
        json.dumps(op.value)
    except (TypeError, ValueError) as error:
        raise invalid(f"value of {op.key!r} in {op.namespace} is no JSON: {error}") from error
    return {"value": op.value, "updated": datetime.now(timezone.utc).isoformat()}


def _item(name: str, payload: bytes) -> Item | None:
    try:
        fields = json.loads(payload)
        created, updated = datetime.fromisoformat(fields["created"]), datetime.fromisoformat(fields["updated"])
    except (ValueError, KeyError, TypeError):
        # A memory of the group that is no item.
        return None
    *namespace, key = _parts(name)
    return Item(value=fields["value"], key=key, namespace=tuple(namespace), created_at=created, updated_at=updated)


def _fits(match: MatchCondition, namespace: Namespace) -> bool:
    path = tuple(match.path)
    if len(namespace) < len(path):
        return False
    part = namespace[: len(path)] if match.match_type == "prefix" else namespace[len(namespace) - len(path) :]
    return all(wanted in ("*", found) for wanted, found in zip(path, part, strict=True))


#: Comparisons of a filter.
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": lambda value, other: bool(value == other),
    "$ne": lambda value, other: bool(value != other),
    "$gt": lambda value, other: float(value) > float(other),
    "$gte": lambda value, other: float(value) >= float(other),
    "$lt": lambda value, other: float(value) < float(other),
    "$lte": lambda value, other: float(value) <= float(other),
}


def _matches(value: Any, wanted: Any) -> bool:
    """Whether a value fits a filter: equal, or as operators such as ``{"$gt": 1}`` say, at every level."""
    if not isinstance(wanted, Mapping):
        return bool(value == wanted)
    if any(name.startswith("$") for name in wanted):
        unknown = sorted(set(wanted) - set(_OPERATORS))
        if unknown:
            raise invalid(f"filter has {unknown}; allowed: {', '.join(_OPERATORS)}")
        return value is not None and all(_OPERATORS[name](value, other) for name, other in wanted.items())
    return isinstance(value, Mapping) and all(_matches(value.get(name), other) for name, other in wanted.items())
