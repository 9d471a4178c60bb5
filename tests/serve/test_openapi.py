"""The OpenAPI document, and that it says of fields what they are checked by."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exl_serve.api.app import ROUTES
from exl_serve.api.chat import CHAT
from exl_serve.api.completions import COMPLETION
from exl_serve.api.openapi import document
from exl_serve.errors import ServeError
from exl_serve.request.fields import COMMON, CONVERSATION, SAMPLING, Field
from exl_serve.request.responses import RESPONSE
from exl_serve.testing.server import LiveServer

ROOT = Path(__file__).parents[2]
FIELDS = [
    field
    for table in (COMMON, CONVERSATION, SAMPLING, CHAT, COMPLETION, RESPONSE)
    for field in table
    if field.check.schema
]


def test_the_file_is_the_document(server: LiveServer) -> None:
    written = json.loads((ROOT / "docs/serving/openapi.json").read_text(encoding="utf-8"))
    assert written == document(), "python -m exl_serve.api.openapi > docs/serving/openapi.json"
    assert httpx.get(f"{server.url}/openapi.json", timeout=120).json() == written


def test_every_route_is_there_and_every_reference_leads_somewhere() -> None:
    found = document()
    operations = [(method.upper(), path) for path, methods in found["paths"].items() for method in methods]
    assert sorted(operations) == sorted((route.method, route.path.replace(":path}", "}")) for route in ROUTES)
    known = [methods[method] for methods in found["paths"].values() for method in methods]
    assert len({one["operationId"] for one in known}) == len(known)
    assert all(one["summary"] for one in known)
    references = {one["$ref"] for one in walk(found) if "$ref" in one}
    assert references == {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
    for schema in found["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_the_page_shows_every_route_and_field(server: LiveServer) -> None:
    answer = httpx.get(f"{server.url}/docs", timeout=120)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    for route in ROUTES:
        assert f"<code>{route.method} {route.path.replace(':path}', '}')}</code>" in answer.text
    for field in FIELDS:
        assert f"<code>{field.name}</code>" in answer.text
    assert set(re.findall(r'href="#(\w+)"', answer.text)) <= set(re.findall(r'id="(\w+)"', answer.text))
    assert "<script" not in answer.text


def walk(value: Any) -> Any:
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(one)


def test_bodies_of_the_guide_are_valid() -> None:
    found = document()
    for name, body in {
        "ChatCompletion": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 30, "logit_bias": {"1": 3}},
        "Completion": {"prompt": "Once upon a time", "max_tokens": 20, "seed": 7, "stop": None},
        "Response": {"input": "Tell me a story.", "max_output_tokens": 20},
    }.items():
        schema = {"$ref": f"#/components/schemas/{name}", "components": found["components"]}
        jsonschema.validate(body, schema, cls=jsonschema.Draft202012Validator)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"temperature": 9}, schema, cls=jsonschema.Draft202012Validator)


scalars = st.one_of(
    st.booleans(),
    st.integers(),
    st.integers(-3, 40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-1, 6),
    st.text(st.characters(codec="utf-8"), max_size=300),
)
values = st.one_of(
    scalars,
    st.lists(scalars, max_size=20),
    st.dictionaries(st.one_of(st.from_regex(r"\A[0-9]{1,10}\Z"), st.text(max_size=3)), scalars, max_size=3),
)


@example(field=next(field for field in FIELDS if field.name == "allowed_token_ids"), value=7.0)
@given(field=st.sampled_from(FIELDS), value=values)
def test_the_schema_takes_what_the_check_takes(field: Field, value: Any) -> None:
    try:
        field.check(field.name, value)
        taken = True
    except ServeError:
        taken = False
    valid = jsonschema.Draft202012Validator(dict(field.check.schema)).is_valid(value)
    assert valid == taken, (field.name, value)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_the_schema_has_the_check_s_limits(field: Field) -> None:
    """At each bound and beyond it."""
    schema = field.check.schema
    if schema.get("type") not in ("number", "integer"):
        return
    low, high = schema["minimum"], schema["maximum"]
    assert field.check("x", low) == low
    assert field.check("x", high) == high
    if schema["type"] == "integer":
        outside = (low - 1, high + 1)
    else:
        outside = (math.nextafter(low, -math.inf), math.nextafter(high, math.inf))
    for beyond in outside:
        with pytest.raises(ServeError):
            field.check("x", beyond)
