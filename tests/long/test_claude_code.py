"""Claude Code, unmodified: a task with two calls of its tools, before a gateway whose model follows a script."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from tests.support.clients.environments import CLIENTS, node_with_packages
from tests.support.documents import blocks
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import running

pytestmark = [pytest.mark.e2e, pytest.mark.weekly]
TIMEOUT_S = 200  # a guard


def settings(url: str) -> str:
    """What docs/message-clients.md tells to write, with the address of this gateway."""
    page = CLIENTS.parents[1] / "docs/message-clients.md"
    (block,) = blocks("json", pages=[page])
    return block.text.replace("http://127.0.0.1:8000", url)


async def test_a_task_with_two_calls(tmp_path: Path) -> None:
    node = node_with_packages(tmp_path, CLIENTS / "claude-code/package.json")
    home, work = tmp_path / "home", tmp_path / "work"
    (home / ".claude").mkdir(parents=True)
    work.mkdir()
    program = tmp_path / "node_modules/@anthropic-ai/claude-code/cli-wrapper.cjs"
    note = {"file_path": str(work / "note.txt"), "content": "twelve\n"}
    shell = {"command": "cp note.txt copy.txt", "description": "Copies the note"}
    async with running() as gateway:
        (home / ".claude/settings.json").write_text(settings(gateway.url))
        thinker = gateway.scripts["thinker"]
        thinker.calls = [("Write", json.dumps(note)), ("Bash", json.dumps(shell))]
        words = ("-p", "Write a note and copy it.", "--allowedTools", "Write", "Bash", "--output-format", "json")
        process = await asyncio.create_subprocess_exec(
            *(node, str(program), *words),
            cwd=work,
            env={"PATH": os.environ["PATH"], "HOME": str(home)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(TIMEOUT_S):
            written, said = await process.communicate()
        assert process.returncode == 0, (written, said)
        asked = [start for start in thinker.requests if start.tools]
    result = json.loads(written)
    assert (result["is_error"], result["result"]) == (False, "".join(PIECES))
    assert (work / "copy.txt").read_text() == "twelve\n"
    assert [message.role for message in asked[-1].messages if message.role == "tool"] == ["tool", "tool"]
    systems = [[part.text for part in start.messages[0].content] for start in asked]
    assert all(system == systems[0] for system in systems), "the prompts do not begin alike"
    assert not any("x-anthropic-billing-header" in text for text in systems[0])
