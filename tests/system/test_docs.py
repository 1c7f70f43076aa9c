"""What README.md and the documents tell to type and to write does what they say, on a running system.

tests/pure/test_document_commands.py has the rest: each command is known to what would read it.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import quartet
from tests.support.documents import URL, Command, blocks, commands
from tests.support.media import png
from tests.support.stack import Stack

pytestmark = pytest.mark.e2e
MODEL = "Qwen/Qwen3-Omni-30B-A3B-Instruct"
NAMES = ("quartet-demo", "qwen3-omni", MODEL)  # of the served model, in the documents
PYTHON = {block.where: block.text for block in blocks("python")}
CHATS = {command.words: command for command in commands() if command.words[:2] == ("quartet", "chat")}

# Paths that the shared system does not serve, or not in a time that is worth it, and the test that asks for them.
ASKED_ELSEWHERE = {
    "/v1/audio/voices": "tests/system/test_qwen3_tts.py",
    "/v1/audio/transcriptions": "tests/pure/test_gateway_transcriptions.py",
    "/v1/load_lora_adapter": "tests/system/test_lora.py",
    "/v1/unload_lora_adapter": "tests/system/test_lora.py",
}


def _path(command: Command) -> str:
    (path,) = [word.partition(":8000")[2] for word in command.words if ":8000" in word]
    return path


def _alike(command: Command) -> str:
    """Calls that are the same but for the model's name and the file that they write."""
    words = " ".join(command.words[1:]).replace("localhost", "127.0.0.1")
    return re.sub(rf"{'|'.join(NAMES)}|-s\b|-o \S+", "", words)


def _curls() -> dict[str, list[Command]]:
    """What is asked by each block that asks something new."""
    new = {_alike(command): command for command in commands() if command.words[0] == "curl"}
    found: dict[str, list[Command]] = {}
    for command in new.values():
        found.setdefault(command.where, []).append(command)
    return found


CURLS = _curls()


def test_there_are_examples() -> None:
    assert len(PYTHON) >= 8
    paths = {_path(command) for block in CURLS.values() for command in block}
    assert len(paths) > 8
    for path, file in ASKED_ELSEWHERE.items():
        assert path in paths
        assert path in (Path(__file__).parents[2] / file).read_text()


@pytest.mark.parametrize("where", PYTHON)
def test_python_runs(stack: Stack, tiny_checkpoint: Path, tmp_path: Path, where: str) -> None:
    code = PYTHON[where].replace(URL, stack.url).replace(MODEL, str(tiny_checkpoint))
    code = code.replace('"quartet-demo"', f'"{stack.model}"').replace('api_key="none"', f'api_key="{stack.key}"')
    code = code.replace(f'Omni("{tiny_checkpoint}"', f"Omni({stack.omni_arguments}")  # it would start others
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert all(file.stat().st_size > 2000 for file in tmp_path.iterdir())


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("where", CURLS)
def test_curl_is_answered(stack: Stack, tmp_path: Path, where: str) -> None:
    for command in CURLS[where]:
        if _path(command) in ASKED_ELSEWHERE:
            continue
        words = [re.sub(r"http://127\.0\.0\.1:8000|localhost:8000", stack.url, word) for word in command.words]
        words = [word.replace("$KEY", stack.key) for word in words]
        if "-d" in words:
            body = json.loads(words[words.index("-d") + 1])
            body |= {"model": stack.model} if body.get("model") in NAMES else {}
            words[words.index("-d") + 1] = json.dumps(body)
        known = ["-H", f"Authorization: Bearer {stack.key}", "--fail-with-body", "--silent", "--show-error"]
        done = subprocess.run([*words, *known], cwd=tmp_path, capture_output=True, timeout=120, check=False)
        assert done.returncode == 0, (str(command), done.stdout[-2000:], done.stderr)
        if "-o" in words:
            assert (tmp_path / words[words.index("-o") + 1]).stat().st_size > 2000
        else:
            assert json.loads(done.stdout)


@pytest.mark.parametrize("command", [each for each in CHATS.values() if "--out" in each.words], ids=str)
def test_a_question_is_answered_in_speech(stack: Stack, tmp_path: Path, command: Command) -> None:
    (tmp_path / "cat.png").write_bytes(png(64, 48))
    done = quartet(*command.words[1:], "--url", stack.url, "--api-key", stack.key, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert (tmp_path / "answer.wav").stat().st_size > 2000
