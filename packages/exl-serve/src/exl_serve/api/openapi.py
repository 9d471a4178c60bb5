"""GET /openapi.json: the routes and the fields of their bodies, from the tables that serve them.

docs/serving/openapi.json is written from here: `python -m exl_serve.api.openapi > FILE`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from exl_serve.api.http import Call
from exl_serve.api.routes_page import PAGE_HEADERS, page
from exl_serve.request.fields import Field
from exl_serve.request.messages import ROLES

__all__ = ["document", "openapi", "routes_page"]

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
TEXT_OR_LIST: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1}]}
TEXT, IDS, FLAG = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}, {"type": "boolean"}
PARTS: dict[str, Any] = {
    "type": "array",
    "items": {
        "anyOf": [
            {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": TEXT},
            },
            {
                "type": "object",
                "required": ["type", "image_url"],
                "properties": {
                    "type": {"const": "image_url"},
                    "image_url": {
                        "type": "object",
                        "required": ["url"],
                        "properties": {"url": TEXT, "detail": {"enum": ["auto", "low", "high"]}},
                    },
                },
            },
        ]
    },
}
MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {"anyOf": [TEXT, PARTS, {"type": "null"}]},
            "tool_calls": {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
            "tool_call_id": TEXT,
        },
        "anyOf": [{"required": ["content"]}, {"required": ["tool_calls"]}],
    },
}


async def openapi(call: Call) -> None:
    """Answer the OpenAPI document."""
    await call.answer(200, document())


async def routes_page(call: Call) -> None:
    """Answer the routes and the fields of their bodies as a page."""
    data = _page()
    await call.start(200, PAGE_HEADERS | {"content-length": str(len(data))})
    await call.write(data, more=False)


@cache
def _page() -> bytes:
    return page(document()).encode()


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of every route."""
    from exl_serve.api.app import ROUTES

    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        path = route.path.replace(":path}", "}")
        names = re.findall(r"{(\w+)}", path)
        known: dict[str, Any] = {
            "operationId": f"{route.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', path.lower()).strip('_')}",
            "summary": " ".join((route.endpoint.__doc__ or "").split(". ")[0].rstrip(".").split()),
            "x-scope": route.scope,
            "security": [] if route.scope == "open" else [{"key": []}],
            "responses": {
                "200": {"description": "The answer."},
                "default": {
                    "description": "An error.",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                },
            },
        }
        if names:
            known["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if route.method == "POST":
            body = {"$ref": f"#/components/schemas/{BODIES[path]}"} if path in BODIES else {"type": "object"}
            known["requestBody"] = {"content": {"application/json": {"schema": body}}}
        paths.setdefault(path, {})[route.method.lower()] = known
    return {
        "openapi": "3.1.0",
        "info": {"title": "exl-serve", "version": "1", "description": "OpenAI's API over local models."},
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas() -> dict[str, Any]:
    from exl_serve.api.chat import CHAT
    from exl_serve.api.completions import COMPLETION
    from exl_serve.api.models import TEMPLATE
    from exl_serve.api.tabby import MAX_LORAS, SCALING
    from exl_serve.request.fields import COMMON, CONVERSATION, SAMPLING
    from exl_serve.request.responses import OF_CHAT, RESPONSE

    tools = next(field for field in CONVERSATION if field.name == "tools")
    template = _object([*{field.name: field for field in TEMPLATE.values()}.values(), tools], {})["properties"]

    def refer(*names: str) -> dict[str, Any]:
        return {"allOf": [{"$ref": f"#/components/schemas/{name}"} for name in names]}

    return {
        "Error": ERROR,
        "Common": _object([field for field in COMMON if field.name not in OF_CHAT], {}),
        "OfChat": _object([field for field in COMMON if field.name in OF_CHAT], {}),
        "Sampling": _object(SAMPLING, {}),
        "ChatCompletion": refer("Common", "OfChat", "Sampling")
        | _object((*CONVERSATION, *CHAT), {"messages": MESSAGES}),
        "Completion": refer("Common", "OfChat", "Sampling") | _object(COMPLETION, {"prompt": TEXT_OR_LIST}),
        "Response": refer("Common", "Sampling") | _object((*CONVERSATION, *RESPONSE), {"input": TEXT_OR_LIST}),
        "Tokenize": _plain(
            template
            | {"prompt": TEXT, "content": TEXT, "text": TEXT, "messages": MESSAGES, "with_pieces": FLAG}
            | dict.fromkeys(("add_special_tokens", "add_special", "add_bos_token", "return_token_strs"), FLAG)
            | dict.fromkeys(("parse_special", "encode_special_tokens"), FLAG)
        ),
        "Detokenize": _plain({"tokens": IDS, "decode_special_tokens": FLAG}, "tokens"),
        "ApplyTemplate": _plain(
            {"messages": MESSAGES, "add_special": FLAG, "add_bos_token": FLAG} | template, "messages"
        ),
        "LoadAdapter": _plain({"lora_name": TEXT, "lora_path": TEXT, "load_inplace": FLAG}, "lora_name", "lora_path"),
        "UnloadAdapter": _plain({"lora_name": TEXT}, "lora_name"),
        "LoadAdapters": _plain(
            {
                "loras": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MAX_LORAS,
                    "items": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {"name": TEXT, "scaling": {"anyOf": [dict(SCALING.schema), {"type": "null"}]}},
                        "additionalProperties": False,
                    },
                },
                "lora_name": TEXT,
                "lora_path": TEXT,
                "load_inplace": FLAG,
            }
        ),
        "UnloadAdapters": _plain({"lora_name": TEXT}),
        "LoadModel": _plain({"model_name": TEXT, "name": TEXT}),
    }


BODIES = {
    "/v1/chat/completions": "ChatCompletion",
    "/v1/completions": "Completion",
    "/v1/responses": "Response",
    "/v1/responses/input_tokens": "Response",
    "/tokenize": "Tokenize",
    "/v1/tokenize": "Tokenize",
    "/v1/token/encode": "Tokenize",
    "/detokenize": "Detokenize",
    "/v1/detokenize": "Detokenize",
    "/v1/token/decode": "Detokenize",
    "/apply-template": "ApplyTemplate",
    "/v1/load_lora_adapter": "LoadAdapter",
    "/v1/unload_lora_adapter": "UnloadAdapter",
    "/v1/lora/load": "LoadAdapters",
    "/v1/lora/unload": "UnloadAdapters",
    "/v1/model/load": "LoadModel",
}


def _plain(properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"model": TEXT, **properties}} | (
        {"required": list(required)} if required else {}
    )


def _object(fields: Sequence[Field], own: Mapping[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = dict(own)
    for field in fields:
        schema = dict(field.check.schema)
        if schema:
            schema = {"anyOf": [schema, {"type": "null"}]}
        for name in (field.name, *field.aliases):
            properties[name] = {"description": f"{field.meaning} ({field.limits})", **schema}
    found: dict[str, Any] = {"type": "object", "properties": properties}
    return found | ({"required": sorted(own)} if own else {})


if __name__ == "__main__":
    print(json.dumps(document(), indent=1))
