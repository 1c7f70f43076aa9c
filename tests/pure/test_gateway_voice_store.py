"""Where uploaded voices are kept, who can use them, and which talkers imitate them; over HTTP, with scripted stages."""

import asyncio
import contextlib
import sqlite3
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from cli.main import app
from gateway.answers.voice_store import UploadedVoice, VoiceStore
from gateway.app import create_app
from gateway.errors import ApiError
from gateway.pipeline.config import load_pipeline
from gateway.settings import GatewaySettings
from gateway.store.errors import StoreError
from quartet.v1 import server_info_pb2
from tests.support.clients.voices import (
    IMITATOR,
    PIPELINE,
    RATE_HZ,
    SAMPLE,
    TONE_HZ,
    VOICES,
    base64_of,
    bearer,
    heard,
    keys,
    listed,
    pitch_hz,
    speak,
    told,
    tone,
    upload,
    wav,
)
from tests.support.scripted.code2wav import PCM16
from tests.support.scripted.stages import scripted_stages
from tests.support.systems.gateway import HEALTH_TIMEOUT_S, Running, running, serving
from tests.support.systems.postgres import Place

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_voices_are_there_after_a_restart_and_at_a_gateway_beside(tmp_path):
    """As are those of others for nobody but them."""
    folder = {"voices_dir": tmp_path / "voices", "api_keys_file": keys(tmp_path)}
    async with running(PIPELINE, IMITATOR, **folder) as one, running(PIPELINE, IMITATOR, **folder) as other:
        made = await upload(one, key="alice")
        assert (await speak(other, key="alice", voice=made.json()["id"])).content == PCM16
        assert (await upload(other, key="bob")).status_code == 200  # names are each owner's own
        assert (await upload(other, key="alice")).status_code == 409
        assert (await upload(other, wav(tone(3)), name="bert", key="bob")).status_code == 200
    assert (tmp_path / "voices").stat().st_mode & 0o777 == 0o700
    async with running(PIPELINE, IMITATOR, **folder) as gateway:
        assert [await listed(gateway, key) for key in ("alice", "bob")] == [["anna"], ["anna", "bert"]]
        for voice in ("bert", made.json()["id"]):
            owner, stranger = ("bob", "alice") if voice == "bert" else ("alice", "bob")
            refused = await speak(gateway, key=stranger, voice=voice)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "voice")
            assert (await gateway.http.delete(f"{VOICES}/{voice}", headers=bearer(stranger))).status_code == 404
            assert (await speak(gateway, key=owner, voice=voice)).content == PCM16
        (*_, start) = gateway.scripts["talker"].requests
        assert len(heard(start)) == 1.5 * RATE_HZ
        unknown = await gateway.http.get(VOICES)  # without a key: the model's own, of which there are none
        assert (unknown.status_code, unknown.json()["data"], unknown.json()["uploaded_voices"]) == (200, [], [])
        assert (await gateway.http.get("/v1/audio/models")).json()["models"] == [{"id": "scripted", "name": "scripted"}]
        assert (await gateway.http.get(VOICES, headers=bearer("mallory"))).status_code == 401
        for request in (gateway.http.post(VOICES), gateway.http.delete(f"{VOICES}/bert")):
            assert (await request).status_code == 401


async def test_another_talker_gets_samples_at_its_own_rate(tmp_path):
    async with running(PIPELINE, IMITATOR, voices_dir=tmp_path) as gateway:
        await upload(gateway)
    async with running(PIPELINE, told(voice_sample_rate_hz=16_000), voices_dir=tmp_path) as gateway:
        await speak(gateway, voice="anna")
        (start,) = gateway.scripts["talker"].requests
        assert len(heard(start)) == 1.5 * 16_000
        assert pitch_hz(heard(start), 16_000) == pytest.approx(TONE_HZ, abs=1)


async def test_there_are_only_so_many(tmp_path):
    limits = {"max_voices": 3, "max_voices_per_key": 2, "api_keys_file": keys(tmp_path), "voices_dir": tmp_path}
    async with running(PIPELINE, IMITATOR, **limits) as gateway:
        for name in ("a", "b"):
            assert (await upload(gateway, name=name, key="alice")).status_code == 200
        refused = await upload(gateway, name="c", key="alice")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_voices")
        assert "max_voices_per_key" in refused.json()["error"]["message"]
        answers = await asyncio.gather(*(upload(gateway, name=name, key="bob") for name in ("a", "b")))
        assert sorted(answer.status_code for answer in answers) == [200, 400]
        await gateway.http.delete(f"{VOICES}/a", headers=bearer("alice"))
        assert (await upload(gateway, name="c", key="alice")).status_code == 200


async def test_every_replica_speaks_in_the_voice(tmp_path):
    async with AsyncExitStack() as stack:
        groups = [await stack.enter_async_context(scripted_stages("talker", "code2wav")) for _ in range(2)]
        for group in groups:
            group.infos["talker"].info.talker.CopyFrom(IMITATOR)
            group.scripts["talker"].hold, group.scripts["talker"].after = True, 1
        addresses = {kind: [group.addresses[kind] for group in groups] for kind in ("talker", "code2wav")}
        settings = GatewaySettings(pipeline=PIPELINE, health_timeout_s=HEALTH_TIMEOUT_S, voices_dir=tmp_path)
        served = create_app(settings, load_pipeline(PIPELINE, addresses))
        gateway = Running(served, groups[0], await stack.enter_async_context(serving(served, settings)))
        stack.push_async_callback(gateway.openai.close)
        stack.push_async_callback(gateway.http.aclose)
        stages = served.state.gateway.pipeline.by_name.values()
        every = [replica for stage in stages for replica in stage.replicas.values()]
        assert len(every) == 4
        await gateway.until(lambda: all(replica.serving for replica in every))
        await upload(gateway)
        speaking = [asyncio.create_task(speak(gateway, voice="anna"))]
        await gateway.until(lambda: any(group.scripts["talker"].requests for group in groups))
        speaking.append(asyncio.create_task(speak(gateway, voice="anna")))  # the other replica has less to do
        await gateway.until(lambda: all(group.scripts["talker"].requests for group in groups))
        for group in groups:
            group.scripts["talker"].go_on()
        assert [answer.content for answer in await asyncio.gather(*speaking)] == [PCM16, PCM16]
        first, second = (heard(group.scripts["talker"].requests[0]) for group in groups)
        assert len(first) == 1.5 * RATE_HZ
        assert np.array_equal(first, second)


async def test_a_model_with_voices_of_its_own_imitates_none(speech_gateway, tmp_path):
    for response in (await upload(speech_gateway), await speech_gateway.http.delete(f"{VOICES}/ethan")):
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (501, "voice_cloning_unsupported")
        assert "its own" in error["message"]
    bad = {
        "ref_audio": {"ref_audio": base64_of(SAMPLE)},
        "ref_text": {"ref_text": "A tone."},
        "x_vector_only_mode": {"x_vector_only_mode": True},
        "task_type": {"task_type": "Base"},
        "language": {"language": "english"},
        "voice": {"voice": "anna"},
    }
    for param, members in bad.items():
        response = await speak(speech_gateway, **members)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    answer = await speak(
        speech_gateway, voice="Ethan", language="Auto", task_type="CustomVoice", instructions="Softly."
    )
    assert answer.content == PCM16
    (model,) = (await speech_gateway.http.get("/v1/models")).json()["data"]
    assert (model["quartet"]["voice_cloning"], model["quartet"]["languages"]) == (False, [])
    assert not speech_gateway.app.state.gateway.settings.voices_dir.exists()


async def test_a_model_that_makes_voices_of_instructions():
    talker = server_info_pb2.TalkerInfo(max_context_positions=4096, reads_text=True, takes_instructions=True)
    async with running(PIPELINE, talker) as gateway:
        answer = await speak(gateway, instructions="An old man.", task_type="VoiceDesign")
        assert answer.content == PCM16
        (start,) = gateway.scripts["talker"].requests
        assert (start.text.instructions, start.speaker) == ("An old man.", "")
        assert (await speak(gateway, voice="alloy", instructions="An old man.")).content == PCM16  # OpenAI's: as none
        assert gateway.scripts["talker"].requests[1].speaker == ""
        for param, members in {"voice": {"voice": "ethan"}, "task_type": {"task_type": "Base"}}.items():
            response = await speak(gateway, **members)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert (await upload(gateway)).status_code == 501


async def test_a_model_with_both_keeps_its_names(tmp_path):
    async with running(PIPELINE, told(speakers=["vivian"]), voices_dir=tmp_path) as gateway:
        refused = await upload(gateway, name="Vivian")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "name")
        await upload(gateway)
        named_so = (await upload(gateway, name="alloy")).json()["id"]
        assert await listed(gateway) == ["vivian", "anna", "alloy"]
        told_voices = []
        for members in ({}, {"voice": "VIVIAN"}, {"voice": "anna"}, {"voice": "nova"}, {"voice": "alloy"}):
            response = await speak(gateway, **members)
            assert response.content == PCM16
            told_voices.append(response.headers["x-quartet-voice"])
        starts = gateway.scripts["talker"].requests
        asked = [(start.speaker, start.text.HasField("voice_sample")) for start in starts]
        assert asked == [("", False), ("vivian", False), ("", True), ("vivian", False), ("", True)]
        assert told_voices[:2] == ["vivian", "vivian"]
        assert told_voices[3:] == ["vivian", named_so]
        assert (await gateway.http.delete(f"{VOICES}/vivian")).status_code == 404


async def test_a_directory_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    async with running(PIPELINE, IMITATOR, voices_dir=tmp_path / "file") as gateway:
        for response in (await upload(gateway), await gateway.http.get(VOICES), await speak(gateway, voice="anna")):
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (500, "storage_failed")
            assert "file" not in error["message"]  # for the log
        assert (await speak(gateway, ref_audio=base64_of(SAMPLE))).content == PCM16
    with pytest.raises(StoreError, match="--voices-dir"):
        VoiceStore(None, 1, 1)


async def test_the_commands(tmp_path):
    (tmp_path / "anna.wav").write_bytes(SAMPLE)
    async with running(PIPELINE, told(speakers=["vivian"]), voices_dir=tmp_path / "voices") as gateway:

        async def quartet(*words: str) -> tuple[int, str]:
            with capture_logs():  # the gateway's, of the same process
                done = await asyncio.to_thread(CliRunner().invoke, app, ["voice", *words, "--url", gateway.url])
            return done.exit_code, done.output

        add = ("add", "anna", str(tmp_path / "anna.wav"), "--consent", "Anna agreed", "--text", "A tone.")
        status, output = await quartet(*add)
        assert (status, output.split(", id")[0]) == (0, "added anna: 1.5 s"), output
        assert (await quartet(*add))[0] == 1  # there is one
        (voice,) = (await gateway.http.get(VOICES)).json()["uploaded_voices"]
        assert (voice["consent"], voice["ref_text"]) == ("Anna agreed", "A tone.")
        assert await quartet("list") == (0, f"vivian\nanna  {voice['id']}\n")
        assert await quartet("rm", "anna") == (0, "removed anna\n")
        assert await quartet("list") == (0, "vivian\n")
        assert (await quartet("rm", "anna"))[0] == 1


async def test_nothing_of_a_removed_voice_stays_on_the_disk(tmp_path):
    voice = UploadedVoice("voice_1", "anna", "consent-of-anna", "", 1.5, 0, None)
    store, flac = VoiceStore(tmp_path, 2, 2), np.random.default_rng(0).bytes(100_000)
    await store.add(voice, flac)
    with pytest.raises(ApiError, match="there is a voice"):
        await store.add(voice, flac)
    assert await store.sample(voice) == flac
    assert flac[50_000:50_100] in on_disk(tmp_path)
    await store.remove(voice)
    assert await store.sample(voice) is None
    await store.close()
    assert {file.name for file in tmp_path.iterdir()} == {"voices.sqlite", "voices.reserve"}
    for left in (flac[100:200], flac[50_000:50_100], b"consent-of-anna"):
        assert left not in on_disk(tmp_path)
    assert (tmp_path / "voices.sqlite").stat().st_size < len(flac)


async def test_stores_of_two_gateways_count_together(place: Place):
    stores = [VoiceStore(place(), 3, 3) for _ in range(2)]
    adding = [
        store.add(UploadedVoice(f"voice_{store_id}{i}", f"n{store_id}{i}", "c", "", 1, 0, None), b"x")
        for store_id, store in enumerate(stores)
        for i in range(3)
    ]
    ended = await asyncio.gather(*adding, return_exceptions=True)
    assert sum(isinstance(each, ApiError) for each in ended) == 3
    assert [len(await store.all_of(None)) for store in stores] == [3, 3]
    for store in stores:
        await store.close()


async def test_names_are_the_same_in_any_case(place: Place):
    async with VoiceStore(place(), 5, 5) as store:
        anna = UploadedVoice("voice_1", "Anna", "c", "", 1, 0, "ada")
        await store.add(anna, b"x")
        for owner in ("ada", None):
            assert await store.find("aNNA", owner) == anna
            with pytest.raises(ApiError, match="there is a voice"):
                await store.add(UploadedVoice("voice_2", "ANNA", "c", "", 1, 0, owner), b"x")
        bobs = UploadedVoice("voice_3", "anna", "c", "", 1, 0, "bob")
        await store.add(bobs, b"y")
        named_so = UploadedVoice("voice_4", "voice_3", "c", "", 1, 0, "bob")
        await store.add(named_so, b"z")
        assert [await store.find("anna", owner) for owner in ("bob", "eve", None)] == [bobs, None, anna]
        assert await store.find("voice_3", "bob") == bobs  # an id goes first
        assert await store.find("an\0na", "ada") is None
        assert await store.sample(bobs) == b"y"
        await store.remove(bobs)
        assert (await store.sample(bobs), await store.all_of("bob")) == (None, [named_so])


async def test_a_text_that_no_database_keeps_is_refused(tmp_path):
    async with running(PIPELINE, IMITATOR, voices_dir=tmp_path) as gateway:
        for field in ("name", "consent", "ref_text"):
            fields: dict[str, Any] = {field: "an\0na"}
            refused = await upload(gateway, **fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert (await gateway.http.delete(f"{VOICES}/an%00na")).status_code == 404


async def test_a_directory_of_a_newer_gateway(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "voices.sqlite")) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="another version"):
        VoiceStore(tmp_path, 3, 3).check()


def on_disk(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.iterdir())
