"""The API's reference as one HTML page, made from its OpenAPI description without any script."""

from __future__ import annotations

import json
from html import escape
from typing import Any

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>factpatch API</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,"><style>
:root{{color-scheme:light dark}}
body{{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}}
section{{border-top:1px solid #8886;padding:.5rem 0}}code,pre{{font:14px ui-monospace,monospace}}
pre{{background:#8882;padding:.7rem;border-radius:6px;overflow-x:auto}}
table{{border-collapse:collapse;font-size:15px}}td{{padding:.15rem .8rem .15rem 0;vertical-align:top}}
b.method{{display:inline-block;min-width:4.5rem}}</style></head><body>
<h1>{title} {version}</h1><p>{description} Machine-readable: <a href="/openapi.json">openapi.json</a>.</p>
{operations}</body></html>"""


def reference_page(description: dict[str, Any]) -> str:
    """Lists every operation with what it takes and returns."""
    operations = [
        _operation(path, method, operation, description["components"]["schemas"])
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    ]
    about = description["info"]
    texts = {key: escape(about[key]) for key in ("title", "version", "description")}
    return PAGE.format(operations="\n".join(operations), **texts)


def _operation(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    rows = [(one["name"], one["schema"], one.get("description", "")) for one in operation.get("parameters", [])]
    body = _schema(operation.get("requestBody", {}), schemas)
    answer = _schema(operation["responses"]["200"], schemas)
    parts = [
        f'<section><h2><b class="method">{method.upper()}</b> <code>{escape(path)}</code></h2>',
        f"<p>{escape(operation.get('description', ''))}</p>",
        _table("Takes", rows + _fields(body)),
        _table("Returns", _fields(answer)) if answer else "<p>Returns a file.</p>",
        f"<pre>{escape(_example(path, method, body))}</pre></section>",
    ]
    return "\n".join(parts)


def _schema(part: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of the JSON object in a request or a response. It is empty if there is none."""
    found = part.get("content", {}).get("application/json", {}).get("schema")
    return schemas[_name(found)] if found else {}


def _name(reference: dict[str, str]) -> str:
    return reference["$ref"].rsplit("/", 1)[-1]


def _fields(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    return [(name, field, field.get("description", "")) for name, field in schema.get("properties", {}).items()]


def _table(title: str, rows: list[tuple[str, dict[str, Any], str]]) -> str:
    if not rows:
        return ""
    cells = (
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_kind(field))}</td><td>{escape(text)}</td></tr>"
        for name, field, text in rows
    )
    return f"<h3>{title}</h3><table>{''.join(cells)}</table>"


def _kind(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(map(_kind, field["anyOf"]))
    if "$ref" in field:
        return _name(field)
    if field.get("type") == "array":
        return f"list of {_kind(field['items'])}"
    limit = f", at most {field['maxLength']} characters" if "maxLength" in field else ""
    default = f", default {json.dumps(field['default'])}" if "default" in field else ""
    return f"{field.get('type', 'any')}{limit}{default}"


def _example(path: str, method: str, body: dict[str, Any]) -> str:
    """Returns a curl command that sends the required fields."""
    command = f"curl -X {method.upper()} http://127.0.0.1:7860{path.replace('{fact}', '1')}"
    if not body:
        return command
    values = {"question": "Who is the Pope?", "target": "Leo XIV", "id": "PROPOSAL"}
    sent = {name: values[name] for name in body["required"]}
    return f"{command} -H 'Content-Type: application/json' -d '{json.dumps(sent)}'"
