"""What README.md and the documents tell to type and to write does what they say, on the system that README.md starts:
word for word, but for the port.

tests/pure/test_document_commands.py has the rest: each command is known to what would read it.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import ROOT, URL, Command, blocks, commands
from tests.support.systems.command import quartet
from tests.support.systems.stack import HANG_GUARD_S, START_TIMEOUT_S, Stack, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(START_TIMEOUT_S)]
PYTHON = {block.where: block.text for block in blocks("python")}
# Pages whose commands ask what `quartet up` serves, but for those of blocks that serve another model.
ASKING = ("README.md", "docs/tutorials/first-answer.md", "docs/tutorials/talk-to-it.md")
WRITES_IDS = "/inference/v1/generate"  # such a program prints no words
# What the documents ask, and the right answer.
RIGHT = {
    "What is seven plus five?": "Seven plus five is twelve.",
    "How is boat spelled?": "Boat is spelled B-O-A-T.",
    "And minus four?": "Twelve minus four is eight.",
    "Which day comes after Monday?": "Tuesday comes after Monday.",
    "What is the capital of Italy?": "The capital of Italy is Rome.",
    "What do you see?": "I see two blue circles and a yellow star.",
    "How many things are there?": "I see three things.",
    "Draw a yellow cross on a blue ground.": "I see a yellow cross.",
    "What colour is the ground?": "It is blue.",
    "What is the weather in Rome?": 'get_weather {"city": "Rome"}\nIt is sunny in Rome.',
    "The old king likes the boat.": "The old king likes the boat.",
    "boat.mp3": "The old king likes the boat.",
    "cli/assets/sum.wav": "Seven plus five is twelve.",
}

# Paths that the shared system does not serve, or not in a time that is worth it, and the test that asks for them.
ASKED_ELSEWHERE = {
    "/v1/audio/voices": "tests/system/test_qwen3_tts.py",
    "/v1/embeddings": "tests/pure/test_gateway_embeddings.py",
    "/v1/rerank": "tests/pure/test_gateway_embeddings.py",
    "/v1/audio/transcriptions": "tests/pure/test_gateway_transcriptions.py",
    "/v1/load_lora_adapter": "tests/system/test_lora.py",
    "/v1/unload_lora_adapter": "tests/system/test_lora.py",
}


def _path(command: Command) -> str:
    (path,) = [word.partition(":8000")[2] for word in command.words if ":8000" in word]
    return path


def _alike(command: Command) -> str:
    """Calls that are the same but for the file that they write."""
    return re.sub(r"-s\b|-o \S+", "", " ".join(command.words[1:]).replace("localhost", "127.0.0.1"))


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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """What README.md's first command of all that serve starts."""
    first = next(command for command in commands("README.md") if command.words[:2] == ("quartet", "up"))
    assert first.words == ("quartet", "up")
    with running(None, tmp_path_factory.mktemp("documents") / "run") as started:
        yield started


def check_right(asked: str, answered: str) -> None:
    """All that is asked has its right answer in what came out."""
    wanted = [answer for question, answer in RIGHT.items() if question in asked]
    assert wanted, f"nobody knows the right answer: {asked}"
    assert not [answer for answer in wanted if answer not in answered], answered


def here(code: str, served: Stack) -> str:
    """`code`, which asks this system: an Omni would start another."""
    what = r'Omni\("[^"]+"(, pipeline="[^"]+", dit_model="[^"]+")?'
    return re.sub(what, f"Omni({served.omni_arguments}", code.replace(URL, served.url))


def run_alone(code: str, directory: Path) -> str:
    """What a program prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, timeout=HANG_GUARD_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("where", PYTHON)
def test_python_gets_a_right_answer(
    served: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    code = here(PYTHON[where], served)
    if "Omni(" in code:
        printed = run_alone(code, tmp_path)
    else:  # clients of others take a second to import, and here that is done
        monkeypatch.chdir(tmp_path)
        with ThreadPoolExecutor(1) as thread:  # which a program may give an event loop
            thread.submit(exec, compile(code, where, "exec"), {"__name__": "__main__"}).result()
        printed = capsys.readouterr().out
    assert printed.strip()
    assert all(file.stat().st_size > 2000 for file in tmp_path.iterdir())
    if WRITES_IDS not in code:
        check_right(PYTHON[where], printed)


def test_the_notebook_runs(served: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT / "examples")
    notebook = json.loads(Path("omni.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    names: dict[str, Any] = {}
    for cell in cells:
        exec(compile(here(cell, served), "omni.ipynb", "exec"), names)  # as a kernel does
    assert names["answer"].audio._repr_html_().startswith("<audio")
    check_right("\n".join(cells), capsys.readouterr().out)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("where", CURLS)
def test_curl_is_answered(request: pytest.FixtureRequest, served: Stack, tmp_path: Path, where: str) -> None:
    for command in CURLS[where]:
        if _path(command) in ASKED_ELSEWHERE:
            continue
        system: Stack = request.getfixturevalue("stack") if "$KEY" in command.text else served
        words = [re.sub(r"http://127\.0\.0\.1:8000|localhost:8000", system.url, word) for word in command.words]
        words = [word.replace("$KEY", system.key) for word in words]
        known = ["--fail-with-body", "--silent", "--show-error"]
        done = subprocess.run([*words, *known], cwd=tmp_path, capture_output=True, timeout=HANG_GUARD_S, check=False)
        assert done.returncode == 0, (str(command), done.stdout[-2000:], done.stderr)
        if "-o" in words:
            assert (tmp_path / words[words.index("-o") + 1]).stat().st_size > 2000
        else:
            assert json.loads(done.stdout)
        if "/chat/completions" in _path(command):
            check_right(command.text, done.stdout.decode())


@pytest.mark.parametrize("page", ASKING)
def test_the_commands_get_right_answers(served: Stack, tmp_path: Path, page: str) -> None:
    """In their order, as a later one reads what an earlier one has written."""
    (tmp_path / "cli").symlink_to(ROOT / "cli")
    named = {each.where for each in commands(page) if "--model" in each.words}
    asking = [each for each in commands(page) if each.words[:1] == ("quartet",) and each.where not in named]
    asking = [each for each in asking if each.words[1] != "up" and (each.words[1] != "talk" or "--in" in each.words)]
    assert asking
    for command in asking:
        done = quartet(*command.words[1:], "--url", served.url, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        if command.words[1] not in ("say", "image"):
            check_right(str(command), done.stdout + done.stderr)
        if "--out" in command.words:
            assert (tmp_path / command.words[command.words.index("--out") + 1]).stat().st_size > 500
