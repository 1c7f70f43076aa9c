"""Schemathesis hooks that let requests past the first check.

Every other body is a valid one with a few generated members. A body's model exists; every other id, in a path or a
body, comes from an answer. At the end the answers of each operation are counted by status.
"""

import atexit
import os
import random
import re
from base64 import b64encode
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis  # pyright: ignore[reportMissingImports]  of the extra "fuzz"

_DIT_MODEL = os.environ["FUZZ_DIT_MODEL"]
_OF_DIT = ("/v1/images", "/v1/videos", "/v1/audio/generations")
_ID = re.compile(rb'"id": ?"(([a-z]+)_[0-9A-Za-z_-]+)"')
_PARAMETERS = {"video": "video_id", "voice": "voice", "resp": "response_id", "conv": "conversation_id"}
_KEPT = 50  # ids of a kind, the newest
_draw = random.Random(0)
_told: dict[str, list[str]] = {"response_id": os.environ["FUZZ_RESPONSE_IDS"].split()}  # by path parameter
_statuses: dict[str, Counter[int]] = {}  # by operation
_ASSETS = Path(__file__).resolve().parents[1] / "cli/assets"
_SOUND, _IMAGE = (_ASSETS / "question.wav").read_bytes(), (_ASSETS / "picture.png").read_bytes()
_MESSAGE = {"role": "user", "content": "Hello"}
_RIGHT: dict[str, dict[str, Any]] = {  # by path
    "/v1/chat/completions": {"model": "scripted", "messages": [_MESSAGE]},
    "/v1/completions": {"model": "scripted", "prompt": "Hello"},
    "/v1/responses": {"model": "scripted", "input": "Hello"},
    "/v1/responses/input_tokens": {"model": "scripted", "input": "Hello"},
    "/v1/messages": {"model": "scripted", "max_tokens": 16, "messages": [_MESSAGE]},
    "/v1/messages/count_tokens": {"model": "scripted", "messages": [_MESSAGE]},
    "/v1/conversations": {"items": [_MESSAGE]},
    "/v1/conversations/{conversation_id}/items": {"items": [_MESSAGE]},
    "/v1/audio/speech": {"model": "scripted", "input": "Hello", "voice": "chelsie"},
    "/v1/audio/generations": {"model": _DIT_MODEL, "prompt": "rain"},
    "/v1/audio/transcriptions": {"model": "scripted", "file": _SOUND},
    "/v1/audio/translations": {"model": "scripted", "file": _SOUND},
    "/v1/audio/voices": {"name": "anna", "consent": "given", "audio_sample": _SOUND},
    "/v1/files": {"purpose": "user_data", "file": _IMAGE},
    "/v1/images/generations": {"model": _DIT_MODEL, "prompt": "a fox"},
    "/v1/images/edits": {"model": _DIT_MODEL, "prompt": "a fox", "image": [_IMAGE]},
    "/v1/videos": {"model": _DIT_MODEL, "prompt": "a fox"},
    "/inference/v1/generate": {"model": "scripted", "token_ids": [1, 2, 3], "sampling_params": {}},
    "/tokenize": {"model": "scripted", "prompt": "Hello"},
    "/detokenize": {"model": "scripted", "tokens": [1, 2, 3]},
}


@schemathesis.hook
def after_call(context, case, response):
    """Counts the answer and keeps its ids."""
    _statuses.setdefault(f"{case.method} {case.operation.path}", Counter())[response.status_code] += 1
    for id_, prefix in _ID.findall(response.content):
        ids = _told.setdefault(_PARAMETERS.get(prefix.decode(), "item_id"), [])
        if (known := id_.decode()) not in ids:  # a repeated one must not displace the others
            ids.append(known)
            del ids[:-_KEPT]


@schemathesis.hook
def before_call(context, case, kwargs):
    """Makes base64 of the files in JSON."""
    if case.media_type == "application/json" and isinstance(case.body, dict):
        texts = {name: b64encode(value).decode() for name, value in case.body.items() if isinstance(value, bytes)}
        case.body = case.body | texts


@schemathesis.hook
def map_path_parameters(context, path_parameters):
    """Makes every other id an existing one."""
    return {name: _known(name) or value for name, value in (path_parameters or {}).items()}


@schemathesis.hook
def map_body(context, body):
    """Makes every other body valid but for a few members."""
    if not isinstance(body, dict):
        return body
    right = _RIGHT.get(context.operation.path)
    if right is not None and _draw.random() < 0.5:
        strange = _draw.sample(sorted(body), min(len(body), _draw.randint(0, 3)))
        body = right | {name: body[name] for name in strange if name not in right or _draw.random() < 0.3}
    if isinstance(body.get("model"), str):
        body["model"] = _DIT_MODEL if context.operation.path.startswith(_OF_DIT) else "scripted"
    for member, name in (("previous_response_id", "response_id"), ("conversation", "conversation_id")):
        if isinstance(body.get(member), str) and (known := _known(name)):
            body[member] = known
    return body


def _known(name: str) -> str | None:
    ids = _told.get(name)
    return _draw.choice(ids) if ids and _draw.random() < 0.5 else None


@atexit.register
def _report() -> None:
    for operation, statuses in _statuses.items():
        counts = ", ".join(f"{count} of {status}" for status, count in sorted(statuses.items()))
        print(f"{operation}: {counts}", flush=True)
