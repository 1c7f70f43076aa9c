"""`/v1/realtime` before real stages: conversations, interruptions, and what is left of sessions that ended anyhow."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from benchmarks.conversations.utterances import silence
from benchmarks.systems.gateways import GatewayProcess
from tests.support.clients.realtime_chaos import chaos
from tests.support.clients.realtime_client import kinds, sound_of
from tests.support.clock import until
from tests.support.memory import counted, in_use
from tests.support.systems.realtime import (
    ENDLESS,
    GREEDY,
    conversation,
    cuts_of,
    gateway_of,
    nothing_left,
    send,
    spoken,
    turn,
    work_began,
)
from tests.support.systems.stack import Stack

pytestmark = pytest.mark.e2e
PLACES = 64  # sessions that a gateway of these tests has
MOST_BYTES = 32 * 2**20  # of a message
MORE_BLOCKS, MORE_BYTES = 40, 8 * 1024  # of memory in use, for each session that has ended
SMALL = ("--max-realtime-sessions", str(PLACES))
MANUAL = {"audio": {"input": {"turn_detection": None}}}
# What is said, in whose voice; a pause of thought between the parts.
TURNS = (
    ("en-us", "Tell me about the sea, and about the boats."),
    ("en-us", "I would like to know", "why the sky is blue in the morning."),
    ("en", "Name three things that swim,", "and one of them", "should be able to fly as well."),
    ("de", "Und was macht der Zug am Bahnhof?"),
)


@pytest.fixture(scope="module")
def greedy(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway whose answers are short, and the same to the same."""
    with gateway_of(stack, tmp_path_factory.mktemp("greedy"), GREEDY, *SMALL) as started:
        yield started


@pytest.fixture(scope="module")
def endless(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway whose answers take minutes, unless they are ended."""
    with counted(), gateway_of(stack, tmp_path_factory.mktemp("endless"), ENDLESS, *SMALL) as started:
        yield started


def speculations(gateway: GatewayProcess) -> dict[str, float]:
    scrape = gateway.scrape()
    return {
        outcome: scrape.total("quartet_gateway_speculations_total", outcome=outcome) or 0.0
        for outcome in ("used", "wasted")
    }


async def test_a_recorded_conversation(stack: Stack, greedy: GatewayProcess):
    """The client checks each event and their order: none of a dropped speculation is among them."""
    await nothing_left(stack, [greedy])
    before, pauses = speculations(greedy), 0
    async with conversation(greedy, stack.key) as client:
        for number, (voice, *clauses) in enumerate(TURNS):
            *parts, last = spoken(*clauses, voice=voice, seed=number)
            for part in parts:
                begun = await work_began(greedy)
                await send(client, part, silence(0.4, seed=number))
                await begun()  # on an answer that nobody will want
                pauses += 1
            events = await turn(client, last, silence(1.0, seed=number))
            assert kinds(events)[:7] == [
                "input_audio_buffer.speech_started",
                "input_audio_buffer.speech_stopped",
                "input_audio_buffer.committed",
                "conversation.item.added",
                "conversation.item.done",
                "response.created",
                "response.output_item.added",
            ]
            assert sound_of(events)
        responses = client.order.responses
    assert len(responses) == len(TURNS)
    assert {response["status"] for response in responses} <= {"completed", "incomplete"}
    after = speculations(greedy)
    assert after["used"] - before["used"] == len(TURNS)
    assert after["wasted"] - before["wasted"] >= pauses == 3


def said(events: list[dict[str, Any]]) -> tuple[str, np.ndarray]:
    """Transcript and sound, PCM16, of an answer."""
    samples = np.frombuffer(sound_of(events), "<i2").astype(int)
    return events[-1]["response"]["output"][0]["content"][0]["transcript"], samples


async def test_a_speculation_says_what_a_plain_turn_says(stack: Stack, greedy: GatewayProcess):
    answers = []
    for _, *clauses in TURNS[:2]:
        (sound,) = spoken(" ".join(clauses))
        before = speculations(greedy)
        async with conversation(greedy, stack.key) as client:
            early = said(await turn(client, sound))
        assert speculations(greedy)["used"] == before["used"] + 1
        whole = np.concatenate([sound, silence(1.0)])
        ((begin_ms, end_ms),) = await cuts_of(whole)
        assert begin_ms == 0
        async with conversation(greedy, stack.key, **MANUAL) as client:
            await send(client, whole[: end_ms * 24])
            await client.ask("input_audio_buffer.commit", "conversation.item.done")
            plain = said(await client.respond())
        assert early[0] == plain[0]
        assert len(early[1]) == len(plain[1])
        # two plain turns are no nearer: code2wav sums pieces of other sizes in another order
        assert np.abs(early[1] - plain[1]).max() <= 1
        answers.append(early)
    assert answers[0][0] != answers[1][0]


async def test_who_speaks_ends_the_answer_in_all_stages(stack: Stack, endless: GatewayProcess):
    await nothing_left(stack, [endless])
    (sound,) = spoken("Please stop, I have heard enough of it.")
    async with conversation(endless, stack.key) as client:
        await client.say("Tell me a story.")
        await client.send("response.create")
        events = [event for _ in range(8) for event in await client.until("response.output_audio.delta")]
        await send(client, sound)  # and no more: the turn has no end yet
        events += await client.until("response.done")
        done = events[-1]["response"]
        assert done["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        await nothing_left(stack, [])
        await client.ask("input_audio_buffer.clear", "input_audio_buffer.cleared")
        written = "".join(event["delta"] for event in events if event["type"].endswith("audio_transcript.delta"))
        heard = done["output"][0]["content"][0]["transcript"]
        assert written.startswith(heard)
        assert 0 < len(heard) < len(written)
        await client.say("And then?")
        answer = await client.respond(max_output_tokens=1, output_modalities=["text"])
    told = [("user", "Tell me a story."), ("assistant", heard), ("user", "And then?")]
    body = {
        "model": stack.model,
        "messages": [{"role": role, "content": text} for role, text in told],
        "max_tokens": 1,
    }
    chat = stack.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert answer[-1]["response"]["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def sounds() -> list:
    return [*spoken("Tell me about the sea.", seed=1), *spoken("Why is the sky blue in the morning?", seed=2)]


async def test_sessions_that_end_anyhow_leave_nothing(stack: Stack, endless: GatewayProcess):
    await chaos(endless, stack.key, sounds(), 20, seed=0)
    await nothing_left(stack, [endless])


@pytest.mark.weekly
async def test_600_sessions_that_end_anyhow_leave_nothing(stack: Stack, endless: GatewayProcess):
    used, open_files = [], []
    for seed in range(8):
        await chaos(endless, stack.key, sounds(), 75, seed)
        await nothing_left(stack, [endless])
        used.append(await in_use(endless.pid))
        open_files.append(psutil.Process(endless.pid).num_fds())
    print("gateway after each 75 sessions:", *used, "; files:", *open_files)
    # A little is kept of the last requests, for traces. A session that stays has hundreds of objects, and sound.
    assert used[7].blocks - used[3].blocks < 300 * MORE_BLOCKS
    assert used[7].malloc_bytes - used[3].malloc_bytes < 300 * MORE_BYTES
    assert open_files[-1] <= open_files[0] + 4
    async with conversation(endless, stack.key) as client:  # it works as before
        await client.say("Tell me a story.")
        await client.send("response.create")
        await client.until("response.output_audio.delta")


async def test_bad_input_is_refused_and_the_session_goes_on(stack: Stack, greedy: GatewayProcess):
    async with conversation(greedy, stack.key, **MANUAL) as client:
        await client.socket.send(b"\x00\x01")
        assert (await client.event())["error"]["param"] == "type"
        await client.socket.send("{")
        assert (await client.event())["error"]["code"] == "invalid_json"
        giant = "A" * (15 * 2**20 + 4)
        refused = await client.refusal("input_audio_buffer.append", audio=giant)
        assert (refused["code"], refused["param"]) == ("string_above_max_length", "audio")
        assert (await client.ask("input_audio_buffer.append", "error", audio=giant + giant[: 2**20]))["error"][
            "code"
        ] == "event_too_large"
        for audio in ("no base64!", "AAAAA", "ä" * 8):
            assert (await client.refusal("input_audio_buffer.append", audio=audio))["param"] == "audio"
        for kind, code in (
            ("input_audio_buffer.commit", "input_audio_buffer_commit_empty"),
            ("response.cancel", "response_cancel_not_active"),
            ("response.create", None),
        ):
            if code is not None:
                assert (await client.refusal(kind))["code"] == code
        truncated = {"item_id": "item_none", "content_index": 0, "audio_end_ms": 10}
        assert "item_none" in (await client.refusal("conversation.item.truncate", **truncated))["message"]
        await client.say("Hello.")
        assert (await client.respond())[-1]["response"]["status"] in ("completed", "incomplete")


async def test_a_message_without_end_ends_the_session(stack: Stack, endless: GatewayProcess):
    async with conversation(endless, stack.key) as client:
        with suppress(ConnectionClosed):  # while it is sent
            await client.socket.send("x" * (MOST_BYTES + 1))
        await client.socket.wait_closed()
        assert client.socket.close_code == CloseCode.MESSAGE_TOO_BIG
    await nothing_left(stack, [endless])


async def crowd(gateway: GatewayProcess, key: str, sockets: int, places: int) -> None:
    """More sockets than there are places say nothing, while a conversation goes on."""
    headers = {"authorization": f"Bearer {key}"}
    url = gateway.url.replace("http", "ws") + "/v1/realtime"
    async with AsyncExitStack() as exits:
        client = await exits.enter_async_context(conversation(gateway, key))
        open_ = asyncio.Semaphore(50)  # at a time: a listen queue is short

        async def silent() -> ClientConnection:
            async with open_:
                opened = await exits.enter_async_context(
                    connect(url, additional_headers=headers, open_timeout=120, compression=None)
                )
                first = json.loads(await opened.recv())
                if first["type"] == "error":
                    assert first["error"]["code"] == "session_limit"
                    assert f"has {places} realtime sessions" in first["error"]["message"]
                    await opened.wait_closed()
                    assert opened.close_code == CloseCode.TRY_AGAIN_LATER
                return opened

        (sound,) = spoken("Tell me about the sea.")
        crowding = asyncio.gather(*(silent() for _ in range(sockets)))
        await turn(client, sound)
        silent_ones = await crowding
        assert sum(opened.close_code is None for opened in silent_ones) == places - 1
        assert (await turn(client, sound))[-1]["response"]["status"] in ("completed", "incomplete")


async def test_a_crowd_that_says_nothing_is_refused(stack: Stack, greedy: GatewayProcess):
    await nothing_left(stack, [greedy])
    await crowd(greedy, stack.key, PLACES + 16, PLACES)
    await nothing_left(stack, [greedy])


@pytest.mark.long
async def test_a_thousand_sockets_that_say_nothing(stack: Stack, tmp_path: Path):
    with gateway_of(stack, tmp_path, GREEDY) as ordinary:
        await crowd(ordinary, stack.key, 1000, 256)
        await nothing_left(stack, [ordinary])


@pytest.mark.long
async def test_who_reads_nothing_is_put_out(stack: Stack, endless: GatewayProcess):
    """By the server: the client keeps its socket open."""
    await nothing_left(stack, [endless])
    process = psutil.Process(endless.pid)
    before_mib, before_files = process.memory_info().rss / 2**20, process.num_fds()
    async with silent_reader(endless.url, stack.key) as opened:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Tell me a story."}]}
        for event in ({"type": "conversation.item.create", "item": item}, {"type": "response.create"}):
            await opened.send(json.dumps(event))
        await until(lambda: stack.in_flight()["talker"] == 1)
        most_mib = before_mib
        while any(stack.in_flight().values()):
            most_mib = max(most_mib, process.memory_info().rss / 2**20)
            await asyncio.sleep(0.2)
        await nothing_left(stack, [endless])
        print(f"gateway with a slow reader: {before_mib:.1f} MiB before, {most_mib:.1f} at most")
        assert most_mib < before_mib + 64
        await until(lambda: process.num_fds() <= before_files + 2)


def silent_reader(url: str, key: str) -> connect:
    """A socket of which nothing is read: its buffers are small, and nobody empties them."""
    plain = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port))
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    return connect(
        url.replace("http", "ws") + "/v1/realtime",
        additional_headers={"authorization": f"Bearer {key}"},
        sock=plain,
        max_queue=1,
        ping_interval=None,
        close_timeout=0.1,
        open_timeout=120,
        compression=None,
    )


async def test_a_gateway_that_stops_completes_answers_and_tells_all_sessions(stack: Stack, tmp_path: Path):
    """The spoken answer that is under way is whole; a gateway that is killed leaves no word."""
    (sound,) = spoken("Tell me about the sea.")
    with gateway_of(stack, tmp_path, GREEDY, *SMALL) as gateway:
        async with AsyncExitStack() as exits:
            idle = [await exits.enter_async_context(conversation(gateway, stack.key)) for _ in range(4)]
            speaking = await exits.enter_async_context(conversation(gateway, stack.key))
            await send(speaking, sound, silence(1.0))
            answer = await speaking.until("response.output_audio.delta")
            gateway.process.terminate()
            for client in [*idle, speaking]:
                *events, last = await client.until("error")
                assert last["error"]["code"] == "gateway_stopping"
                await client.socket.wait_closed()
                assert client.socket.close_code == CloseCode.SERVICE_RESTART
            answer += events
        assert answer[-1]["response"]["status"] in ("completed", "incomplete")
        assert len(sound_of(answer)) > 0
        assert await asyncio.to_thread(gateway.process.wait) == 0
    with gateway_of(stack, tmp_path, GREEDY, *SMALL) as gateway:
        async with conversation(gateway, stack.key) as client:
            await send(client, sound, silence(1.0))
            await client.until("response.output_audio.delta")
            gateway.process.kill()
            await client.socket.wait_closed()
            assert client.socket.close_code == CloseCode.ABNORMAL_CLOSURE
    await nothing_left(stack, [])
