"""Strict pydantic models, whose faults become 400s."""

import json
from codecs import BOM_UTF8
from collections.abc import Sequence
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


def first_error(error: ValidationError) -> Any:
    """The error to report, without its input, a possible secret. A misspelt key precedes the missing one."""
    return min(error.errors(include_input=False), key=lambda each: each["type"] != "extra_forbidden")


def validated(model: type[Model], members: dict[str, Any], strict: bool | None = None) -> Model:
    """A member that may not be null is absent if it is. Raises ApiError: 400 naming the member at fault."""
    try:
        return model.model_validate(members, strict=strict)
    except ValidationError as error:
        fault, fewer = error, _without_nulls(members, error)
    if fewer is None:
        raise _from_validation(fault)
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
    try:
        return model.model_validate_json(body.removeprefix(BOM_UTF8) if isinstance(body, bytes) else body)
    except ValidationError as error:
        fault = error
    is_json = first_error(fault)["type"] != "json_invalid"
    fewer = _without_nulls(json.loads(body), fault) if is_json else None
    if fewer is None:
        raise _from_validation(fault)
    return validated_json(model, json.dumps(fewer))


def _without_nulls(value: Any, fault: ValidationError) -> Any:
    """A copy of `value` without the members that are null and at fault; None: there are none."""
    rest, found = deepcopy(value), False
    for error in fault.errors(include_url=False):
        holder, key, inner = None, "", rest
        for part in error["loc"]:  # some are tags of unions
            known = range(len(inner)) if isinstance(inner, list) else inner if isinstance(inner, dict) else ()
            if part in known:
                holder, key, inner = inner, part, cast(Any, inner)[part]
        if inner is None and isinstance(holder, dict) and error["type"] != "extra_forbidden":
            del holder[key]
            found = True
    return rest if found else None


# Where pydantic puts the tag of a union's chosen member into an error's path.
_TAGS_AFTER_INDEX = {
    *("system", "developer", "user", "assistant", "tool"),
    *("text", "refusal", "image_url", "input_audio", "audio_url", "video_url"),
    *("function_tool", "hosted_tool"),
}


_FORMAT_TAGS = {"text", "json_object", "json_schema"}


def _from_validation(errors: ValidationError) -> ApiError:
    error = first_error(errors)
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {error['ctx']['error']}", None, "invalid_json")
    param = _path(error["loc"])
    if not param:
        return ApiError(400, f"the body must be a JSON object: {error['msg']}", None, "invalid_type")
    match error["type"]:
        case "extra_forbidden":
            return invalid(param, "unknown parameter", "unknown_parameter")
        case "missing":
            return invalid(param, "required, but missing", "missing_required_parameter")
        case "value_error":
            return invalid(param, str(error["ctx"]["error"]))
        case "union_tag_invalid" | "union_tag_not_found":
            return invalid(f"{param}.{error['ctx']['discriminator'].strip(chr(39))}", error["msg"])
        case _:
            return invalid(param, error["msg"])


def _path(location: Sequence[str | int]) -> str:
    parts: list[str] = []
    for i, part in enumerate(location):
        before = location[i - 1] if i else None
        if part == "[key]":  # a mapping's key is at fault, and it is the part before
            continue
        is_last = i == len(location) - 1  # then it is a member: a tag has the member at fault after it
        if (isinstance(before, int) and part in _TAGS_AFTER_INDEX and not is_last) or (
            before == "response_format" and i == 1 and part in _FORMAT_TAGS
        ):
            continue
        parts.append(f"[{part}]" if isinstance(part, int) else f".{part}" if parts else part)
    return "".join(parts)
