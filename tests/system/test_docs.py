"""What README.md and the documents tell to type: the Python runs, and commands have the flags that they are given."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from cli.main import app
from tests.support.command import quartet
from tests.support.media import png
from tests.support.settings_of_processes import PROCESSES, required_flags
from tests.support.stack import Stack

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/**/*.md")]
URL, MODEL = "http://127.0.0.1:8000", "Qwen/Qwen3-Omni-30B-A3B-Instruct"


def _blocks(language: str) -> Iterator[tuple[str, str]]:
    """(FILE:LINE, text) of each block of code in `language`."""
    for document in DOCUMENTS:
        text = document.read_text()
        for block in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start()) + 1
            yield f"{document.relative_to(ROOT)}:{line}", block[1]


def _commands() -> Iterator[tuple[str, list[str]]]:
    """(FILE:LINE and command, its words) of each `quartet` and `python -m` in the shell blocks."""
    for where, block in _blocks("sh"):
        for line in block.splitlines():
            if match := re.search(r"(?:^|/|; |[A-Z]=\S+ )((?:quartet|python -m (?:services\.\w+|gateway)) .*)", line):
                command = re.split(r"[)>|;]|\s#\s", match[1])[0].strip()
                yield f"{where} {command}", shlex.split(command)


COMMANDS = dict(_commands())
PYTHON = dict(_blocks("python"))


def test_there_are_examples() -> None:
    assert len(PYTHON) >= 1
    assert len(COMMANDS) > 20


@pytest.mark.e2e
@pytest.mark.parametrize("where", PYTHON)
def test_python_runs(stack: Stack, tiny_checkpoint: Path, tmp_path: Path, where: str) -> None:
    code = PYTHON[where].replace(URL, stack.url).replace(MODEL, str(tiny_checkpoint))
    code = code.replace('api_key="none"', f'api_key="{stack.key}"')
    code = code.replace(f'Omni("{tiny_checkpoint}"', f"Omni({stack.omni_arguments}")  # it would start others
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert all(file.stat().st_size > 2000 for file in tmp_path.iterdir())


@pytest.mark.e2e
def test_the_first_question_of_the_readme_is_answered(stack: Stack, tmp_path: Path) -> None:
    (words,) = [words for where, words in COMMANDS.items() if where.startswith("README.md") and words[1] == "chat"]
    (tmp_path / "cat.png").write_bytes(png(64, 48))
    done = quartet(*words[1:], "--url", stack.url, "--api-key", stack.key, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert (tmp_path / "answer.wav").stat().st_size > 2000


@pytest.mark.parametrize("where", COMMANDS)
def test_a_command_has_the_flags_that_it_is_given(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = COMMANDS[where]
    monkeypatch.chdir(tmp_path)
    for word in words:
        if word.endswith((".png", ".mp3", ".mp4", ".yaml", ".crt", ".key")):  # a file that has to be there
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            Path(word).touch()
    if words[0] == "python":
        PROCESSES[words[2].rpartition(".")[2]].load(words[3:])
        return
    parameters = typer.main.get_group(app).commands[words[1]].make_context(words[1], words[2:]).params
    for process, settings in PROCESSES.items():
        settings.load([*required_flags(settings), *(parameters.get(f"{process}_arg") or [])])
