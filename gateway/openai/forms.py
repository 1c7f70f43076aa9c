"""Reads bodies: whole ones, and multipart/form-data in the spelling of OpenAI's clients."""

import asyncio
import json
import re
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from gateway.openai.errors import ApiError, from_validation, invalid

Model = TypeVar("Model", bound=BaseModel)

_LARGE_BODY_BYTES = 1024 * 1024  # beyond, parsing would hold the event loop up for milliseconds
_MAX_FIELDS = 1000
_MAX_FIELD_BYTES = 1024 * 1024
_NAME = re.compile(r"(?P<field>[^\[\]]+)(\[(?P<key>[^\[\]]*)\])?")


def is_form(http: Request) -> bool:
    """Whether the body is a form."""
    return http.headers.get("content-type", "").split(";")[0].strip().lower() == "multipart/form-data"


async def _read_body(http: Request, limit_s: float) -> bytes:
    """The whole body. Raises ApiError: 408 after `limit_s` seconds."""
    try:
        async with asyncio.timeout(limit_s):
            return await http.body()
    except TimeoutError:
        raise _too_slow(limit_s) from None


async def read_json(http: Request, model: type[Model], limit_s: float) -> Model:
    """The body as a `model`. Raises ApiError: 400 naming the member at fault, 408 after `limit_s` seconds."""
    body = await _read_body(http, limit_s)
    try:
        if len(body) > _LARGE_BODY_BYTES:
            return await asyncio.to_thread(model.model_validate_json, body)
        return model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None


async def read_form(
    http: Request, limit_s: float, max_files: int, json_fields: frozenset[str]
) -> tuple[dict[str, Any], dict[str, list[bytes]]]:
    """(fields, files) of a form. Fields are texts, but `lora[x]` makes {"lora": {"x": ...}}, and `a[]` a list; those
    named in `json_fields` may be JSON. Files are listed by name, `image[]` as `image`.

    Raises:
        ApiError: 400 if it is no form, or naming a field that is there twice or nested without end; 408 after
            `limit_s` seconds.
    """
    fields: dict[str, Any] = {}
    files: dict[str, list[bytes]] = {}
    try:
        async with asyncio.timeout(limit_s):
            form = await http.form(max_files=max_files, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES)
    except TimeoutError:
        raise _too_slow(limit_s) from None
    except HTTPException as error:
        raise ApiError(400, f"the body is not a valid form: {error.detail}", None, "invalid_form") from None
    try:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                files.setdefault(name.removesuffix("[]"), []).append(await value.read())
            else:
                _put(fields, name, _parsed(name, value) if name in json_fields else value)
    finally:
        await form.close()
    return fields, files


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # whatever is to be there, it is not a text: the field's own check says so
    except RecursionError:
        raise invalid(name, "more brackets within brackets than are read") from None


def _put(fields: dict[str, Any], name: str, value: Any) -> None:
    match = _NAME.fullmatch(name)
    if match is None:
        raise invalid(name, "no name of a field: write field, field[] or field[key]")
    field, key = match["field"], match["key"]
    if key is None:
        if field in fields:
            raise invalid(name, "is in the form twice")
        fields[field] = value
        return
    group = fields.setdefault(field, {} if key else [])
    if key and isinstance(group, dict) and key not in group:
        group[key] = value
    elif not key and isinstance(group, list):
        group.append(value)
    else:
        raise invalid(name, "is in the form twice")


def _too_slow(limit_s: float) -> ApiError:
    message = f"the body took longer to arrive than the {limit_s:g} s allowed"
    return ApiError(408, message, None, "request_timeout", "timeout_error")
