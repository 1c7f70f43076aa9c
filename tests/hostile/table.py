"""What each endpoint and each event can be made to cost, and what stops it. Tests are made from these tables; a test
compares them with the OpenAPI document and with the events that the gateway knows."""

from dataclasses import dataclass

JSON = "json"  # numbers of values, members and items; nulls; texts: gateway/json_bounds.py, gateway/validation.py
FORM = "form"  # numbers of fields, and JSON in them
NAME = "name"  # a name in the path, as long as a request's line may be

# "METHOD path": (its costs, statuses of an honest refusal beside 400).
ENDPOINTS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "GET /health": ((), ()),
    "GET /ready": ((), ()),
    "GET /metrics": ((), ()),
    "GET /version": ((), ()),
    "GET /load": ((), ()),
    "GET /v1/models": ((), ()),
    "GET /v1/models/{name}": ((NAME,), (404,)),
    "POST /v1/chat/completions": ((JSON,), (200, 404, 429)),
    "POST /v1/chat/completions/batch": ((JSON,), (200, 404, 429)),
    "POST /v1/chat/completions/render": ((JSON,), (200, 404)),
    "POST /v1/completions/render": ((JSON,), (200, 404)),
    "POST /invocations": ((JSON,), (200, 404, 429)),
    "GET /tokenizer_info": ((), ()),
    "POST /v1/embeddings": ((JSON,), (200, 404)),
    "POST /v1/rerank": ((JSON,), (200, 404)),
    "POST /rerank": ((JSON,), (200, 404)),
    "POST /v2/rerank": ((JSON,), (200, 404)),
    "POST /v1/score": ((JSON,), (200, 404)),
    "POST /score": ((JSON,), (200, 404)),
    "POST /v1/completions": ((JSON,), (200, 404, 429)),
    "POST /v1/messages": ((JSON,), (200, 404)),
    "POST /v1/messages/count_tokens": ((JSON,), (200, 404)),
    "POST /v1/responses": ((JSON,), (200, 404)),
    "POST /v1/responses/input_tokens": ((JSON,), (200, 404)),
    "GET /v1/responses/{response_id}": ((NAME,), (404,)),
    "DELETE /v1/responses/{response_id}": ((NAME,), (404,)),
    "POST /v1/responses/{response_id}/cancel": ((NAME,), (404,)),
    "GET /v1/responses/{response_id}/input_items": ((NAME,), (404,)),
    "POST /v1/conversations": ((JSON,), (200,)),
    "GET /v1/conversations/{conversation_id}": ((NAME,), (404,)),
    "POST /v1/conversations/{conversation_id}": ((JSON, NAME), (200, 404)),
    "DELETE /v1/conversations/{conversation_id}": ((NAME,), (404,)),
    "GET /v1/conversations/{conversation_id}/items": ((NAME,), (404,)),
    "POST /v1/conversations/{conversation_id}/items": ((JSON, NAME), (200, 404)),
    "GET /v1/conversations/{conversation_id}/items/{item_id}": ((NAME,), (404,)),
    "DELETE /v1/conversations/{conversation_id}/items/{item_id}": ((NAME,), (404,)),
    "POST /inference/v1/generate": ((JSON,), (200, 404)),
    "POST /inference/v1/abort_requests": ((JSON,), (200,)),
    "POST /tokenize": ((JSON,), (200, 404)),
    "POST /detokenize": ((JSON,), (200, 404)),
    "POST /v1/audio/speech": ((JSON,), (200, 404)),
    "POST /v1/audio/transcriptions": ((JSON, FORM), (200, 404)),
    "POST /v1/audio/translations": ((JSON, FORM), (200, 404)),
    "POST /v1/audio/generations": ((JSON,), (200, 404)),
    "GET /v1/audio/voices": ((), ()),
    "POST /v1/audio/voices": ((FORM,), (501,)),
    "GET /v1/audio/models": ((), ()),
    "DELETE /v1/audio/voices/{voice}": ((NAME,), (501,)),
    "GET /v1/files": ((), ()),
    "POST /v1/files": ((FORM,), ()),
    "GET /v1/files/{file_id}": ((NAME,), (404,)),
    "GET /v1/files/{file_id}/content": ((NAME,), (404,)),
    "DELETE /v1/files/{file_id}": ((NAME,), (404,)),
    "GET /v1/batches": ((), ()),
    "POST /v1/batches": ((JSON,), ()),
    "GET /v1/batches/{batch_id}": ((NAME,), (404,)),
    "POST /v1/batches/{batch_id}/cancel": ((NAME,), (404,)),
    "POST /v1/images/generations": ((JSON,), (200, 404)),
    "POST /v1/images/edits": ((JSON, FORM), (200, 404)),
    "GET /v1/videos": ((), ()),
    "POST /v1/videos": ((JSON, FORM), (200, 404)),
    "POST /v1/videos/edits": ((JSON, FORM), (200, 404)),
    "POST /v1/videos/{video_id}/remix": ((JSON, NAME), (200, 404)),
    "GET /v1/videos/{video_id}": ((NAME,), (404,)),
    "DELETE /v1/videos/{video_id}": ((NAME,), (404,)),
    "GET /v1/videos/{video_id}/content": ((NAME,), (404,)),
    "POST /v1/realtime/client_secrets": ((JSON,), (200,)),
    "POST /openai/v1/realtime/client_secrets": ((JSON,), (200,)),
    "POST /v1/realtime/calls": ((FORM,), (501,)),
    "POST /openai/v1/realtime/calls": ((FORM,), (501,)),
    "POST /v1/live/sessions": ((JSON,), (501,)),
    "POST /v1/live/sessions/{session_id}/hangup": ((NAME,), (404,)),
    "POST /v1/realtime/calls/{call_id}/hangup": ((NAME,), (404, 501)),
    "POST /openai/v1/realtime/calls/{call_id}/hangup": ((NAME,), (404, 501)),
    "POST /v1/load_lora_adapter": ((JSON,), (200,)),
    "POST /v1/unload_lora_adapter": ((JSON,), (200,)),
    "POST /start_profile": ((JSON,), (200, 409)),
    "POST /stop_profile": ((), ()),
    "GET /v1/quartet/trace/{request_id}": ((NAME,), (404,)),
}

LIVE = "/v1/live/sessions"
SOCKETS = (
    *("/v1/realtime", "/openai/v1/realtime", "/v1/audio/speech/stream", "/v1/responses"),
    *(LIVE, f"{LIVE}/{{session_id}}/attach", f"/openai{LIVE}", f"/openai{LIVE}/{{session_id}}/attach"),
)
# Types of a client's messages, by the WebSocket's path, with where a list or an object may be.
EVENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "/v1/realtime": {
        "session.update": ("session", "session.tools", "session.audio", "session.include", "session.instructions"),
        "input_audio_buffer.append": ("audio",),
        "input_audio_buffer.commit": ("event_id",),
        "input_audio_buffer.clear": ("event_id",),
        "output_audio_buffer.clear": ("event_id",),
        "conversation.item.create": ("item", "item.content", "previous_item_id"),
        "conversation.item.retrieve": ("item_id",),
        "conversation.item.delete": ("item_id",),
        "conversation.item.truncate": ("item_id",),
        "response.create": ("response", "response.input", "response.tools", "response.metadata"),
        "response.cancel": ("response_id",),
    },
    LIVE: {
        "session.start": ("session", "session.instructions", "session.input", "session.audio", "session.delegation"),
        "session.update": ("session", "session.delegation", "session.delegation.responses.tools"),
        "session.input_audio.append": ("audio",),
        "session.input_audio.mute": ("event_id",),
        "session.input_audio.unmute": ("event_id",),
        "session.output_audio.fixture.play": ("audio",),
        "session.instructions.append": ("content", "delegation_id"),
        "session.thinking.append": ("content",),
        "session.commentary.append": ("content",),
        "response.item.create": ("item", "item.content"),
        "response.create": ("event_id",),
        "session.close": ("event_id",),
    },
    "/v1/responses": {"response.create": ("input", "tools", "include", "metadata", "instructions")},
    "/v1/audio/speech/stream": {
        "session.config": ("model", "quartet"),
        "input.text": ("text",),
        "input.done": ("x",),
    },
}


@dataclass(frozen=True)
class WireCost:
    """A cost before any endpoint. `limit`: what stops it. `answers`: statuses that say so; 0 is a close."""

    cost: str
    limit: str
    answers: tuple[int, ...]


WIRE = {
    "a target without end": WireCost("memory", "8 KiB", (414,)),
    "a header without end": WireCost("memory", "64 KiB", (431, 0)),
    "headers without end": WireCost("memory", "64 KiB, 200", (431, 0)),
    "many headers": WireCost("memory", "200", (431,)),
    "trailers without end": WireCost("memory", "64 KiB", (401, 431, 0)),  # 401: the endpoint was faster
    "blank lines without end": WireCost("connections", "64 KiB", (431, 0)),
    "requests behind one that runs": WireCost("memory", "16", (429, 0)),
    "a slow head": WireCost("connections", "head_timeout_s", (408,)),
    "a slow body": WireCost("connections", "body_timeout_s", (408,)),
    "a body that nobody reads": WireCost("connections", "body_timeout_s", (401,)),
    "an answer that nobody reads": WireCost("memory, connections", "request_timeout_s", (0, 200)),
    "a WebSocket's long header": WireCost("connections", "8 KiB", (431,)),
}
