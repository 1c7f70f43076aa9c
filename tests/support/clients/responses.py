"""Asks a gateway's Responses, and reads what it tells."""

import json
from collections.abc import Sequence
from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.systems.gateway import Running

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def client(gateway: Running) -> Any:
    """OpenAI's client: what it returns has more types than a test can tell apart."""
    return gateway.openai


async def create(gateway: Running, given: Any = "hi", **members: Any) -> Any:
    """A response, whole."""
    return await client(gateway).responses.create(model="scripted", input=given, **members)


async def stream(gateway: Running, given: Any = "hi", **members: Any) -> list[dict[str, Any]]:
    """The events of a response; each one is as OpenAI's client knows it, and they are numbered."""
    body = {"model": "scripted", "input": given, "stream": True, **members}
    return events_of((await gateway.http.post("/v1/responses", json=body)).text)


def events_of(text: str) -> list[dict[str, Any]]:
    events = []
    for told in text.strip().split("\n\n"):
        name, data = told.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if "output_audio" not in data:  # OpenAI's items have no sound
            EVENT.validate_python(event)
        events.append(event)
    return events


def kinds(events: Sequence[dict[str, Any]]) -> list[str]:
    """Types of events, those of one kind in a row once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]


async def refusal(gateway: Running, path: str = "", **members: Any) -> tuple[int, str | None, str]:
    """(status, param, message) of the error that a body gets; `path` is what follows /v1/responses."""
    response = await gateway.http.post(f"/v1/responses{path}", json={"model": "scripted", "input": "hi"} | members)
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


def prompt(gateway: Running, index: int = -1) -> list[tuple[str, str]]:
    """(role, text) of the messages that the thinker got."""
    start = gateway.scripts["thinker"].requests[index]
    return [(message.role, "".join(part.text for part in message.content)) for message in start.messages]
