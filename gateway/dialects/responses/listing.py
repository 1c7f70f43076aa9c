"""Pages of lists of items, as OpenAI's."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import Field

from gateway.dialects.responses.parts import Item
from gateway.errors import invalid
from gateway.http.json_writer import first_page
from gateway.validation import Model, Strict, validated


class Page(Strict):
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    include: Any = Field(default=None, description="accepted; items are told whole")


def read_query(http: Request, model: type[Model]) -> Model:
    """Validates the query. Raises ApiError: 400 naming the parameter."""
    members = {name.removesuffix("[]"): value for name, value in http.query_params.items()}
    return validated(model, members, strict=False)


def listed(items: Sequence[Item], page: Page) -> dict[str, Any]:
    """A page of `items`, which are oldest first. Raises ApiError: 400, `after` is unknown."""
    ordered = items if page.order == "asc" else items[::-1]
    if page.after is not None:
        ids = [item["id"] for item in ordered]
        if page.after not in ids:
            raise invalid("after", f"there is no item {page.after[:80]!r} here")
        ordered = ordered[ids.index(page.after) + 1 :]
    return first_page(ordered, page.limit)
