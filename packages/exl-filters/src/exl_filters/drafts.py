"""Read a schema that has keywords of several drafts of JSON Schema.

llguidance ignores keywords that the draft in `$schema` does not have. Authors who name an older draft than they write
for mean these keywords all the same.
"""

from __future__ import annotations

from typing import Any

from exl_filters.errors import FilterCompileError
from exl_filters.schema_checks import DATA, NAMED, schemas_in

__all__ = ["of_one_draft"]

OLDEST = "http://json-schema.org/draft-03/schema"
OF_2020 = frozenset({"prefixItems", "$dynamicRef", "$dynamicAnchor"})
OF_2019 = OF_2020 | {
    *("dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
    *("minContains", "maxContains", "$recursiveRef", "$anchor"),
}
OF_7 = OF_2019 | {"if", "then", "else"}
OF_6 = OF_7 | {"const", "contains", "propertyNames"}
NEWER = {
    "https://json-schema.org/draft/2019-09/schema": OF_2020,
    "http://json-schema.org/draft-07/schema": OF_2019,
    "http://json-schema.org/draft-06/schema": OF_7,
    "http://json-schema.org/draft-04/schema": OF_6,
}
"""Keywords that came after each draft. All other keywords that restrict values are read alike in every draft."""


def of_one_draft(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without `$schema` where it has keywords that came after the draft named there.

    Without `$schema` it is read as one of draft 2020-12. Where it names its parts in the way of an older draft, their
    names would be read in another way: `FilterCompileError` is raised, as it is for draft 3.
    """
    parts = list(schemas_in(schema, "#"))
    newer: set[str] = set()
    for at, sub in parts:
        draft = sub.get("$schema")
        if isinstance(draft, str):
            draft = draft.removesuffix("#")
            if draft == OLDEST:
                raise FilterCompileError(f"{at}/$schema names draft 3: write the schema for draft 4 or a later one")
            newer |= NEWER.get(draft, frozenset())
    mixed = [(at, name) for at, sub in parts for name in sub if name in newer]
    if not mixed:
        return schema
    for at, sub in parts:
        if at != "#" and any(isinstance(sub.get(name), str) for name in ("id", "$id")):
            raise FilterCompileError(
                f"{mixed[0][0]} has {mixed[0][1]}, which came after the draft in $schema, and {at} has an id, which "
                "drafts read differently: name the draft of the keywords, https://json-schema.org/draft/2020-12/schema"
            )
    whole: dict[str, Any] = _without_draft(schema)
    return whole


def _without_draft(value: Any, named: bool = False) -> Any:
    """Return a schema without any `$schema`; `named`: the keys of `value` are names of the author's choice."""
    if isinstance(value, list):
        return [_without_draft(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: sub if not named and name in DATA else _without_draft(sub, named=not named and name in NAMED)
        for name, sub in value.items()
        if named or name != "$schema" or not isinstance(sub, str)
    }
