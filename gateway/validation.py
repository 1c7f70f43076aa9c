"""Strict pydantic models, whose faults become 400s."""

import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from gateway.errors import ApiError, invalid

Model = TypeVar("Model", bound=BaseModel)
# What fits an int32 of a message.
Positive = Annotated[int, Field(ge=1, lt=2**31)]
NotNegative = Annotated[int, Field(ge=0, lt=2**31)]


class Strict(BaseModel):
    """A model that takes neither unknown keys, nor values of another type, nor NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Lenient(BaseModel):
    """Ignores unknown members: those of newer clients and of other servers, which clients send back."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


def ignoring(base: type[Model], *members: str) -> type[Model]:
    """`base` with members that are accepted, whatever they say."""
    fields: dict[str, Any] = dict.fromkeys(members, (Any, None))
    return create_model(base.__name__, __base__=base, **fields)


_NO_EFFECT = "accepted; without effect"
# A member that known clients send by habit, and that changes nothing here.
Dropped = Annotated[Any, Field(description=_NO_EFFECT)]


def dropped(value: Any) -> set[str]:
    """Names of the `Dropped` members, at any depth, that a request says something in."""
    if isinstance(value, list):
        return set[str]().union(*map(dropped, value))
    if not isinstance(value, BaseModel):
        return set()
    fields, names = type(value).model_fields, set[str]()
    for name in value.model_fields_set:
        if (inner := getattr(value, name)) is not None and fields[name].description == _NO_EFFECT:
            names.add(name)
        else:
            names |= dropped(inner)
    return names


def first_error(error: ValidationError) -> Any:
    """The error to report, without its input, a possible secret. A misspelt key precedes the missing one."""
    return min(error.errors(include_input=False), key=lambda each: each["type"] != "extra_forbidden")


def validated(model: type[Model], members: dict[str, Any], strict: bool | None = None) -> Model:
    """A member that may not be null is absent if it is. Raises ApiError: 400 naming the member at fault."""
    try:
        return model.model_validate(members, strict=strict)
    except ValidationError as error:
        fault = error
    if (fewer := _without_nulls(members, fault)) is None:
        raise _refusal(fault, members)
    return validated(model, fewer, strict)


def within(model: type[Model], members: dict[str, Any], field: str) -> Model:
    """Validates `members`. Raises ApiError: 400 naming the member in `field`."""
    try:
        return validated(model, members)
    except ApiError as error:
        inner = error.param or ""
        error.message = f"{field}.{error.message}" if inner else f"{field}: {error.message}"
        error.param = f"{field}.{inner}" if inner else field
        raise


def validated_json(model: type[Model], body: bytes | str) -> Model:
    """As `validated`. A byte order mark is no fault."""
    body = body.removeprefix(BOM_UTF8) if isinstance(body, bytes) else body
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        fault = error
    first = first_error(fault)
    if first["type"] == "json_invalid":
        raise ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}", None, "invalid_json")
    value = json.loads(body)
    if (fewer := _without_nulls(value, fault)) is None:
        raise _refusal(fault, value)
    return validated_json(model, json.dumps(fewer))


OBJECT_FAULTS = {"model_type", "model_attributes_type", "dict_type"}  # pydantic's words for them name our classes


def _without_nulls(value: Any, fault: ValidationError) -> Any:
    """A copy of `value` without the members that are null and at fault; None: there are none."""
    rest, found = deepcopy(value), False
    for error in fault.errors(include_url=False):
        *before, member = _place(error, rest) or [None]
        holder = rest
        for part in before:
            holder = holder[part]
        if error["type"] != "extra_forbidden" and isinstance(holder, dict) and holder.get(member, "") is None:
            del holder[member]
            found = True
    return rest if found else None


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
