"""A page of tables made from a JSON Schema, as msgspec writes it."""

from typing import Any

Schema = dict[str, Any]


def make_page(kind: str, schema: Schema) -> str:
    """Return a page with a section for the document and for each definition, with a row per field."""
    head = (
        f"# The {kind} as JSON\n\n`quanterr schema {kind}` prints this as JSON Schema: [{kind}.schema.json]"
        f"({kind}.schema.json). An undefined number is `null`."
    )
    sections = [make_section(name, part) for name, part in {schema["title"]: schema, **schema["$defs"]}.items()]
    return "\n\n".join([head, *sections]) + "\n"


def make_section(name: str, part: Schema) -> str:
    """Return the description of a definition and a table of its fields."""
    head = [f"## {name}", "", part.get("description", ""), "", "| field | type | meaning |", "|---|---|---|"]
    rows = [
        f"| `{field}` | {type_of(value)} | {format_meaning(value)} |" for field, value in part["properties"].items()
    ]
    return "\n".join([*head, *rows])


def type_of(value: Schema) -> str:
    """Return the type of a field, in words."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in value or "const" in value:
        return " or ".join(f"`{item}`" for item in value.get("enum", [value.get("const")]))
    if "anyOf" in value:
        return " or ".join(type_of(choice) for choice in value["anyOf"])
    if "prefixItems" in value:
        return f"({', '.join(map(type_of, value['prefixItems']))})"
    if value.get("type") == "array":
        return f"list of {type_of(value['items'])}" if "items" in value else "list"
    if isinstance(value.get("additionalProperties"), dict):
        inner = type_of(value["additionalProperties"])
        return inner if inner.endswith(" by name") else f"{inner} by name"
    return str(value.get("type", "anything"))


def format_meaning(value: Schema) -> str:
    """Return the description of a field, as a table cell."""
    return " ".join(value.get("description", "").split()).replace("|", "\\|")
