import asyncio
import json
import os
import subprocess
import sys
import urllib.request

import pytest

import engram


def exemplars(db: engram.Database) -> str:
    """Returns the metrics of all workers, with the trace ids of sampled calls."""
    command = [os.environ["ENGRAM_BIN"], "--address", db.status().workers[0].address, "list", "workers", "-o", "json"]
    workers = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["items"]
    pages = []
    for worker in workers:
        request = urllib.request.Request(
            f"http://{worker['http']}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
        )
        with urllib.request.urlopen(request, timeout=10) as page:
            pages.append(page.read().decode())
    return "".join(pages)


@pytest.mark.opentelemetry
def test_calls_are_client_spans_and_parents_of_the_spans_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    # Nothing listens there: workers record spans of sampled calls nevertheless, and show their ids as exemplars.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with engram.connect(workers=1) as db:
        with provider.get_tracer("test").start_as_current_span("program") as program:
            db.insert([1, 2], weights=[0.5, 0.25])
        (call,) = [span for span in exporter.get_finished_spans() if span.name == "engram Database.insert"]
        assert call.kind == trace.SpanKind.CLIENT
        assert call.parent is not None and call.parent.span_id == program.get_span_context().span_id
        trace_id = f"{program.get_span_context().trace_id:032x}"
        assert f'trace_id="{trace_id}"' in exemplars(db)

        async def program_of_asyncio() -> str:
            async with await engram.aio.connect(f"grpc://{db.status().workers[0].address}") as twin:
                with provider.get_tracer("test").start_as_current_span("asyncio") as parent:
                    await twin.insert([3], weights=[0.5])
                return f"{parent.get_span_context().trace_id:032x}"

        assert asyncio.run(program_of_asyncio()) in exemplars(db)


def test_package_does_not_import_opentelemetry() -> None:
    program = "import engram, sys; raise SystemExit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
