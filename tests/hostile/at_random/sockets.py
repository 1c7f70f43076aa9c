"""Hostile WebSockets, connections and gRPC calls."""

import base64
import json
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from typing import Any

import grpc
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from quartet.v1 import code2wav_pb2, dit_pb2, profile_pb2, server_info_pb2, stream_pb2, talker_pb2, thinker_pb2
from tests.hostile.at_random.attacker import Attacker
from tests.hostile.meter import MIB
from tests.hostile.table import EVENTS, SOCKETS
from tests.hostile.test_requests import BOUNDARY, FORM_TYPE
from tests.hostile.test_sockets import VALUES, event
from tests.hostile.wire import Wire, head

_SILENCE = base64.b64encode(bytes(48_000)).decode()  # a second
_NOISE = base64.b64encode(bytes(i * i % 251 for i in range(48_000))).decode()
_SERVICES = [
    service
    for module in (code2wav_pb2, dit_pb2, profile_pb2, server_info_pb2, stream_pb2, talker_pb2, thinker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
_NO_PROFILES = [service for service in _SERVICES if "Profile" not in service.name]


def events(client: Attacker) -> str:
    """Costly messages to one session, one after the other."""
    path = client.draw.choice(list(EVENTS))
    outcome = "open to its end"
    try:
        with client.socket(path) as socket:
            for _ in range(client.draw.randrange(1, 6)):
                kind = client.draw.choice(list(EVENTS[path]))
                place = client.draw.choice(EVENTS[path][kind])
                socket.send(event(kind, place, client.draw.choice(list(VALUES.values()))))
                with suppress(TimeoutError):
                    outcome = _of(socket.recv(timeout=5))
    except InvalidStatus as error:
        return str(error.response.status_code)
    except ConnectionClosed as error:
        return f"closed: {error.rcvd.code if error.rcvd else 1006}"
    except (OSError, InvalidHandshake) as error:
        return type(error).__name__
    return outcome


def _of(message: str | bytes) -> str:
    answer = json.loads(message)
    error = answer.get("error") or {}
    code = error.get("code") if isinstance(error, dict) else error
    return (
        f"500 {str(answer)[:300]}" if code in ("internal_error", "server_error") else f"{answer['type']} {code or ''}"
    )


def sessions(client: Attacker) -> str:
    """As many as there may be, which are spoken to and not read."""
    opened, outcome = 0, "open to their end"
    with ExitStack() as exits:
        for _ in range(client.draw.choice([1, 4, 40])):
            try:
                socket = exits.enter_context(client.socket(client.draw.choice(SOCKETS)))
                opened += 1
                for message in _talk(client):
                    socket.send(json.dumps(message))
            except InvalidStatus as error:
                outcome = str(error.response.status_code)
            except (ConnectionClosed, OSError, InvalidHandshake) as error:
                outcome = type(error).__name__
        client.pause(20)
    return outcome


def _talk(client: Attacker) -> list[dict[str, Any]]:
    detection = client.draw.choice([None, {"type": "server_vad"}, {"type": "semantic_vad"}])
    sound = {"input": {"turn_detection": detection, "transcription": {"model": client.target.model}}}
    pieces = [client.draw.choice([_SILENCE, _NOISE])] * client.draw.choice([1, 10, 100])
    many = client.draw.choice([1, 1, 20])
    content = [{"type": "input_text", "text": "x" * MIB}]
    item = {"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": content}}
    return [
        {"type": "session.update", "session": {"type": "realtime", "audio": sound}},
        *([item] * client.draw.choice([0, 0, 1, 60])),
        *({"type": "input_audio_buffer.append", "audio": piece} for piece in pieces),
        *([{"type": "input_audio_buffer.commit"}, {"type": "response.create"}] * many),
    ]


def idle_connections(client: Attacker) -> str:
    """Many at a time, with nothing or half a request."""
    parts = [b"", b"GET /v1/models HTTP/1.1\r\nhost: loc", b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
    wires: list[Wire] = []
    try:
        for _ in range(client.draw.choice([10, 100, 400])):
            wires.append(Wire(client.target.url, address=client.address))
            wires[-1].send(client.draw.choice(parts))
        client.pause(15)
        return "left"
    except OSError as error:
        return type(error).__name__
    finally:
        for wire in wires:
            wire.close()


def uploads(client: Attacker) -> str:
    """Of a file that does not end."""
    wire = Wire(client.target.url, address=client.address)
    wire.socket.settimeout(30)
    kind = {"content-type": f"{FORM_TYPE}; boundary={BOUNDARY}", "content-length": str(256 * MIB)}
    start = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'.encode()
    path = client.draw.choice(["/v1/audio/transcriptions", "/v1/images/edits", "/v1/videos", "/v1/audio/voices"])
    with closing(wire), suppress(TimeoutError):
        wire.send(head(f"POST {path}", client.headers() | kind) + start)
        for _ in range(client.draw.choice([1, 16, 64, 200])):
            if not wire.send(bytes(MIB)):
                return str(wire.read().status)
        client.pause(20)
    return "left"


def pipelines(client: Attacker) -> str:
    """Requests one behind the other, of which no answer is read."""
    wire = Wire(client.target.url, 4096, client.address)
    wire.socket.settimeout(10)
    body = json.dumps({"model": client.target.model, "messages": [{"role": "user", "content": "hi"}]}).encode()
    request = head("POST /v1/chat/completions", client.headers() | {"content-length": str(len(body))}) + body
    with closing(wire), suppress(TimeoutError):
        wire.send(request * client.draw.choice([2, 15, 40]))
        client.pause(5)
    return "left"


def stages(client: Attacker) -> str:
    """Messages to a stage that are none, or too large."""
    service = client.draw.choice(_NO_PROFILES)
    method = client.draw.choice(list(service.methods))
    rubbish = [
        b"",
        b"\xff" * 100,
        client.draw.randbytes(2000),
        b"\x0a\x05hello",
        bytes(17 * MIB),
        b"\x0a\x00" * 100_000,
    ]
    path = f"/{service.full_name}/{method.name}"
    with grpc.insecure_channel(client.draw.choice(client.target.stages), _UNLIMITED) as channel:
        call = channel.stream_stream(path)
        messages = client.draw.choices(rubbish, k=client.draw.randrange(1, 4))
        try:
            for _ in call(iter(messages), timeout=client.draw.choice([0.2, 5])):
                pass
        except grpc.RpcError as error:
            return error.code().name  # pyright: ignore[reportAttributeAccessIssue]
    return "OK"


_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


def stage_ports(client: Attacker) -> str:
    """Bytes to a stage that are no HTTP/2."""
    starts = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04",
    ]
    wire = Wire(f"http://{client.draw.choice(client.target.stages)}")
    try:
        wire.send(client.draw.choice(starts) + client.draw.randbytes(client.draw.choice([0, 9, 5000])))
        client.pause(2)
    finally:
        wire.close()
    return "left"


KINDS: dict[Callable[[Attacker], str], float] = {
    events: 3,
    sessions: 1,
    idle_connections: 0.7,
    uploads: 0.7,
    pipelines: 1,
    stages: 1,
    stage_ports: 0.5,
}
