"""Dashboards of the chart, against the types of Grafana's schema."""

import json
from pathlib import Path
from typing import Any

import pytest

DASHBOARDS = Path(__file__).parents[2] / "charts/engram/files/dashboards"
#: A field of query variables that Grafana writes and its types lack.
UNTYPED = "definition"


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """Returns the values that did not survive parsing and encoding."""
    if isinstance(before, dict):
        fields = after if isinstance(after, dict) else {}
        missing = [f"{path}.{name}" for name in before if name not in fields and name != UNTYPED]
        return missing + [it for name in fields if name in before for it in lost(before[name], fields[name], f"{path}.{name}")]
    if isinstance(before, list):
        if not isinstance(after, list) or len(before) != len(after):
            return [path]
        return [it for at, pair in enumerate(zip(before, after, strict=True)) for it in lost(*pair, f"{path}[{at}]")]
    return [] if before == after else [f"{path}: {before!r} became {after!r}"]


@pytest.mark.grafana
@pytest.mark.parametrize("name", ["clusters", "devices", "operator", "runs"])
def test_dashboard_has_only_fields_and_values_of_the_schema(name: str) -> None:
    pytest.importorskip("grafana_foundation_sdk")
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    text = json.loads((DASHBOARDS / f"{name}.json").read_text())

    def after(dashboard: Any) -> Any:
        return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))

    assert lost(text, after(text)) == []
    panel = next(panel for panel in text["panels"] if panel["type"] == "timeseries")
    panel["fieldConfig"]["defaults"]["custom"]["drawStile"] = "line"
    assert [it for it in lost(text, after(text)) if "drawStile" in it], "an unknown field of a panel is found"
