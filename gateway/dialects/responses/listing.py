"""Pages of lists of items, as OpenAI's."""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.dialects.responses.store import ResponseStore
from gateway.errors import invalid
from gateway.http.json_writer import first_page
from gateway.validation import Strict


class Page(Strict):
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    include: Any = Field(default=None, description="accepted; items are told whole")


async def page_of(store: ResponseStore, thread_id: str, page: Page) -> dict[str, Any]:
    """A page of a conversation's items or a response's input. Raises ApiError: 400, `after` is unknown."""
    items = await store.page(thread_id, page.after, page.limit + 1, page.order)
    if items is None:
        raise invalid("after", f"there is no item {(page.after or '')[:80]!r} here")
    return first_page(items, page.limit)
