"""What the documents on other people's clients tell to write is what the tested programs do."""

import re

import pytest
import yaml

from cli.plan import PIPELINE
from gateway.app import create_app
from gateway.pipeline.config import load_pipeline
from gateway.settings import GatewaySettings
from tests.support.clients.programs import HEARING, REQUESTS, SPEECH
from tests.support.documents import ROOT, URL, blocks

PAGE = ROOT / "docs" / "chat-clients.md"
# A link to the program, and the code that follows it.
SECTION = re.compile(r"^Program: [^\n]*\(\.\./(tests/clients/\S+)\)\n+```(?:py|js)\n(.*?)^```", re.M | re.S)


PROGRAMS = {
    "chat-clients": "langchain_agent.*",
    "message-clients": "anthropic_*.py",
    "realtime-clients": "*_talk.*",
    "speech-clients": "*_speech.py",
}


@pytest.mark.parametrize(("page", "pattern"), PROGRAMS.items())
def test_the_lines_are_those_of_the_programs(page: str, pattern: str) -> None:
    sections = SECTION.findall((ROOT / "docs" / f"{page}.md").read_text())
    programs = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "clients").glob(pattern))
    assert sorted(name for name, _ in sections) == programs
    for name, lines in sections:
        program = [line.strip() for line in (ROOT / name).read_text().splitlines()]
        for line in lines.splitlines():
            assert line.strip() in program, f"{name}: {line}"


def test_the_programs_are_those_whose_requests_are_tested() -> None:
    named = re.findall(r"^\| \[(.+?)\]\(#", PAGE.read_text(), re.M)
    assert sorted(named) == sorted([*REQUESTS, "LangChain"])


def test_every_address_is_one_of_the_gateway() -> None:
    app = create_app(GatewaySettings(pipeline=PIPELINE), load_pipeline(PIPELINE))
    addresses = {f"{URL}/v1", *(f"{URL}{path}" for path in app.openapi()["paths"])}
    for page in PROGRAMS:
        written = set(re.findall(rf"{URL}[^\s`,;]*", (ROOT / "docs" / f"{page}.md").read_text()))
        assert {address.rstrip('".') for address in written} <= {URL, *addresses}, page


def test_the_settings_are_those_of_the_requests() -> None:
    (block,) = blocks("yaml", pages=[PAGE])
    speech = yaml.safe_load(block.text)["speech"]
    (spoken, said), (heard, written) = REQUESTS["LibreChat"]
    tts, stt = speech["tts"]["openai"], speech["stt"]["openai"]
    assert (tts["url"], stt["url"]) == (f"{URL}{spoken}", f"{URL}{heard}") == (f"{URL}{SPEECH}", f"{URL}{HEARING}")
    assert (tts["model"], stt["model"]) == (said["json"]["model"], written["data"]["model"])
    assert said["json"]["voice"] in tts["voices"]
    settings = dict(line.split("=") for block in blocks("text", pages=[PAGE]) for line in block.text.split())
    assert settings["IMAGE_SIZE"] in [sent["json"].get("size") for _, sent in REQUESTS["Open WebUI"] if "json" in sent]
