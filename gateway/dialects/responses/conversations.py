"""`/v1/conversations`: items that responses answer and add to."""

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field

from gateway.dialects.responses.endpoint import responses_of
from gateway.dialects.responses.items import new_id, read_items
from gateway.dialects.responses.listing import Page, page_of
from gateway.dialects.responses.parts import Item
from gateway.dialects.responses.store import Thread
from gateway.errors import ApiError, invalid
from gateway.http.connection import admitted, owner_of
from gateway.http.forms import JSON, page, read_json, read_query
from gateway.http.json_writer import Json, first_page, in_thread, to_json
from gateway.validation import Listed, Metadata, Strict

router = APIRouter(tags=["responses"])
_MAX_ITEMS = 20  # of one request, as at OpenAI
_MAX_TEXT_BYTES = 1024 * 1024  # of an item, as JSON without its media
_MEDIA = {"image_url", "video_url", "audio_url", "input_audio", "file_data", "result"}
_ADMITTED = [Depends(admitted)]


class ConversationRequest(Strict):
    items: Listed[Any] | None = Field(default=None, max_length=_MAX_ITEMS, description="its first items")
    metadata: Metadata | None = None


class ConversationUpdate(Strict):
    metadata: Metadata


class ItemsRequest(Strict):
    items: Listed[Any] = Field(min_length=1, max_length=_MAX_ITEMS)


def _opened(model: type[Strict]) -> dict[str, Any]:
    return page(model, "the object", answered=JSON)


async def _found(http: Request, conversation_id: str) -> Thread:
    return await responses_of(http).thread("conversation", conversation_id, owner_of(http), None)


Found = Annotated[Thread, Depends(_found)]


@router.post("/v1/conversations", dependencies=_ADMITTED, openapi_extra=_opened(ConversationRequest))
async def create_conversation(http: Request) -> dict[str, Any]:
    """Makes a conversation."""
    request = await read_json(http, ConversationRequest)
    thread = Thread(new_id("conv"), int(time.time()), None, request.metadata or {})
    await responses_of(http).store.put(thread, owner_of(http), await _items(request.items or []))
    return _public(thread)


@router.get("/v1/conversations/{conversation_id}")
async def get_conversation(thread: Found) -> dict[str, Any]:
    """Returns a conversation without its items."""
    return _public(thread)


@router.post("/v1/conversations/{conversation_id}", dependencies=_ADMITTED, openapi_extra=_opened(ConversationUpdate))
async def update_conversation(http: Request, thread: Found) -> dict[str, Any]:
    """Changes a conversation's metadata."""
    request = await read_json(http, ConversationUpdate)
    await responses_of(http).store.rewrite(thread.id, request.metadata)
    return _public(Thread(thread.id, thread.created_at, None, request.metadata))


@router.delete("/v1/conversations/{conversation_id}")
async def delete_conversation(http: Request, thread: Found) -> dict[str, Any]:
    """Removes a conversation and its items."""
    await responses_of(http).store.remove(thread.id)
    return {"id": thread.id, "object": "conversation.deleted", "deleted": True}


@router.get("/v1/conversations/{conversation_id}/items")
async def list_items(http: Request, thread: Found) -> Json:
    """Lists the items of a conversation."""
    http.state.hold(thread.size)
    return await in_thread(await page_of(responses_of(http).store, thread.id, read_query(http, Page)))


@router.post("/v1/conversations/{conversation_id}/items", dependencies=_ADMITTED, openapi_extra=_opened(ItemsRequest))
async def create_items(http: Request, thread: Found) -> Json:
    """Adds items to a conversation."""
    request = await read_json(http, ItemsRequest)
    items = await _items(request.items)
    for i, item in enumerate(items):
        if item["type"] == "item_reference":
            raise invalid(f"items[{i}].type", "a conversation has items themselves")
    await responses_of(http).store.add(thread.id, items)
    return await in_thread(first_page(items, len(items)))


@router.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def get_item(http: Request, thread: Found, item_id: str) -> Json:
    """Returns an item of a conversation."""
    http.state.hold(thread.size)
    if (item := await responses_of(http).store.item_of(thread.id, item_id)) is not None:
        return await in_thread(item)
    raise ApiError(404, f"there is no item {item_id[:80]!r} in the conversation", None, "not_found")


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def delete_item(http: Request, thread: Found, item_id: str) -> dict[str, Any]:
    """Removes an item and returns the conversation."""
    await get_item(http, thread, item_id)
    await responses_of(http).store.remove_item(thread.id, item_id)
    return _public(thread)


async def _items(given: list[Any]) -> list[Item]:
    """Raises ApiError: 400, an item is none, or has too much text."""
    items = await asyncio.to_thread(read_items, given, "items")
    for i, item in enumerate(items):
        size = await asyncio.to_thread(lambda item=item: len(to_json(_without_media(item))))
        if size > _MAX_TEXT_BYTES:
            reason = f"has {size} bytes as JSON without its media; at most {_MAX_TEXT_BYTES} are kept"
            raise invalid(f"items[{i}]", reason, "string_above_max_length")
    return items


def _without_media(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_media(member) for name, member in value.items() if name not in _MEDIA}
    return [_without_media(each) for each in value] if isinstance(value, list) else value


def _public(thread: Thread) -> dict[str, Any]:
    return {"id": thread.id, "object": "conversation", "created_at": thread.created_at, "metadata": thread.body}
