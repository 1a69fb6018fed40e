"""Bodies of clients' requests: their base class, fields, and JSON schemas."""

import types
from collections.abc import Sequence
from typing import Annotated, Any, Self, TypeGuard, Union, dataclass_transform, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core import CoreSchema, PydanticCustomError

MAX_NAME_CHARS = 64  # of an unknown field, as shown
UNKNOWN_FIELD = "unknown_field"  # type of an error, whose text is the name


def _fail_fast(schema: Any) -> None:
    """Millions of wrong entries would each become an error."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


def required(description: str, *examples: Any, **more: Any) -> Any:
    """A field that a client must send. `more`: pydantic's options of a field."""
    return Field(**more, description=description, examples=list(examples))


def optional(description: str, *examples: Any, **more: Any) -> Any:
    """A field that a client may leave out, null by default."""
    default = {} if "default_factory" in more else {"default": None}
    return required(description, *examples, **{**default, **more})


@dataclass_transform(kw_only_default=True, field_specifiers=(Field, required))
class Body(BaseModel):
    """A JSON object that a client sends, or a part of one. Unknown fields are in `model_extra`.

    Values are not converted: "1" is no number. Only the first wrong entry of a list is reported.
    """

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


class ClosedBody(Body):
    """A body that takes no unknown field. Pydantic's own check would make an error of each."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})

    @model_validator(mode="after")
    def _has_known_fields_only(self) -> Self:
        for name in self.model_extra or ():
            raise PydanticCustomError(UNKNOWN_FIELD, "{name}", {"name": name[:MAX_NAME_CHARS]})
        return self


def field_types(body: type[Body]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in body.model_fields.items()}


def types_in(hint: Any) -> list[Any]:
    """Members of a union, without annotations."""
    if get_origin(hint) is Annotated:
        return types_in(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [one for member in get_args(hint) for one in types_in(member)]
    return [hint]


def is_body(hint: Any) -> TypeGuard[type[Body]]:
    return isinstance(hint, type) and issubclass(hint, Body)


# ---- JSON schemas


class _Schema(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # the name again


def schemas_of(bodies: Sequence[type[Body]], *, refs: str) -> dict[str, Any]:
    """Schemas by name, of the bodies and what is in them. `refs`: a reference to {model}."""
    found = models_json_schema([(body, "validation") for body in bodies], ref_template=refs, schema_generator=_Schema)
    schemas: dict[str, Any] = found[1].get("$defs", {})
    return schemas
