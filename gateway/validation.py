"""Strict pydantic models, whose faults become 400s."""

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    create_model,
)

from gateway.errors import ApiError, invalid
from gateway.json_bounds import check_json

Model = TypeVar("Model", bound=BaseModel)
Item = TypeVar("Item")
JsonPath = Sequence[str | int]
MAX_ITEMS = 10_000  # of a list that a client sends
MAX_TOKENS = 350_000  # of a list of token ids; beyond the longest context
_MOST_KINDS_OF_NULLS = 24  # that are removed one after another; each takes a validation


@dataclass(frozen=True)
class _Bounded:
    """Ends the validation of a list at its first wrong item, and at its `most` items: pydantic makes an error of 1 KB
    of each wrong one."""

    most: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {"max_length": self.most, **handler(source), "fail_fast": True}


# Lists that clients send.
Listed = Annotated[list[Item], _Bounded(MAX_ITEMS)]
# What fits an int32 of a message.
Positive = Annotated[int, Field(ge=1, lt=2**31)]
NotNegative = Annotated[int, Field(ge=0, lt=2**31)]
# The name of a model; "": none was given.
ModelName = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]
TokenIds = Annotated[list[NotNegative], _Bounded(MAX_TOKENS)]
# OpenAI's, of what is stored.
Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    Field(max_length=16, description="for the client's own use: at most 16 texts"),
]


class Strict(BaseModel):
    """A model that takes neither unknown keys, nor values of another type, nor NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Lenient(BaseModel):
    """Ignores unknown members: those of newer clients and of other servers, which clients send back."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


def _noted(value: Any, info: ValidationInfo) -> Any:
    if value is not None and info.context is not None:
        info.context.add(info.field_name)
    return value


# A member that changes no answer, whatever it says. The set that validation has as its context gets its name.
Ignored = Annotated[Any, Field(description="accepted; without effect"), AfterValidator(_noted)]


def _empty(value: Any) -> None:
    if value:
        raise ValueError("does not belong here; leave it out")


# A member that clients send wherever they have a place for it. It must be null, or empty.
Empty = Annotated[Any, Field(description="accepted if it is empty"), AfterValidator(_empty)]


def ignoring(base: type[Model], *members: str, empty: Sequence[str] = ()) -> type[Model]:
    """`base` with members that are accepted: whatever they say, or if they are empty."""
    fields: dict[str, Any] = dict.fromkeys(members, (Ignored, None)) | dict.fromkeys(empty, (Empty, None))
    return create_model(base.__name__, __base__=base, **fields)


def first_error(error: ValidationError) -> Any:
    """The error to report, without its input, a possible secret. A misspelt key precedes the missing one."""
    return min(error.errors(include_input=False), key=lambda each: each["type"] != "extra_forbidden")


def validated(
    model: type[Model], members: dict[str, Any], strict: bool | None = None, ignored: set[str] | None = None
) -> Model:
    """Validates `members`. One that may not be null is absent if it is.

    Args:
        ignored: gets the names of members that have no effect.

    Raises:
        ApiError: 400 naming the member at fault.
    """

    def read(value: Any) -> Model:
        return model.model_validate(value, strict=strict, context=ignored)

    try:
        return read(members)
    except ValidationError as error:
        fault = error
    return _read_without_nulls(read, members, fault)


def within(model: type[Model], members: dict[str, Any], field: str) -> Model:
    """Validates `members`. Raises ApiError: 400 naming the member in `field`."""
    try:
        return validated(model, members)
    except ApiError as error:
        inner = error.param or ""
        error.message = f"{field}.{error.message}" if inner else f"{field}: {error.message}"
        error.param = f"{field}.{inner}" if inner else field
        raise


def validated_json(model: type[Model], body: bytes | bytearray | str, ignored: set[str] | None = None) -> Model:
    """As `validated`. A byte order mark is no fault."""
    if not isinstance(body, str) and body.startswith(BOM_UTF8):
        body = body[len(BOM_UTF8) :]
    check_json(body)
    try:
        return model.model_validate_json(body, context=ignored)
    except ValidationError as error:
        fault = error
    first = first_error(fault)
    if first["type"] == "json_invalid":
        raise ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}", None, "invalid_json")

    def read(value: Any) -> Model:
        return model.model_validate_json(json.dumps(value), context=ignored)

    return _read_without_nulls(read, json.loads(body), fault)


OBJECT_FAULTS = {"model_type", "model_attributes_type", "dict_type"}  # pydantic's words for them name our classes


def _read_without_nulls(read: Callable[[Any], Model], value: Any, fault: ValidationError) -> Model:
    """Reads `value`, in which `fault` was found, without the members that are null and at fault. Raises ApiError: 400,
    something else is at fault."""
    for _ in range(_MOST_KINDS_OF_NULLS):
        if not (places := _nulls(value, fault)):
            break
        for (path, kind), names in places.items():
            value = _without_nulls(value, path, kind, names)
        try:
            return read(value)
        except ValidationError as error:
            fault = error
    raise _refusal(fault, value)


def _nulls(value: Any, fault: ValidationError) -> dict[tuple[JsonPath, Any], set[str]]:
    """Where in `value` nulls are at fault: their names, by (path to the object that has them, its kind)."""
    found: dict[tuple[JsonPath, Any], set[str]] = {}
    for error in fault.errors(include_url=False, include_input=False):
        path = [] if error["type"] == "extra_forbidden" else _place(error, value)
        holder = value
        for part in path[:-1]:
            holder = holder[part]
        if path and isinstance(holder, dict) and holder.get(path[-1], "") is None:
            generic = tuple(0 if isinstance(part, int) else part for part in path[:-1])
            found.setdefault((generic, _kind(holder)), set()).add(str(path[-1]))
    return found


def _kind(holder: dict[str, Any]) -> Any:
    return holder.get("role"), holder.get("type")


def _without_nulls(value: Any, path: JsonPath, kind: Any, names: set[str]) -> Any:
    """A copy of `value` without the nulls called `names` in the object at `path`, and in those of its kind at the same
    place in other items of its lists: a fault is found in one item at a time."""
    if path:
        part, *rest = path
        if isinstance(value, list) and isinstance(part, int):
            return [_without_nulls(item, rest, kind, names) for item in value]
        if isinstance(value, dict) and part in value:
            return {**value, part: _without_nulls(value[part], rest, kind, names)}
        return value
    if isinstance(value, dict) and _kind(value) == kind:
        return {name: member for name, member in value.items() if member is not None or name not in names}
    return value


def _refusal(fault: ValidationError, value: Any) -> ApiError:
    error = first_error(fault)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in _place(error, value))[1:]
    if not param:
        return ApiError(400, "the body must be a JSON object", None, "invalid_type")
    match error["type"]:
        case "extra_forbidden":
            return invalid(param, "unknown parameter", "unknown_parameter")
        case "missing":
            return invalid(param, "required, but missing", "missing_required_parameter")
        case "value_error":
            return invalid(param, str(error["ctx"]["error"]))
        case "union_tag_invalid":
            return invalid(f"{param}.{_tag(error)}", f"must be one of {error['ctx']['expected_tags']}")
        case "union_tag_not_found":
            return invalid(f"{param}.{_tag(error)}", "required, but missing", "missing_required_parameter")
        case kind if kind in OBJECT_FAULTS:
            return invalid(param, "must be an object")
        case _:
            return invalid(param, error["msg"])


def _tag(error: Any) -> str:
    """The member that says which of several objects one is."""
    return error["ctx"]["discriminator"].strip("'")


def _place(error: Any, value: Any) -> list[str | int]:
    """The path in `value` of what is at fault. pydantic's has the tags of unions, too."""
    location = list(error["loc"])
    if error["type"] == "missing":
        *location, last = location
        paths = [path for path, inner in _readings(location, value) if isinstance(inner, dict) and last not in inner]
        return [*max(paths, key=len, default=location), last]
    return max(
        (path for path, _ in _readings(location, value)), key=lambda path: (path[-1:] == location[-1:], len(path))
    )


def _readings(location: Sequence[str | int], value: Any) -> Iterator[tuple[list[str | int], Any]]:
    """The ways to read `location` in `value`: (path, what is there)."""
    if not location:
        yield [], value
        return
    part, *rest = location
    known = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
    if part in known:
        yield from (([part, *path], inner) for path, inner in _readings(rest, cast(Any, value)[part]))
    yield from _readings(rest, value)  # a tag
