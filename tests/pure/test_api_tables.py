"""The tables of members and endpoints in the documents are those of the OpenAPI document."""

import pytest
from fastapi import FastAPI
from pydantic import BaseModel, Field

from gateway.http.forms import page
from scripts.api_tables import PAGES, gateway, updated, value


class Body(BaseModel):
    """A request."""

    size: int = Field(default=1, ge=1, le=4, description="how large")
    name: str = Field(description="what it is called")
    user: str | None = Field(default=None, description="accepted; without effect")


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()

    @app.post("/v1/things", openapi_extra=page(Body, "a thing"))
    def make() -> None:
        """Makes a thing."""

    return app


def table(name: str, *rows: str) -> str:
    return "\n".join((f"<!-- table: {name} -->", "| a | b | c |", "|---|---|---|", *rows, "", "Text.\n"))


def test_the_pages_are_up_to_date() -> None:
    texts = [page.read_text() for page in PAGES]
    assert sum(text.count("<!-- table: ") for text in texts) >= 11
    assert [updated(text, gateway()) for text in texts] == texts, "run `python scripts/api_tables.py`"


def test_rows_follow_the_members(app: FastAPI) -> None:
    """`name` is new, `colour` is gone, the range of `size` has changed, and `user` has no effect."""
    old = table("POST /v1/things", "| `size` * | 1 to 3 | 1, the smallest |", "| `colour` | text | red |")
    new = table("POST /v1/things", "| `size` * | 1 to 4 | 1, the smallest |", "| `name` | text | what it is called |")
    assert updated(old, app) == new


def test_every_endpoint_has_a_row(app: FastAPI) -> None:
    old = table("endpoints", "| `GET /v1/gone` | nothing |", "| WebSocket `/v1/live` | events |")
    new = table("endpoints", "| WebSocket `/v1/live` | events |", "| `POST /v1/things` | Makes a thing. |")
    assert updated(old, app) == new


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "text"),
        ({"type": "number", "exclusiveMinimum": 0.0, "maximum": 1.0}, "above 0, to 1"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 129}, "-2^63 to 2^63 - 129"),
        ({"type": "integer", "minimum": 1, "exclusiveMaximum": 2**31}, "1 or more"),
        ({"type": "array", "items": {"type": "string"}, "maxItems": 16}, "list of texts, at most 16"),
        ({"enum": ["a", "b"], "type": "string"}, "a, b"),
    ],
)
def test_a_value_in_words(schema: dict[str, object], words: str) -> None:
    assert value(schema) == words
