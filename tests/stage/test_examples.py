"""The programs in examples/ do what they say, with a gateway in this process and stages without models."""

import asyncio
import base64
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import sys
import wave
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from gateway.app import create_app
from gateway.pipeline.config import load_pipeline
from gateway.settings import GatewaySettings
from tests.support.clients.grpcurl import check_call
from tests.support.scripted.code2wav import PCM16, SAMPLE_RATE_HZ
from tests.support.scripted.dit import DIT_STEPS, picture_of
from tests.support.scripted.stages import scripted_stages
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import SPEECH, clients, running, serving
from tests.support.systems.stack import free_port
from tests.support.systems.terminal import Terminal, lines

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DIT = SPEECH.with_name("dit.yaml")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def run_example(name: str, *arguments: str, cwd: Path, **environment: str) -> str:
    """What it prints, if it ends well."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLES / name), *arguments),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return out.decode()


async def test_a_stage_of_ones_own_joins_a_pipeline() -> None:
    own = load("own_stage")
    server, port = await own.start(0)
    try:
        pipeline = load_pipeline(DIT, {"dit": f"127.0.0.1:{port}"})
        settings = GatewaySettings.model_validate({"pipeline": DIT})
        app = create_app(settings, pipeline)
        async with serving(app, settings) as url:
            http, client = clients(url)
            async with http, client, asyncio.timeout(60):
                while not app.state.gateway.pipeline.ready:
                    await asyncio.sleep(0.005)
                answer = await client.images.generate(prompt="x", n=2, size="128x64", extra_body={"seed": 5})  # pyright: ignore
    finally:
        await server.stop(None)
    for i, image in enumerate(answer.data or []):
        with Image.open(io.BytesIO(base64.b64decode(image.b64_json or ""))) as picture:
            np.testing.assert_array_equal(np.asarray(picture), own.gradient(5 + i, 128, 64))
    assert len(answer.data or []) == 2


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_tutorial_of_a_stage_of_ones_own(tmp_path: Path) -> None:
    """docs/tutorials/own-stage.md, typed: two programs, and a picture by the one through the other."""
    port, url = str(free_port()), f"http://127.0.0.1:{free_port()}"
    terminal = Terminal(tmp_path, {"50054": port, "8000": url.rpartition(":")[2]}, {})
    stage, gateway, models, image, copy = lines("docs/tutorials/own-stage.md")
    with terminal.served(stage, f"127.0.0.1:{port}"), terminal.served(gateway, '"SERVING"'):
        (model,) = json.loads(terminal.type(models))["data"]
        assert model["id"] == "gradients"
        terminal.type(f"{image} --url {url} --seed 5")
    with Image.open(tmp_path / "gradient.png") as picture:
        np.testing.assert_array_equal(np.asarray(picture), load("own_stage").gradient(5, 256, 128))
    terminal.type(copy)
    assert (tmp_path / "my_stage.py").is_file()


async def test_another_model_is_spoken_while_it_writes(tmp_path: Path) -> None:
    async with running() as gateway:
        out = await run_example("speak_an_llm.py", "Why?", cwd=tmp_path, QUARTET_URL=gateway.url, LLM_URL=gateway.url)
        assert gateway.scripts["talker"].typed == list(PIECES)
    assert out == "".join(PIECES) + "\n"
    assert (tmp_path / "answer.wav").read_bytes().endswith(PCM16)


async def test_one_stage_alone_makes_a_picture(tmp_path: Path) -> None:
    async with scripted_stages("dit") as stages:
        out = await run_example("one_stage.py", "a fox", "fox.png", cwd=tmp_path, DIT_ADDRESS=stages.addresses["dit"])
    assert f"step {DIT_STEPS} of {DIT_STEPS}" in out
    with Image.open(tmp_path / "fox.png") as picture:
        np.testing.assert_array_equal(np.asarray(picture), picture_of(7))


async def test_openais_client_writes_the_speech(tmp_path: Path) -> None:
    async with running() as gateway:
        out = await run_example("openai_client.py", "Why is the sky blue?", cwd=tmp_path, QUARTET_URL=gateway.url)
    assert out.strip() == "".join(PIECES)
    with wave.open(str(tmp_path / "answer.wav")) as file:
        assert (file.getframerate(), file.readframes(file.getnframes())) == (SAMPLE_RATE_HZ, PCM16)


def grpcurl_calls() -> list[list[str]]:
    """The words of each call, less the server's address."""
    script = (EXAMPLES / "grpcurl.sh").read_text().replace("\\\n", " ")
    calls = re.findall(r"^(grpcurl (?:[^\'\n]|\'[^\']*\')*)$", script, re.MULTILINE)
    return [[word for word in shlex.split(call) if not word.startswith("$")] for call in calls]


@pytest.mark.parametrize("words", [words for words in grpcurl_calls() if words[-1] != "list"], ids=lambda w: w[-1])
def test_a_grpcurl_call_names_a_method_and_fits_its_request(words: list[str]) -> None:
    check_call(words)


def test_the_grpcurl_session_asks_several_services() -> None:
    assert len({words[-1].partition("/")[0] for words in grpcurl_calls()}) >= 4
