"""The default process group of ``torch.distributed`` over processes that may fail and join: ``engram.torch.ElasticProcessGroup``."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from . import _engram
from ._database import Database, connect
from ._errors import create, invalid

#: Most members; process groups have a table of ranks of this size.
_MEMBERS = 64
#: Numbers of a message of a member, each of two bytes; the first three are its presence, the generation and the length.
_NUMBERS, _HEAD = 512, 3
_BYTES = 2 * (_NUMBERS - _HEAD)
_KEY = 1


# Experimental names, and one that the types of PyTorch do not export and some builds do not have.
_dist: Any = dist
_BaseStore: Any = getattr(dist, "Store", object)


class _MembershipChangedError(RuntimeError):
    """The members differ from those that began to connect."""


class ElasticProcessGroup:
    """Keeps the default process group of ``torch.distributed`` (gloo) equal to the living members of an elastic group.

    The membership is a replicated record of the cluster at ``address``; the processes exchange their addresses over it, so that no process holds a store
    that the others need. Collectives are those of PyTorch, and run over the members of the last :meth:`sync`::

        with ElasticProcessGroup("grpc://worker-0:7443", "demo") as members:
            failed = False
            while step < 1000:
                if members.sync(failed):
                    dist.broadcast(state, members.root)       # to processes that are new or missed a step
                try:
                    dist.all_reduce(gradient)
                    failed = False
                except RuntimeError:                          # a member died within it
                    failed = True

    ``collective_timeout`` is the longest time of a collective: gloo waits for a member that has seen a failure before as for one that computes.
    A collective that fails may have ended on some members: what it computed is lost, unlike with :class:`engram.torch.Group`. Needs a PyTorch with
    ``torch.distributed._reconfigure`` (2.15), which is experimental there.
    """

    def __init__(
        self,
        address: Any,
        name: str,
        *,
        timeout: float = 0.5,
        min_members: int = 1,
        join_timeout: float = 60.0,
        collective_timeout: float = 10.0,
        bind: str | None = None,
        tls: Mapping[str, str | os.PathLike[str]] | None = None,
        token: str | os.PathLike[str] | None = None,
    ) -> None:
        if not hasattr(dist, "_reconfigure"):
            raise create("Config", f"torch {torch.__version__} has no torch.distributed._reconfigure; required: PyTorch 2.15, or engram.torch.Group")
        if dist.is_initialized():
            raise create("Conflict", "the default process group exists; ElasticProcessGroup creates it: call dist.destroy_process_group() before")
        if not isinstance(name, str) or not 0 < len(name) <= 128:
            raise invalid(f"name is {name!r}; allowed: 1 to 128 characters")
        if not 0.1 <= collective_timeout <= join_timeout:
            raise invalid(f"collective_timeout is {collective_timeout}; allowed: 0.1 to join_timeout ({join_timeout}) seconds")
        self.name, self.timeout, self.join_timeout = name, timeout, join_timeout
        self._limit = timedelta(seconds=collective_timeout)
        self._owns_database = not isinstance(address, Database)
        self._database = connect(address, tls=tls, token=token) if self._owns_database else address
        self._applied, self._generation, self._root = 0, 0, 0
        self._id: int | None = None
        self._store = _Store(self)
        self._sums, self._reduced = torch.zeros(_MEMBERS * _NUMBERS), torch.empty(_MEMBERS * _NUMBERS)
        self._native = _engram.Group(
            self._database._native,
            name,
            lambda: (self._applied, b""),
            layout=_MEMBERS * _NUMBERS,
            digest=0,
            timeout=timeout,
            wait_limit=join_timeout,
            min_members=min_members,
            address=bind,
        )
        self._wait_member()

    @property
    def generation(self) -> int:
        """Number of the membership that the process group has; 0 before the first :meth:`sync`."""
        return self._generation

    @property
    def root(self) -> int:
        """Rank of a process that was a member before the last change, whose state is the one to broadcast."""
        return self._root

    def sync(self, failed: bool = False) -> bool:
        """Makes the process group that of the living members, and returns whether it changed. All members call it, between the same collectives.

        ``failed`` says that a collective failed on this process: all members connect again.
        """
        has_changed, is_failed = False, failed
        end = time.monotonic() + self.join_timeout
        cause: RuntimeError | None = None
        while True:
            generation, step, views = self._round({"phase": "view", "id": self._id, "generation": self._generation, "failed": is_failed})
            is_common = all(view["phase"] == "view" for view in views)
            if is_common and all(view["generation"] == generation and not view["failed"] for view in views):
                return has_changed
            if time.monotonic() > end:
                why = cause or "its members kept changing or connecting again"
                raise create("Timeout", f"group {self.name} did not connect within join_timeout={self.join_timeout} s: {why}", "ENG-0601") from cause
            if is_common:
                has_changed = True
                try:
                    self._connect(generation, step, views)
                    is_failed = False
                except RuntimeError as error:
                    is_failed, cause = True, error

    def close(self) -> None:
        """Leaves the group, and destroys the process group."""
        if self._id is not None and dist.is_initialized():
            dist.destroy_process_group()
        self._id = None
        self._native.leave(max(2.0, 8 * self.timeout))
        if self._owns_database:
            self._database.close()

    def __enter__(self) -> ElasticProcessGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # Internals

    def _connect(self, generation: int, step: int, views: list[dict[str, Any]]) -> None:
        """Connects the members of a generation. The step is unique: it names this attempt."""
        rank = self._native.view()[1]
        self._root = next((at for at, view in enumerate(views) if view["generation"]), 0)
        if self._id is None:
            used = {view["id"] for view in views}
            free = [number for number in range(_MEMBERS) if number not in used]
            self._id = free[sum(view["id"] is None for view in views[:rank])]
            dist.init_process_group("gloo", store=self._store, rank=self._id, world_size=_MEMBERS, timeout=self._limit, enable_reconfigure=True)
        answers = self._exchange(generation, {"phase": "handle", "handle": _dist._get_reconfigure_handle()})
        handles = [answer["handle"] for answer in answers]
        self._store.begin(generation)
        _dist._reconfigure(uuid=step, handles=handles, timeout=self._limit).wait()
        self._generation = generation

    def _exchange(self, generation: int, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchanges messages of one phase between the members of one generation."""
        answered, _, answers = self._round(message)
        if answered != generation or any(answer["phase"] != message["phase"] for answer in answers):
            raise _MembershipChangedError(f"the members of group {self.name} changed while they connected")
        return answers

    def _round(self, message: dict[str, Any]) -> tuple[int, int, list[dict[str, Any]]]:
        """Sends a message to all members. Returns generation, step, and the messages in rank order: the same on all members."""
        text = json.dumps(message).encode()
        if len(text) > _BYTES:
            raise invalid(f"a message of {len(text)} bytes between members; allowed: {_BYTES}")
        while True:
            generation, rank, size, _, _ = self._native.view()
            if size > _MEMBERS:
                raise invalid(f"group {self.name} has {size} members; allowed: {_MEMBERS}")
            self._sums.zero_()
            numbers = torch.frombuffer(bytearray(text + b"\0" * (len(text) % 2)), dtype=torch.uint8).view(torch.uint16)
            place = self._sums[rank * _NUMBERS : (rank + 1) * _NUMBERS]
            place[:_HEAD] = torch.tensor([1.0, generation % 2**16, len(text)])
            place[_HEAD : _HEAD + len(numbers)] = numbers.float()
            self._native.submit(_KEY, self._sums.data_ptr(), self._reduced.data_ptr(), self._sums.numel(), (self._sums, self._reduced))
            self._native.finish(1, 0, [])
            outcome, step, generation, size, total = self._native.wait_step()
            if outcome == "superseded":
                self._wait_member()
                continue
            self._applied = step
            answers = _messages((self._reduced * total).round(), generation, size)
            if answers is not None:
                return generation, step, answers

    def _wait_member(self) -> None:
        end = time.monotonic() + self.join_timeout
        while True:
            kind, step, digest, why = self._native.wait_ready(0.1)
            if kind == "ready":
                return
            if kind == "install":
                self._applied = step
                self._native.installed(step, digest)
            elif time.monotonic() > end:
                raise create("Timeout", f"not a member of group {self.name} within join_timeout={self.join_timeout} s: {why}", "ENG-0601")


def _messages(sums: torch.Tensor, generation: int, size: int) -> list[dict[str, Any]] | None:
    """Returns the messages in rank order; ``None`` if a member wrote to the place of another generation."""
    places = sums.view(_MEMBERS, _NUMBERS)
    present, generations = places[:, 0], places[:size, 1]
    if not bool((present[:size] == 1).all() and (present[size:] == 0).all() and (generations == generation % 2**16).all()):
        return None
    messages = []
    for place in places[:size]:
        content = place[_HEAD:].to(torch.int32).to(torch.uint16).view(torch.uint8).numpy().tobytes()
        messages.append(json.loads(content[: int(place[2])]))
    return messages


class _Store(_BaseStore):
    """The addresses that the members of a process group exchange while they connect: each sets one key, then all read those of the others."""

    def __init__(self, group: ElasticProcessGroup) -> None:
        super().__init__()
        self._group, self._generation = group, 0
        self._values: dict[str, bytes] = {}

    def begin(self, generation: int) -> None:
        self._generation = generation
        self._values.clear()

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value if isinstance(value, bytes) else str(value).encode()

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        # The first member claims the number of an attempt, which no other group has.
        return bytes(desired)

    def get(self, key: str) -> bytes:
        if key not in self._values:
            own = {name: base64.b64encode(value).decode() for name, value in self._values.items()}
            for answer in self._group._exchange(self._generation, {"phase": "address", "values": own}):
                self._values.update((name, base64.b64decode(value)) for name, value in answer["values"].items())
        if key not in self._values:
            raise _MembershipChangedError(f"no member has set {key}")
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def clone(self) -> _Store:
        return self
