"""Awaitable twins of methods."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


def twin(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Returns the awaitable twin of a method: it runs in a thread of the event loop's pool, without the interpreter lock.

    A cancelled call goes on in the background until its timeout.
    """

    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, self.sync, *args, **kwargs)

    functools.update_wrapper(call, method)
    return call
