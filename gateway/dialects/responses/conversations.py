"""`/v1/conversations`: items that responses answer and add to."""

import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field

from gateway.dialects.responses.endpoint import responses_of
from gateway.dialects.responses.items import new_id, read_items
from gateway.dialects.responses.listing import Page, listed, read_query
from gateway.dialects.responses.schema import Metadata
from gateway.dialects.responses.store import Thread
from gateway.errors import ApiError, invalid
from gateway.http.connection import owner_of
from gateway.http.forms import JSON, page, read_json
from gateway.validation import Listed, Strict

router = APIRouter(tags=["responses"])
_MAX_ITEMS = 20  # of one request, as at OpenAI


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


@router.post("/v1/conversations", openapi_extra=_opened(ConversationRequest))
async def create_conversation(http: Request) -> dict[str, Any]:
    """Makes a conversation."""
    request = await read_json(http, ConversationRequest)
    thread = Thread(new_id("conv"), int(time.time()), None, request.metadata or {})
    await responses_of(http).store.put(thread, owner_of(http), read_items(request.items or [], "items"))
    return _public(thread)


@router.get("/v1/conversations/{conversation_id}")
async def get_conversation(thread: Found) -> dict[str, Any]:
    """Returns a conversation without its items."""
    return _public(thread)


@router.post("/v1/conversations/{conversation_id}", openapi_extra=_opened(ConversationUpdate))
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
async def list_items(http: Request, thread: Found) -> dict[str, Any]:
    """Lists the items of a conversation."""
    return listed(await responses_of(http).store.items(thread.id), read_query(http, Page))


@router.post("/v1/conversations/{conversation_id}/items", openapi_extra=_opened(ItemsRequest))
async def create_items(http: Request, thread: Found) -> dict[str, Any]:
    """Adds items to a conversation."""
    request = await read_json(http, ItemsRequest)
    items = read_items(request.items, "items")
    for i, item in enumerate(items):
        if item["type"] == "item_reference":
            raise invalid(f"items[{i}].type", "a conversation has items themselves")
    await responses_of(http).store.add(thread.id, items)
    return listed(items, Page(limit=100, order="asc"))


@router.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def get_item(http: Request, thread: Found, item_id: str) -> dict[str, Any]:
    """Returns an item of a conversation."""
    for item in await responses_of(http).store.items(thread.id):
        if item["id"] == item_id:
            return item
    raise ApiError(404, f"there is no item {item_id[:80]!r} in the conversation", None, "not_found")


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def delete_item(http: Request, thread: Found, item_id: str) -> dict[str, Any]:
    """Removes an item and returns the conversation."""
    await get_item(http, thread, item_id)
    await responses_of(http).store.remove_item(thread.id, item_id)
    return _public(thread)


def _public(thread: Thread) -> dict[str, Any]:
    return {"id": thread.id, "object": "conversation", "created_at": thread.created_at, "metadata": thread.body}
