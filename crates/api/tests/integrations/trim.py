"""Reduces published definitions to the names and types that an example of `examples/kubernetes` can use.

python3 trim.py SOURCE LICENCE VERSION EXAMPLE DEFINITION... > NAME.json

SOURCE and LICENCE are noted in the result. EXAMPLE is a manifest, DEFINITION a CustomResourceDefinition; needs PyYAML. Descriptions, defaults and
rules are left out, and what lies below fields that the example does not use: such a field is marked as trimmed.
"""

import json
import sys

import yaml

KEPT = ("type", "enum", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields")


def trim(schema: dict, values: list) -> dict:
    """Returns a schema for values of the examples."""
    values = [value for value in values if value is not None]
    out = {key: schema[key] for key in KEPT if key in schema}
    if not values:
        return out | {"trimmed": True} if "properties" in schema or "items" in schema else out
    if "required" in schema:
        out["required"] = schema["required"]
    if "properties" in schema:
        objects = [value for value in values if isinstance(value, dict)]
        out["properties"] = {name: trim(of, [value.get(name) for value in objects]) for name, of in schema["properties"].items()}
    if "items" in schema:
        out["items"] = trim(schema["items"], [item for value in values if isinstance(value, list) for item in value])
    if isinstance(schema.get("additionalProperties"), dict):
        items = [item for value in values if isinstance(value, dict) for item in value.values()]
        out["additionalProperties"] = trim(schema["additionalProperties"], items)
    return out


def main(source: str, licence: str, version: str, example: str, *definitions: str) -> None:
    """Prints the trimmed definitions."""
    with open(example) as file:
        objects = list(yaml.safe_load_all(file))
    kinds = {}
    for path in definitions:
        with open(path) as file:
            spec = yaml.safe_load(file)["spec"]
        api, kind = f"{spec['group']}/{version}", spec["names"]["kind"]
        found = [it for it in objects if (it["apiVersion"], it["kind"]) == (api, kind)]
        schema = next(it for it in spec["versions"] if it["name"] == version)["schema"]["openAPIV3Schema"]
        kinds[f"{api} {kind}"] = trim(schema, found)
    print(json.dumps({"source": source, "licence": licence, "kinds": kinds}, indent=1, sort_keys=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
