"""Bodies in JSON and forms, and their OpenAPI descriptions."""

import asyncio
import json
import re
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import Any, get_args, get_origin

import structlog
from fastapi import Request
from pydantic import BaseModel
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import HTTPConnection

from gateway.errors import ApiError, invalid
from gateway.json_bounds import check_json
from gateway.tasks import limited
from gateway.validation import Model, validated, validated_json

_LARGE_BODY_BYTES = 256 * 1024  # beyond, parsing would hold the event loop up for milliseconds
_TRY_AGAIN_S = 10.0  # after other uploads have ended
MAX_FIELDS = 1000
MAX_FIELD_BYTES = 1024 * 1024
_PATH = re.compile(rb"[ -~]{1,4096}")
_JSON_FIELDS = {"lora", "quartet", "input_reference", "chunking_strategy"}
_NAME = re.compile(r"(?P<field>[^\[\]]+)(\[(?P<key>[^\[\]]*)\])?")

log = structlog.get_logger()


def is_form(http: Request) -> bool:
    return _media_type(http) == "multipart/form-data"


def is_json(http: Request) -> bool:
    return _media_type(http) == "application/json"


def _media_type(http: Request) -> str:
    return http.headers.get("content-type", "").split(";")[0].strip().lower()


def in_time(
    http: HTTPConnection, what: str = "the body", began: float | None = None
) -> AbstractAsyncContextManager[None]:
    """Raises ApiError: 408, it takes longer than a request may until `what` has arrived.

    Args:
        began: `time.monotonic()` when it began to; default: now.
    """
    limit_s = http.app.state.gateway.settings.request_timeout_s
    message = f"{what} took longer to arrive than the {limit_s:g} s allowed"
    left_s = limit_s if began is None else max(0.0, began + limit_s - time.monotonic())
    return limited(left_s, ApiError(408, message, None, "request_timeout", "timeout_error"))


async def read_json(http: Request, model: type[Model]) -> Model:
    """Raises ApiError: 400 naming the member at fault; 408, it takes longer than a request may."""
    return await parsed(model, await read_body(http), http.state.ignored)


async def read_body(http: Request) -> bytearray:
    """Raises ApiError: 408, it takes longer than a request may."""
    body = bytearray()  # `http.body()` would keep it beside what is made of it
    async with in_time(http):
        async for piece in http.stream():
            body += piece
    return body


async def parsed(model: type[Model], body: bytes | bytearray | str, ignored: set[str] | None = None) -> Model:
    """`ignored` gets the names of members without effect. Raises ApiError: 400 naming the member at fault."""
    if len(body) > _LARGE_BODY_BYTES:
        return await asyncio.to_thread(validated_json, model, body, ignored)
    return validated_json(model, body, ignored)


async def read_form(
    http: Request, model: type[Model], file_names: set[str], max_files: int
) -> tuple[Model, dict[str, list[bytes]]]:
    """Reads a form: (fields, files by name).

    `lora[x]` makes {"lora": {"x": ...}}, `a[]` a list; some fields may be JSON.

    Raises:
        ApiError: 400, no form, or naming the field at fault; 408, it takes longer than a request may.
    """
    require_form(http)
    fields = list[tuple[str, str]]()
    files: dict[str, list[bytes]] = {}
    limits = {"max_files": max_files, "max_fields": MAX_FIELDS, "max_part_size": MAX_FIELD_BYTES}
    parser = _Parser(http.headers, http.stream(), **limits)
    parser.file_names = file_names - _JSON_FIELDS
    try:
        async with in_time(http):
            form = await parser.parse()
    except MultiPartException as error:
        raise no_form(error.message) from None
    except OSError as error:  # files are kept on disk while they arrive
        log.error("an upload cannot be kept", error=str(error))
        message = "this server has no room for the files now; try again, or send smaller ones"
        raise ApiError(503, message, None, "storage_failed", retry_after_s=_TRY_AGAIN_S) from None
    try:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                files.setdefault(name.removesuffix("[]"), []).append(await _content(name, value))
            else:
                fields.append((name, value))
    finally:
        await form.close()
    request = read_fields(http, model, fields)
    if unknown := [name for name in files if name not in file_names]:
        raise invalid(unknown[0], "unknown parameter", "unknown_parameter")
    return request, files


def require_form(http: Request) -> None:
    """Raises ApiError: 400, the body is none."""
    if not is_form(http):
        kind = _media_type(http)[:64] or "without a type"
        message = f"the body is {kind}; it must be multipart/form-data, in which files are sent"
        raise ApiError(400, message, None, "invalid_form")


def no_form(why: str) -> ApiError:
    return ApiError(400, f"the body is not a valid form: {why}", None, "invalid_form")


def read_fields(http: Request, model: type[Model], given: Iterable[tuple[str, str]]) -> Model:
    """The fields of a form but for its files. Raises ApiError: 400 naming the field at fault."""
    fields: dict[str, Any] = {}
    for name, value in given:
        if value or _is_needed(model, name):  # programs send what nobody has filled in
            _put(model, fields, name, _parsed(name, value) if name in _JSON_FIELDS else value)
    return validated(model, fields, strict=False, ignored=http.state.ignored)  # all fields of a form are texts


class _Parser(MultiPartParser):
    """Takes parts of the names `file_names` for files even if they have no filename."""

    file_names: Collection[str]

    def on_headers_finished(self) -> None:
        disposition = self._current_part.content_disposition or b""
        _, options = parse_options_header(disposition)
        name = options.get(b"name", b"").decode(errors="replace").removesuffix("[]")
        if name in self.file_names and b"filename" not in options:
            self._current_part.content_disposition = disposition + b'; filename=""'
        super().on_headers_finished()


async def _content(name: str, file: UploadFile) -> bytes:
    """Raises ApiError: 400, it is a short text without a filename: that of a file, perhaps."""
    content = await file.read()
    if not file.filename and _PATH.fullmatch(content):
        raise invalid(name, f"is a text, not a file; curl sends a file by -F {name}=@PATH")
    return content


def _is_needed(model: type[BaseModel], name: str) -> bool:
    return name not in model.model_fields or model.model_fields[name].is_required()


def _parsed(name: str, text: str) -> Any:
    check_json(text)
    try:
        return json.loads(text)
    except ValueError:
        return text  # the field's own check refuses it
    except RecursionError:
        raise invalid(name, "more brackets within brackets than are read") from None


def _takes_list(model: type[BaseModel], name: str) -> bool:
    if name not in model.model_fields or name in _JSON_FIELDS:
        return False
    annotation = model.model_fields[name].annotation
    choices = (annotation, *get_args(annotation))
    return list in (get_origin(getattr(each, "__origin__", each)) for each in choices)


def _put(model: type[BaseModel], fields: dict[str, Any], name: str, value: Any) -> None:
    match = _NAME.fullmatch(name)
    if match is None:
        raise invalid(name, "no name of a field: write field, field[] or field[key]")
    field, key = match["field"], match["key"]
    if key is None and _takes_list(model, field):
        key = ""
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


JSON = ("application/json",)
FILE = {"type": "string", "format": "binary"}
_ERROR = {"description": "OpenAI's error body: {error: {message, type, param, code}}"}
_ERRORS: dict[str, Any] = dict.fromkeys(("400", "401", "404", "413", "429", "500", "503", "504"), _ERROR)


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Resolves $refs, which OpenAPI would look up in the whole page."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rsplit("/", 1)[1]])
        # a discriminator's mapping names definitions too
        return {key: resolve(value) for key, value in node.items() if key != "discriminator"}

    return resolve(schema)


def page(
    model: type[BaseModel],
    answer: str,
    files: Mapping[str, Any] = MappingProxyType({}),
    needed: str | None = None,
    answered: Iterable[str] = ("application/json", "text/event-stream"),
    media_type: str = "application/json",
    errors: Mapping[str, Any] = _ERRORS,
) -> dict[str, Any]:
    """An endpoint's OpenAPI description.

    Args:
        answer: describes the response.
        files: schemas of members that are files.
        needed: the required file.
        answered: media types of the response.
        media_type: of the request.
        errors: descriptions of refusals, by status.
    """
    schema = _inlined(model.model_json_schema())
    schema["properties"] |= files
    if needed is not None:
        schema["required"] = [*schema.get("required", ()), needed]
    return {
        "requestBody": {"required": True, "content": {media_type: {"schema": schema}}},
        "responses": {
            "200": {"description": answer, "content": {kind: {} for kind in answered}},
            **errors,
        },
    }
