"""`quartet wyoming` as a process, before a gateway of scripted stages."""

import asyncio
import contextlib
import json
import wave
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from wyoming.asr import Transcribe
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.event import Event, Eventable
from wyoming.info import Describe, SelectProgram
from wyoming.ping import Ping
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart, SynthesizeStop, SynthesizeVoice

from cli.wyoming.sound import MAX_S
from gateway.access.api_keys import digest, new_key
from quartet.v1 import server_info_pb2
from services.common.errors import QueueFull
from tests.support.clients.wyoming_client import WyomingServer, pcm, recorded, types, wyoming_server
from tests.support.scripted.thinker import PIECES
from tests.support.systems.command import in_this_process
from tests.support.systems.gateway import SPEECH, Running, running
from tests.support.systems.stack import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")
QUESTION = Path(__file__).parents[2] / "cli" / "assets" / "question.wav"
SAID = "".join(PIECES)
TEXT = "The boats are out."
FORMATS = {"8 bits": (16_000, 1, 1), "stereo": (16_000, 2, 2), "24 bits": (48_000, 3, 1), "32 bits": (8_000, 4, 2)}


class Unknown(Eventable):
    """An event as it comes."""

    def __init__(self, kind: str, data: dict[str, Any]) -> None:
        self._event = Event(kind, data)

    def event(self) -> Event:
        return self._event

    @staticmethod
    def is_type(event_type: str) -> bool:
        return False

    @staticmethod
    def from_event(event: Event) -> "Unknown":
        return Unknown(event.type, event.data)


@contextlib.asynccontextmanager
async def wyoming(home: Path, url: str, *flags: str, is_up: bool = True) -> AsyncIterator[WyomingServer]:
    """Waits in a thread: the gateway is in this process."""
    server = wyoming_server(home, url, *flags, is_up=is_up)
    started = await asyncio.to_thread(server.__enter__)
    try:
        yield started
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(module_speech_gateway: Running, tmp_path_factory) -> AsyncIterator[WyomingServer]:
    async with wyoming(tmp_path_factory.mktemp("wyoming"), module_speech_gateway.url) as started:
        yield started


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


def question(rate: int = 16_000, width: int = 2, channels: int = 1) -> list[Eventable]:
    """A spoken question. `rate` is a multiple of 16 kHz, or its half."""
    with wave.open(str(QUESTION)) as opened:
        samples = np.frombuffer(opened.readframes(opened.getnframes()), "<i2").astype(np.int64)
    samples = samples[::2] if rate == 8_000 else np.repeat(samples, rate // 16_000)
    if width == 1:
        sound = (samples // 256 + 128).astype("u1").tobytes()
    else:
        wide = (samples << (8 * (width - 2))).astype("<i8")
        sound = wide.view("u1").reshape(-1, 8)[:, :width].tobytes()
    mono = [sound[begin : begin + width] for begin in range(0, len(sound), width)]
    return recorded(rate, width, channels, b"".join(sample * channels for sample in mono))


async def transcript(server: WyomingServer, *events: Eventable) -> list[Event]:
    async with server.connected() as client:
        await client.send(*events)
        return await client.until("transcript-stop")


@pytest.mark.parametrize("form", FORMATS)
async def test_sound_of_any_format_is_written_down(gateway, server, form):
    events = await transcript(server, Transcribe(), *question(*FORMATS[form]))
    assert types(events) == ["transcript-start", "transcript-chunk", "transcript", "transcript-stop"]
    assert "".join(event.data["text"] for event in events if event.type == "transcript-chunk") == SAID
    assert events[-2].data["text"] == SAID


async def test_language_and_names_reach_the_thinker_and_sound_needs_no_request(gateway, server):
    asked = Transcribe(language="de-DE", transcript_names=["Ada"], transcript_terms=["Kontor"])
    events = await transcript(server, asked, *question())
    assert (events[0].data, events[-2].data) == ({"language": "de-DE"}, {"text": SAID, "language": "de-DE"})
    (start,) = gateway.scripts["thinker"].requests
    said = "Transcribe the German audio into text. Names and terms in it may be: Ada, Kontor"
    assert start.messages[0].content[-1].text == said
    assert (await transcript(server, *question()))[-2].data == {"text": SAID}


async def test_what_a_transcription_must_not_be_is_said_by_name(gateway, server):
    refused: dict[str, tuple[list[Eventable], tuple[str, str]]] = {
        "language": (
            [Transcribe(language="klingon"), *question()],
            ("language: no language 'klingon'", "invalid_value"),
        ),
        "model": ([Transcribe(name="none"), *question()], ("none", "model_not_found")),
    }
    for asked, (text, code) in refused.values():
        error, *end = await transcript(server, *asked)
        assert (error.type, error.data["code"], text in error.data["text"]) == ("error", code, True)
        assert [event.type for event in end] == ["transcript", "transcript-stop"]
        assert end[0].data["text"] == ""


async def test_a_sound_that_is_too_long_is_refused_once_and_the_next_is_heard(gateway, server):
    rate = 1_000
    long = recorded(rate, 1, 1, bytes(rate) * (MAX_S + 3), block=rate)
    async with server.connected() as client:
        await client.send(*long, Ping())
        error, pong = await client.until("pong")
        assert (error.type, error.data["code"]) == ("error", "too_large")
        assert f"{MAX_S} s" in error.data["text"]
        await client.send(*question())
        assert (await client.until("transcript-stop"))[-2].data["text"] == SAID
    assert pong.type == "pong"


async def test_events_that_are_wrong_are_refused_and_others_have_no_effect(gateway, server):
    wrong: list[tuple[Eventable, str]] = [
        (Unknown("synthesize", {}), "synthesize: a member is missing"),
        (Unknown("synthesize", {"text": 7}), "text: must be a text"),
        (Unknown("synthesize", {"text": TEXT, "voice": 7}), "synthesize: a member is missing"),
        (Unknown("synthesize", {"text": TEXT, "voice": {"name": 7}}), "voice.name: must be a text"),
        (Synthesize(TEXT, text_format="ssml"), "text_format: only text"),
        (AudioStart(16_000, 9, 1), "width: must be a whole number of 1 to 4"),
        (AudioStop(), ""),
        (AudioStart(16_000, 2, 1), ""),
        (AudioChunk(8_000, 2, 1, b"ab"), "audio-chunk: its rate"),
        (AudioChunk(16_000, 2, 1, b"ab"), ""),
        (SelectProgram("quartet"), ""),
        (Unknown("run-pipeline", {}), ""),
        (SynthesizeChunk("late"), ""),
        (SynthesizeStop(), ""),
    ]
    async with server.connected() as client:
        for event, text in wrong:
            await client.send(event, Ping("all"))
            *errors, pong = await client.until("pong")
            assert pong.data == {"text": "all"}
            assert [(error.type, error.data["code"], error.data["text"][: len(text)]) for error in errors] == (
                [("error", "invalid", text)] if text else []
            ), event.event()
        await client.send(AudioStop(), AudioStop())
        assert (await client.next()).data["text"] == "audio-stop: no sound came before it"
        await client.send(Synthesize(TEXT))
        assert types(await client.until("audio-stop")) == ["audio-start", "audio-chunk", "audio-stop"]


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"type": 1, "data_length": 99999999999}\n', b"[" * 60_000 + b"\n"]
)
async def test_what_is_no_event_ends_its_connection_alone(gateway, server, sent):
    host, port = server.uri.removeprefix("tcp://").split(":")
    async with server.connected() as other:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()
        assert (await other.info()).asr


@pytest.mark.parametrize("stage", ["talker", "thinker"])
async def test_a_client_that_leaves_cancels_its_request(gateway, server, stage):
    script = gateway.scripts[stage]
    script.hold = True
    async with server.connected() as client:
        await client.send(*([Synthesize(TEXT)] if stage == "talker" else question()))
        async with asyncio.timeout(60):
            await script.holding.wait()
        assert script.ended == []
    await gateway.until(lambda: script.ended == ["cancelled"])


async def test_requests_of_a_connection_are_answered_one_after_another(gateway, server):
    async with server.connected() as client:
        await client.send(Synthesize(TEXT), *question(), Synthesize(TEXT))
        heard = await client.until("transcript-stop") + await client.until("audio-stop")
    sound, words = ["audio-start", "audio-chunk", "audio-stop"], ["transcript-start", "transcript-chunk"]
    assert types(heard) == [*sound, *words, "transcript", "transcript-stop", *sound]


async def test_more_requests_than_may_wait_are_refused(gateway, server):
    script = gateway.scripts["talker"]
    script.hold = True
    async with server.connected() as client:
        await client.send(Synthesize(TEXT))
        async with asyncio.timeout(60):
            await script.holding.wait()
        await client.send(*[Synthesize(TEXT)] * 5)
        error = (await client.until("error"))[-1]
        assert (error.data["code"], "more than 4 requests" in error.data["text"]) == ("full", True)
        script.go_on()
        for _ in range(5):
            await client.until("audio-stop")


async def test_a_text_that_is_typed_is_one_speech(gateway, server):
    async with server.connected() as client:
        await client.send(SynthesizeStart(), SynthesizeChunk("The boats "), SynthesizeChunk(""))
        await client.send(SynthesizeChunk("are out."), Synthesize("The boats are out."), SynthesizeStop())
        events = await client.until("synthesize-stopped")
        assert types(events) == ["audio-start", "audio-chunk", "audio-stop", "synthesize-stopped"]
        await client.send(Synthesize(TEXT))
        assert pcm(await client.until("audio-stop")) == pcm(events)
    typed, whole = gateway.scripts["talker"].requests
    assert typed.text.text + "".join(gateway.scripts["talker"].typed) == whole.text.text == TEXT


async def test_an_error_in_mid_sound_ends_the_sound(gateway, server):
    gateway.scripts["code2wav"].error, gateway.scripts["code2wav"].after = QueueFull("8 requests run"), 1
    async with server.connected() as client:
        await client.send(SynthesizeStart(), SynthesizeChunk(TEXT), SynthesizeStop())
        events = await client.until("synthesize-stopped")
        assert types(events) == ["audio-start", "audio-chunk", "error", "audio-stop", "synthesize-stopped"]
        gateway.scripts["talker"].hold = True  # a talker waits for words, and the script would not
        await client.send(SynthesizeStart(), SynthesizeChunk("?!"), SynthesizeStop())
        error, end = await client.until("synthesize-stopped")
        assert ("nothing to say" in error.data["text"], end.type) == (True, "synthesize-stopped")


async def test_voices_and_languages_are_those_of_the_model(tmp_path):
    names = ["chinese", "english", "german", "beijing_dialect"]
    talker = server_info_pb2.TalkerInfo(
        speakers=["chelsie"], max_context_positions=4096, reads_text=True, languages=names
    )
    async with (
        running(SPEECH, talker) as gateway,
        wyoming(tmp_path, gateway.url) as server,
        server.connected() as client,
    ):
        info = await client.info()
        (voice,) = info.tts[0].voices
        assert (voice.name, voice.languages) == ("chelsie", ["zh", "en", "de"])
        assert {"en", "de", "fr"} < set(info.asr[0].models[0].languages)
        for language in ("de-DE", "DE", "german"):
            await client.send(Synthesize(TEXT, voice=SynthesizeVoice(language=language)))
            await client.until("audio-stop")
        assert [start.text.language for start in gateway.scripts["talker"].requests] == ["german"] * 3
        await client.send(Synthesize(TEXT, voice=SynthesizeVoice(language="fr")))
        error, _ = await client.until("audio-stop")
        assert "no language 'fr'" in error.data["text"]


async def test_a_model_without_voices_has_one_of_its_name(tmp_path):
    talker = server_info_pb2.TalkerInfo(max_context_positions=4096, reads_text=True, takes_instructions=True)
    async with (
        running(SPEECH, talker) as gateway,
        wyoming(tmp_path, gateway.url) as server,
        server.connected() as client,
    ):
        (voice,) = (await client.info()).tts[0].voices
        await client.send(Synthesize(TEXT, voice=SynthesizeVoice(name=voice.name)))
        assert (await client.until("audio-stop"))[0].type == "audio-start"


async def test_a_server_that_neither_hears_nor_speaks_offers_nothing(picture_gateway, tmp_path):
    async with wyoming(tmp_path, picture_gateway.url) as server, server.connected() as client:
        info = await client.info()
        assert (info.asr, info.tts) == ([], [])
        await client.send(Synthesize(TEXT))
        error, _ = await client.until("audio-stop")
        assert (error.data["code"], "no model that speaks" in error.data["text"]) == ("unsupported", True)


async def test_a_key_is_sent_and_one_that_the_gateway_does_not_know_is_told(tmp_path):
    key = new_key()
    keys = tmp_path / "keys.yaml"
    keys.write_text(f'keys:\n  - name: home\n    sha256: "{digest(key)}"\n')
    async with running(api_keys_file=keys) as gateway:
        async with wyoming(tmp_path, gateway.url, "--api-key", key) as server, server.connected() as client:
            await client.send(Synthesize(TEXT), SynthesizeStart(), SynthesizeChunk(TEXT), SynthesizeStop(), *question())
            assert "error" not in types(await client.until("transcript-stop"))
        async with wyoming(tmp_path, gateway.url, "--api-key", "wrong", is_up=False) as server:
            async with server.connected() as client:
                await client.send(Synthesize(TEXT))
                error, _ = await client.until("audio-stop")
                await client.send(Describe())
                assert [error.data] == [event.data async for event in client.rest()]
            assert error.data["code"] == "invalid_api_key"


async def test_a_gateway_that_is_gone_is_an_error_and_what_it_offered_is_still_known(tmp_path):
    async with contextlib.AsyncExitStack() as exits:
        async with running() as gateway:
            server = await exits.enter_async_context(wyoming(tmp_path, gateway.url))
            url = gateway.url
        async with server.connected() as client:
            for asked, last in (
                ([Synthesize(TEXT)], "audio-stop"),
                ([SynthesizeStart(), SynthesizeChunk(TEXT)], "synthesize-stopped"),
                (question(), "transcript-stop"),
            ):
                await client.send(*asked)
                error, *_ = await client.until(last)
                assert (error.type, error.data["code"], url in error.data["text"]) == ("error", "unreachable", True)
            assert (await client.info()).tts


async def test_a_gateway_that_was_never_there_ends_describe_so_that_it_is_asked_again(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    async with wyoming(tmp_path, url, is_up=False) as server:
        for _ in range(2):
            async with server.connected() as client:
                await client.send(Describe())
                (error,) = [event async for event in client.rest()]
                assert (error.type, error.data["code"], url in error.data["text"]) == ("error", "unreachable", True)


async def test_a_request_is_one_line_of_the_log_without_words(gateway, tmp_path):
    async with wyoming(tmp_path, gateway.url) as server:
        async with server.connected() as client:
            await client.send(Synthesize(TEXT), *question())
            await client.until("transcript-stop")
            await client.send(Synthesize(TEXT, voice=SynthesizeVoice(name="nobody")))
            await client.until("audio-stop")
        lines = [await asyncio.to_thread(server.logged, "request") for _ in range(3)]
    assert [(line["kind"], line["outcome"]) for line in lines] == [
        ("speech", "ok"),
        ("transcription", "ok"),
        ("speech", "invalid_value"),
    ]
    assert set(lines[0]) == {"event", "kind", "outcome", "took_ms", "seconds", "stage", "level", "timestamp"}
    assert not [word for word in (*TEXT.split(), "nobody", SAID) if word in json.dumps(lines)]


async def test_flags_that_cannot_be_are_refused():
    refused = {("--uri", "10300"): "tcp://HOST:PORT", ("--uri", "tcp://localhost"): "tcp://HOST:PORT"}
    refused |= {("--uri", "stdio://"): "tcp://HOST:PORT", ("--language", "klingon"): "klingon"}
    for flags, reason in refused.items():
        done = in_this_process("wyoming", *flags)
        assert (done.exit_code, reason in done.output) == (2, True), done.output
