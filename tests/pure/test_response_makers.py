"""The tools video_generation and sound_generation: the thinker and the dit follow a script."""

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import soundfile

from gateway.access.api_keys import digest
from gateway.app import create_app
from gateway.pipeline.config import load_pipeline
from gateway.settings import GatewaySettings
from quartet.v1 import server_info_pb2
from services.common.errors import InternalError
from tests.support.clients.realtime_client import session
from tests.support.clients.responses import create, kinds, refusal
from tests.support.scripted.script import Script
from tests.support.scripted.stages import scripted_stages
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import HEALTH_TIMEOUT_S, SPEECH, Running, serving
from tests.support.systems.video import RATE_HZ, SOUND_INFO, STEPS, VIDEO_INFO, scripted_dit

PIPELINE = SPEECH.with_name("qwen3-omni-dit.yaml")
TEXT = "".join(PIECES)
VIDEO, SOUND = {"type": "video_generation"}, {"type": "sound_generation"}
KEY = "sk-quartet-alice"


@asynccontextmanager
async def before(info: server_info_pb2.DitInfo, directory: Path, **settings) -> AsyncIterator[tuple[Running, Script]]:
    """A gateway before stages that write and speak, and a dit that makes what `info` says."""
    async with scripted_stages() as stages, scripted_dit(info) as dit:
        pipeline = load_pipeline(PIPELINE, {**stages.addresses, "dit": dit.address})
        own = GatewaySettings(
            pipeline=PIPELINE, jobs_dir=directory / "jobs", health_timeout_s=HEALTH_TIMEOUT_S, **settings
        )
        app = create_app(own, pipeline)
        async with serving(app, own) as url:
            gateway = Running(app, stages, url)
            await gateway.until(lambda: app.state.gateway.pipeline.ready)
            try:
                yield gateway, dit.script
            finally:
                await gateway.http.aclose()
                await gateway.openai.close()


async def told(gateway: Running, asked: str, tools: list[dict]) -> list[dict]:
    """The events of a response. OpenAI's client has no types for these tools."""
    body = {"model": "scripted", "input": asked, "tools": tools, "stream": True}
    answer = await gateway.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]


async def test_a_video_is_taken_on_told_of_and_can_be_downloaded(tmp_path: Path) -> None:
    async with before(VIDEO_INFO, tmp_path) as (gateway, _):
        thinker = gateway.scripts["thinker"]
        thinker.calls = [("video_generation", '{"prompt": "a cat that runs"}')]
        events = await told(gateway, "film a cat", [VIDEO | {"size": "64x48", "seconds": 0.5}])
        making = [f"video_generation_call.{what}" for what in ("in_progress", "generating", "completed")]
        assert kinds(events)[:7] == ["created", "in_progress", "output_item.added", *making, "output_item.done"]
        call, message = events[-1]["response"]["output"]
        assert (call["status"], call["prompt"]) == ("completed", "a cat that runs")
        assert (call["video"]["size"], call["video"]["quartet"]["num_frames"]) == ("64x48", 9)
        assert message["content"][0]["text"] == TEXT
        first, second = thinker.requests
        assert [tool.name for tool in first.tools] == ["video_generation"]
        assert second.messages[-1].content[0].text.startswith("The video is being made")

        path = f"/v1/videos/{call['video']['id']}"
        async with asyncio.timeout(60):
            while (await gateway.http.get(path)).json()["status"] != "completed":
                await asyncio.sleep(0.01)
        assert b"ftyp" in (await gateway.http.get(f"{path}/content")).content[:16]

        # the next turn has what the model heard of it
        await create(gateway, "thanks", previous_response_id=events[-1]["response"]["id"])
        assert [each.role for each in thinker.requests[-1].messages] == _ROLES


_ROLES = ["user", "assistant", "tool", "assistant", "user"]


async def test_a_sound_is_made_and_is_an_item(tmp_path: Path) -> None:
    async with before(SOUND_INFO, tmp_path) as (gateway, _):
        gateway.scripts["thinker"].calls = [("sound_generation", '{"prompt": "rain"}')]
        asked = {"tools": [SOUND | {"seconds": 0.25, "output_format": "flac"}]}
        response = await create(gateway, "let it rain", **asked, tool_choice={"type": "sound_generation"})
        call = response.output[0].model_dump()
        assert (call["type"], call["status"], call["seconds"]) == ("sound_generation_call", "completed", 0.25)
        samples, rate_hz = soundfile.read(io.BytesIO(base64.b64decode(call["result"])))
        assert (samples.shape, rate_hz, call["sample_rate_hz"]) == ((RATE_HZ // 4, 2), RATE_HZ, RATE_HZ)
        assert response.output_text == TEXT
        assert gateway.scripts["thinker"].requests[0].tool_choice.name == "sound_generation"


async def test_what_cannot_be_made_is_told_and_the_answer_goes_on(tmp_path: Path) -> None:
    async with before(SOUND_INFO, tmp_path) as (gateway, dit):
        thinker = gateway.scripts["thinker"]
        dit.error = InternalError("oh")
        thinker.calls = [("sound_generation", '{"prompt": "rain"}'), ("sound_generation", "nonsense")]
        response = await create(gateway, tools=[SOUND])
        assert [item.status for item in response.output] == ["failed", "failed", "completed"]
        assert response.output[1].model_dump()["error"]["message"] == "prompt: the call has none"
        assert thinker.requests[1].messages[-1].content[0].text.startswith("It could not be made: ")


async def test_a_client_that_leaves_ends_its_sound(tmp_path: Path) -> None:
    async with before(SOUND_INFO, tmp_path) as (gateway, dit):
        dit.hold, dit.after = True, STEPS
        gateway.scripts["thinker"].calls = [("sound_generation", '{"prompt": "rain"}')]
        asking = asyncio.create_task(create(gateway, tools=[SOUND]))
        await dit.holding.wait()
        asking.cancel()
        await gateway.until(lambda: dit.ended == ["cancelled"])


async def test_a_video_counts_among_its_keys_requests_until_it_ends(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f'keys:\n  - name: alice\n    sha256: "{digest(KEY)}"\n    max_concurrent_requests: 1\n')
    async with before(VIDEO_INFO, tmp_path, api_keys_file=keys) as (gateway, dit):
        gateway.http.headers["authorization"] = f"Bearer {KEY}"
        dit.hold, dit.after = True, STEPS
        gateway.scripts["thinker"].calls = [("video_generation", '{"prompt": "a cat"}')]
        body = {"model": "scripted", "input": "film a cat", "tools": [VIDEO]}
        response = (await gateway.http.post("/v1/responses", json=body)).json()
        video = response["output"][0]["video"]["id"]
        await dit.holding.wait()
        assert (await gateway.http.post("/v1/responses", json=body)).status_code == 429
        dit.go_on()
        async with asyncio.timeout(60):
            while (answer := await gateway.http.post("/v1/responses", json=body | {"tools": []})).status_code == 429:
                await asyncio.sleep(0.01)
        assert answer.status_code == 200
        assert (await gateway.http.get(f"/v1/videos/{video}")).json()["status"] == "completed"


async def test_a_chat_has_a_video_of_its_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f'keys:\n  - name: alice\n    sha256: "{digest(KEY)}"\n')
    async with before(VIDEO_INFO, tmp_path, api_keys_file=keys, hosted_tools=["video_generation"]) as (gateway, _):
        gateway.http.headers["authorization"] = f"Bearer {KEY}"
        gateway.scripts["thinker"].calls = [[("video_generation", '{"prompt": "a cat"}'), ("video_generation", "")]]
        ask = {"model": "scripted", "messages": [{"role": "user", "content": "film a cat"}], "tools": [VIDEO]}
        message = (await gateway.chat(ask)).json()["choices"][0]["message"]
        (made,), (error,) = message["videos"], message["video_errors"]
        assert (made["prompt"], error["message"], message["content"]) == ("a cat", "prompt: the call has none", TEXT)
        assert (await gateway.http.get(f"/v1/videos/{made['video']['id']}")).status_code == 200


async def test_a_chat_and_a_session_have_a_sound(tmp_path: Path) -> None:
    async with before(SOUND_INFO, tmp_path, hosted_tools=["sound_generation"]) as (gateway, _):
        thinker = gateway.scripts["thinker"]
        thinker.calls = [("sound_generation", '{"prompt": "rain"}')]
        ask = {"model": "scripted", "messages": [{"role": "user", "content": "let it rain"}], "tools": [SOUND]}
        chunks = [event for event in await gateway.events(ask) if "audios" in event["choices"][0]["delta"]]
        assert [chunk["modality"] for chunk in chunks] == ["audio"]
        (made,) = chunks[0]["choices"][0]["delta"]["audios"]
        assert base64.b64decode(made["result"]).startswith(b"RIFF")
        assert thinker.requests[1].messages[-1].content[0].text == "The sound was made, and the user hears it."

        thinker.calls = [("sound_generation", '{"prompt": "rain"}')]
        async with session(gateway) as client:
            await client.say("let it rain")
            events = await client.respond(tools=[SOUND], output_modalities=["text"])
            (completed,) = [event for event in events if event["type"] == "response.sound_generation_call.completed"]
            assert base64.b64decode(completed["result"]).startswith(b"RIFF")
            item, message = events[-1]["response"]["output"]
            assert (item["prompt"], "result" in item) == ("rain", False)  # it was sent once
            assert message["content"][0]["text"] == TEXT
        assert thinker.requests[3].messages[-1].content[0].text == "The sound was made, and the user hears it."


async def test_settings_are_checked_at_once(tmp_path: Path) -> None:
    async with before(VIDEO_INFO, tmp_path) as (gateway, _):
        for tool, param in (
            (VIDEO | {"size": "63x48"}, "size"),
            (VIDEO | {"seconds": 0}, "seconds"),
            (VIDEO | {"seconds": 1000}, "seconds"),
            (VIDEO | {"speed": 2}, "speed"),
            (SOUND, "type"),  # this dit makes none
        ):
            status, named, _ = await refusal(gateway, tools=[tool])
            assert (status, named) == (400, f"tools[0].{param}")
        status, named, _ = await refusal(gateway, tools=[VIDEO, VIDEO])
        assert (status, named) == (400, "tools[1]")
        function = {"type": "function", "name": "sound_generation", "parameters": {"type": "object"}}
        status, named, _ = await refusal(gateway, tools=[function])
        assert (status, named) == (400, "tools[0].name")
        status, named, _ = await refusal(gateway, tools=[VIDEO], tool_choice={"type": "sound_generation"})
        assert (status, named) == (400, "tool_choice")
