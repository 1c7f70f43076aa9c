"""The JDK's HttpClient as it comes, which offers h2c with each request."""

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.support.systems.gateway import running

ROOT = Path(__file__).parents[2]


@pytest.mark.weekly
@pytest.mark.skipif(shutil.which("java") is None, reason="there is no JDK here")
async def test_a_chat_a_stream_and_an_upload() -> None:
    async with running() as gateway:
        program, sound = ROOT / "tests/clients/Talk.java", ROOT / "cli/assets/question.wav"
        asking = await asyncio.create_subprocess_exec(
            "java", program, gateway.url, "scripted", sound, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await asyncio.wait_for(asking.communicate(), 120)
    chat, stream, transcript = output.decode().splitlines()
    assert chat.startswith('HTTP_1_1 200 {"id":"chatcmpl-')
    assert stream.startswith('HTTP_1_1 200 data: {"id":"chatcmpl-')
    assert stream.rstrip().endswith("data: [DONE]")
    assert transcript.startswith('HTTP_1_1 200 {"text":"Hello, world"')
