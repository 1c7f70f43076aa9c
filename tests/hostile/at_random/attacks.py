"""What hostile clients send: each function is a kind of attack, and returns what came of one."""

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from services.demo_models import PAINTER
from tests.hostile import table
from tests.hostile.at_random import costly
from tests.hostile.at_random.attacker import Attacker
from tests.hostile.bodies import NAME, attacks
from tests.hostile.meter import MIB
from tests.hostile.test_requests import BOUNDARY, FORM_TYPE, FORMS, JSON_TYPE, content
from tests.hostile.test_wire import ATTACKS
from tests.hostile.wire import Wire
from tests.support.clients.schemas import sample

CHAT, RESPONSES, COMPLETIONS = "POST /v1/chat/completions", "POST /v1/responses", "POST /v1/completions"
WITH_JSON = [name for name, (costs, _) in table.ENDPOINTS.items() if table.JSON in costs]
WITH_FORM = [name for name, (costs, _) in table.ENDPOINTS.items() if table.FORM in costs]
WITH_NAME = [name for name, (costs, _) in table.ENDPOINTS.items() if table.NAME in costs]
BARE = [name for name, (costs, _) in table.ENDPOINTS.items() if not costs and name != "POST /stop_profile"]
OF_FILES = [
    ("data:audio/wav;base64,", "AB "),
    ("data:audio/wav,", "%41"),
    ("data:audio/wav;base64,", "%41"),
    ("data:video/jpeg;base64,", "AB,"),
    ("data:image/png;base64,", "AAAA"),
]
_cases = cache(lambda schema: list(attacks(json.loads(schema))))


def line_of(client: Attacker, name: str) -> str:
    """With an id that the client made, or another one."""
    return re.sub(r"\{.*?\}", lambda _: client.id(), name)


def json_costs(client: Attacker) -> str:
    name = client.draw.choice(WITH_JSON)
    schema = content(client.target.operations[name], JSON_TYPE)
    _, make, _ = client.draw.choice(_cases(json.dumps(schema)))
    body = make().replace(b'"scripted"', json.dumps(client.target.model).encode())
    return client.send(line_of(client, name), body)


def odd_values(client: Attacker) -> str:
    """A small request with odd values at two places."""
    name = client.draw.choice(WITH_JSON)
    schema = content(client.target.operations[name], JSON_TYPE)
    assert schema is not None
    body = sample(schema)
    members = list(schema.get("properties", {}))
    for _ in range(2):
        body = {**body, client.draw.choice(members): client.draw.choice(costly.ODD)}
        body = costly.replaced(body, client.draw.choice(list(costly.spots(body))), client.draw.choice(costly.ODD))
    return client.post(line_of(client, name), body)


def forms(client: Attacker) -> str:
    body = client.draw.choice(list(FORMS.values()))
    return client.send(client.draw.choice(WITH_FORM), body, f"{FORM_TYPE}; boundary={BOUNDARY}")


def names(client: Attacker) -> str:
    name = client.draw.choice(WITH_NAME)
    long = re.sub(r"\{.*?\}", lambda _: client.draw.choice([NAME, client.id(), "%00", "..%2f..", "x" * 200]), name)
    return client.send(long, b'{"items": [], "metadata": {}}' if name.startswith("POST") else b"")


def lists(client: Attacker) -> str:
    return client.send(client.draw.choice(BARE))


def the_wire(client: Attacker) -> str:
    what = client.draw.choice(list(ATTACKS))
    wire = Wire(client.target.url, 4096, client.address)
    wire.socket.settimeout(15)
    try:
        ATTACKS[what](wire)
        if what == "an answer that nobody reads":
            client.pause(10)
            return "left"
        return str(wire.read().status)
    except TimeoutError:
        return "left"
    finally:
        wire.close()


def pictures(client: Attacker) -> str:
    data = client.draw.choice(list(costly.PICTURES.values()))()
    parts = [costly.part("image", data)] * client.draw.choice([1, 4, 4, 16, 16, 64])
    if client.draw.random() < 0.2:
        body = form({"prompt": "a cross", "model": PAINTER}, ("image", data))
        return client.send("POST /v1/images/edits", body, f"{FORM_TYPE}; boundary={BOUNDARY}")
    return client.post(CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 20})


def silences(client: Attacker) -> str:
    data = client.draw.choice(list(costly.SOUNDS.values()))()
    if client.draw.random() < 0.5:
        parts = [costly.part("audio", data)] * client.draw.choice([1, 2, 16, 64])
        return client.post(CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 20})
    name = client.draw.choice(["POST /v1/audio/transcriptions", "POST /v1/audio/translations"])
    body = form({"model": client.target.model}, ("file", data))
    return client.send(name, body, f"{FORM_TYPE}; boundary={BOUNDARY}")


def form(fields: dict[str, str], *files: tuple[str, bytes]) -> bytes:
    start = f"--{BOUNDARY}\r\ncontent-disposition: form-data; "
    parts = [f'{start}name="{name}"\r\n\r\n{text}\r\n'.encode() for name, text in fields.items()]
    parts += [f'{start}name="{name}"; filename="x"\r\n\r\n'.encode() + data + b"\r\n" for name, data in files]
    return b"".join([*parts, f"--{BOUNDARY}--\r\n".encode()])


def texts(client: Attacker) -> str:
    text = client.draw.choice(list(costly.TEXTS.values()))()
    message = {"messages": [{"role": client.draw.choice(["user", "system", "assistant", "tool"]), "content": text}]}
    few = {"max_tokens": 8}
    name, body = client.draw.choice(
        [
            (CHAT, message | few),
            (CHAT, {"messages": message["messages"] * 4} | few),
            ("POST /v1/messages", message | few),
            ("POST /v1/messages/count_tokens", message),
            (RESPONSES, {"input": text, "max_output_tokens": 8, "store": True}),
            ("POST /v1/responses/input_tokens", {"input": text}),
            (COMPLETIONS, {"prompt": [text] * client.draw.choice([1, 8]), **few}),
            ("POST /tokenize", {"prompt": text}),
            ("POST /v1/audio/speech", {"input": text, "voice": "ada"}),
            ("POST /v1/images/generations", {"prompt": text}),
        ]
    )
    return client.post(name, body)


def grammars(client: Attacker) -> str:
    schema = client.draw.choice(list(costly.SCHEMAS.values()))()
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    body = client.draw.choice(
        [
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": schema, "strict": True},
                }
            },
            {"structured_outputs": {"json": schema}},
            {"structured_outputs": {"regex": client.draw.choice(costly.PATTERNS)}},
            {"structured_outputs": {"grammar": client.draw.choice(costly.GRAMMARS)}},
            {"structured_outputs": {"choice": [f"{i} " * 9 for i in range(5000)]}},
            {"tools": [tool], "tool_choice": "required"},
            {"tools": [tool] * 30},
        ]
    )
    message = {"role": "user", "content": "What is seven plus five?"}
    return client.post(CHAT, {"messages": [message], "max_tokens": client.draw.choice([16, 400]), **body})


def many_answers(client: Attacker) -> str:
    bias = {str(i): client.draw.uniform(-9, 9) for i in range(client.draw.choice([0, 1024, 1024, 2000]))}
    prompts = ["seven plus"] * client.draw.choice([1, 8, 128])
    body = {"prompt": prompts, "n": client.draw.choice([1, 2, 8]), "max_tokens": 400, "logit_bias": bias}
    return client.post(COMPLETIONS, body | {"ignore_eos": True, "logprobs": client.draw.choice([None, 5, 20])})


def endless_answers(client: Attacker) -> str:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me about the sea."}], "ignore_eos": True}
    body |= {"n": client.draw.choice([1, 1, 8]), "stream": client.draw.random() < 0.7, "temperature": 2.0}
    if client.draw.random() < 0.4:
        body |= {"modalities": ["text", "audio"], "audio": {"format": "wav", "voice": "ada"}}
    return client.post(CHAT, body | {"priority": client.draw.choice([None, -5, 2**31 - 1])})


def drawings(client: Attacker) -> str:
    body = {"prompt": "a yellow cross on a blue ground", "n": client.draw.choice([1, 4, 10])}
    body |= {"num_inference_steps": client.draw.choice([8, 50, 1000]), "model": PAINTER}
    size = client.draw.choice(["128x128", "256x256", "1024x1024", "16x16", "4096x4096", "99999x1"])
    name = client.draw.choice(["POST /v1/images/generations"] * 4 + ["POST /v1/videos", "POST /v1/audio/generations"])
    return client.post(name, body | {"size": size})


def speech(client: Attacker) -> str:
    text = "The old king likes the boat. " * client.draw.choice([1, 20, 1700, 2000])
    body = {"input": text, "voice": "ada", "response_format": client.draw.choice(["wav", "mp3", "opus", "pcm", "x"])}
    return client.post("POST /v1/audio/speech", body | {"speed": client.draw.choice([1, 0.25, 4])})


def files(client: Attacker) -> str:
    """Data URLs that are more objects than bytes."""
    head, piece = client.draw.choice(OF_FILES)
    kind = "video_url" if "video" in head else "audio_url"
    part = {"type": kind, kind: {"url": head + piece * client.draw.choice([MIB, 20 * MIB])}}
    return client.post(CHAT, {"messages": [{"role": "user", "content": [part]}]})


def large_bodies(client: Attacker) -> str:
    """As large as one may be: a text, a file, or what is no JSON; or it does not end."""
    size = client.draw.choice([20, 100, 250]) * MIB
    name = client.draw.choice([CHAT, RESPONSES, COMPLETIONS, "POST /tokenize", "POST /v1/audio/transcriptions"])
    text = b"A" * size
    message = b'{"model": "quartet-demo", "messages": [{"role": "user", "content": '
    start, end = client.draw.choice(
        [
            (message + b'"', b'"}]}'),
            (message + b'[{"type": "input_audio", "input_audio": {"format": "wav", "data": "', b'"}}]}]}'),
            (b'{"input": "', b'"}'),
            (b'{"prompt": "', b'"}'),
            (b"[", b""),
        ]
    )
    return client.send(name, start + text + end)


def conversations(client: Attacker) -> str:
    item = {"type": "message", "role": "user", "content": "x" * client.draw.choice([1, 9000, 1_000_000, 3_000_000])}
    for _ in range(client.draw.choice([0, 1, 20])):
        client.post("POST /v1/conversations", {"items": [item] * client.draw.choice([0, 1, 20])}, whole=True)
    name = client.draw.choice([name for name in table.ENDPOINTS if "{conversation_id}" in name])
    return client.send(line_of(client, name), json.dumps({"items": [item] * 20, "metadata": {"a": "b"}}).encode())


def background(client: Attacker) -> str:
    body = {"input": "What is seven plus five?", "background": True, "store": True, "max_output_tokens": 200}
    if client.draw.random() < 0.5:
        body |= {"previous_response_id": client.id()}
    if client.draw.random() < 0.5:
        return client.post(RESPONSES, body)
    return client.send(line_of(client, client.draw.choice([name for name in WITH_NAME if "response_id" in name])))


def secrets(client: Attacker) -> str:
    length = client.draw.choice([1, 9000, 250_000, 300_000])
    deflates = client.draw.random() < 0.5  # else it is kept, unless it is short
    words = "x" * length if deflates else "".join(client.draw.choices("abcdefghijklmnop", k=length))
    session = {"type": "realtime", "instructions": words}
    body = {"session": session, "expires_after": {"anchor": "created_at", "seconds": 7200}}
    for _ in range(client.draw.choice([0, 30])):
        client.send("POST /v1/realtime/client_secrets", json.dumps(body).encode(), whole=True)
    return client.send("POST /v1/realtime/client_secrets", json.dumps(body).encode())


def media_by_url(client: Attacker) -> str:
    """Of names that nobody has, and of addresses that are private. Nothing leaves this machine but look-ups."""
    hosts = ["127.0.0.1:1", "localhost:22", "[::1]", "169.254.169.254", "0x7f.1", "nobody{}.invalid", "silent{}.test"]
    url = f"http://{client.draw.choice(hosts).format(next(client.numbers))}/x.png"
    parts = [{"type": "image_url", "image_url": {"url": url}}] * client.draw.choice([1, 16, 64])
    return client.post(CHAT, {"messages": [{"role": "user", "content": parts}]})


KINDS: dict[Callable[[Attacker], str], float] = {
    json_costs: 3,
    odd_values: 3,
    forms: 1,
    names: 0.5,
    lists: 0.5,
    the_wire: 2,
    pictures: 2,
    silences: 2,
    texts: 3,
    grammars: 3,
    many_answers: 2,
    endless_answers: 2,
    drawings: 1,
    speech: 1,
    large_bodies: 0.7,
    files: 0.7,
    conversations: 1,
    background: 1,
    secrets: 0.5,
    media_by_url: 1,
}
