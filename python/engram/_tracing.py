"""Spans of OpenTelemetry, in programs that use it.

A call is a client span ``engram CLASS.METHOD``, the parent of the spans of the workers. A program that has not imported ``opentelemetry`` pays
nothing, and this package does not import it.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def span(name: str) -> AbstractContextManager[Any]:
    """Returns the span of a call, to be entered."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return nullcontext()
    found: AbstractContextManager[Any] = trace.get_tracer("engram").start_as_current_span(
        f"engram {name}", kind=trace.SpanKind.CLIENT
    )
    return found


def traceparent() -> str | None:
    """Returns the W3C trace context of the current span; ``None`` without one."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags) & 1:02x}"
