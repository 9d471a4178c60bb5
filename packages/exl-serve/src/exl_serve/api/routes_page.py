"""GET /docs: the OpenAPI document as a page without scripts."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

__all__ = ["PAGE_HEADERS", "page"]

PAGE_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}


def page(known: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    schemas: Mapping[str, Any] = known["components"]["schemas"]
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        "<title>exl-serve: routes</title></head><body><h1>Routes</h1>",
        '<p>Also as <a href="/openapi.json">OpenAPI document</a>. A key needs the scope of its route.</p>',
        "<table><thead><tr><th>route<th>scope<th>does<th>body</tr></thead><tbody>",
    ]
    for path, methods in known["paths"].items():
        for method, route in methods.items():
            name = _body(route)
            body = f'<a href="#{name}">{name}</a>' if name else ""
            route_cells = (f"<code>{method.upper()} {escape(path)}</code>", escape(route["x-scope"]))
            lines.append(f"<tr><td>{'<td>'.join((*route_cells, escape(route['summary']), body))}</tr>")
    lines.append("</tbody></table>")
    for name, schema in schemas.items():
        lines += _section(name, schema)
    return "\n".join([*lines, "</body></html>", ""])


def _body(route: Mapping[str, Any]) -> str:
    """Return the name of the schema of a route's body; "" without one."""
    content = route.get("requestBody", {}).get("content", {})
    reference = str(content.get("application/json", {}).get("schema", {}).get("$ref", ""))
    return reference.rpartition("/")[2]


def _section(name: str, schema: Mapping[str, Any]) -> list[str]:
    """Return the fields of a schema."""
    parts = [str(one["$ref"]).rpartition("/")[2] for one in schema.get("allOf", ())]
    lines = [f'<h2 id="{name}">{name}</h2>']
    if parts:
        links = ", ".join(f'<a href="#{one}">{one}</a>' for one in parts)
        lines.append(f"<p>With the fields of {links}.</p>")
    fields: Mapping[str, Any] = schema.get("properties", {})
    rows = [
        f"<tr><td><code>{escape(field)}</code><td>{escape(str(about.get('description', '')))}</tr>"
        for field, about in fields.items()
    ]
    return [*lines, "<table><tbody>", *rows, "</tbody></table>"] if rows else lines
