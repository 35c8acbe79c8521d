"""Calls that wait, and their awaitable twins: one description of the steps, run by waiting or by an event loop.

A method that is decorated with :func:`calls` is a generator. It yields requests (:class:`engram._engram.Call`) and pauses (seconds), and gets
their results. The blocking method waits for each; its :func:`twin` awaits each, without a thread: the native runtime completes a future of
the event loop, and a cancelled task cancels its request.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from . import _engram
from ._tracing import span, traceparent

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")

#: Steps of a call: requests and pauses in seconds.
Steps: TypeAlias = "Generator[_engram.Call | float, Any, T]"


def run(steps: Steps[T]) -> T:
    """Runs steps, and waits for each."""
    try:
        step = next(steps)
        while True:
            try:
                result = _wait(step)
            except BaseException as failure:
                step = steps.throw(failure)
            else:
                step = steps.send(result)
    except StopIteration as end:
        value: T = end.value
        return value


def _wait(step: _engram.Call | float) -> Any:
    if isinstance(step, _engram.Call):
        return step.wait(traceparent())
    time.sleep(step)
    return None


async def arun(steps: Steps[T]) -> T:
    """Runs steps on the event loop."""
    try:
        step = next(steps)
        while True:
            try:
                result = await (send(step) if isinstance(step, _engram.Call) else asyncio.sleep(step))
            except BaseException as failure:
                step = steps.throw(failure)
            else:
                step = steps.send(result)
    except StopIteration as end:
        value: T = end.value
        return value


def send(call: _engram.Call) -> asyncio.Future[Any]:
    """Sends a request, and returns the future of its result. Cancelling the future cancels the request."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def done(result: Any, failure: BaseException | None) -> None:
        # In a thread of the native runtime. A loop that was closed meanwhile refuses: the call that awaited the future has ended.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, future, result, failure)

    def cancel(future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            call.cancel()

    call.start(done, traceparent())
    future.add_done_callback(cancel)
    return future


def _settle(future: asyncio.Future[Any], result: Any, failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is None:
        future.set_result(result)
    else:
        future.set_exception(failure)


def calls(method: Callable[Concatenate[S, P], Steps[T]]) -> Callable[Concatenate[S, P], T]:
    """Makes a blocking method of one that returns steps."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with span(method.__qualname__):
            return run(method(self, *args, **kwargs))

    call.steps = method  # type: ignore[attr-defined]
    return call


def steps(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], Steps[T]]:
    """Returns the steps of a method that is decorated with :func:`calls`, for ``yield from``."""
    found: Callable[Concatenate[S, P], Steps[T]] = method.steps  # type: ignore[attr-defined]
    return found


def twin(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Returns the awaitable twin of a method that is decorated with :func:`calls`."""
    of = steps(method)

    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with span(method.__qualname__):
            return await arun(of(self.sync, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call


def in_thread(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Returns the awaitable twin of a method that reads or writes files, or waits for processes: it runs in a thread of the event loop's pool.

    A cancelled call goes on in the background.
    """

    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, self.sync, *args, **kwargs)

    functools.update_wrapper(call, method)
    return call
