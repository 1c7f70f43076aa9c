"""Compiling grammars: what takes too long, or whose client leaves, is killed, and delays nobody."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput
from services.thinker import compiling
from services.thinker.compiling import GrammarChecks
from services.thinker.request import read_tools
from services.thinker.structure import structure_of

pytest.importorskip("vllm")
pytestmark = pytest.mark.asyncio(loop_scope="module")
DEMO = Path(__file__).parents[2] / "services" / "demo_models" / "quartet-demo"
SLOW = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}})  # over a minute
GUARD_S = 300


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checks() -> AsyncIterator[GrammarChecks]:
    checks = GrammarChecks(DEMO, 1602)
    _, writer = await checks._connect()
    writer.close()
    yield checks
    checks.close()


async def check(checks: GrammarChecks, **structure: Any) -> None:
    params = structure_of(thinker_pb2.SamplingParameters(**structure), None, None)
    assert params is not None
    await checks.check(params, f"sampling.{next(iter(structure))}", {})


def compilations(checks: GrammarChecks) -> list[psutil.Process]:
    return psutil.Process(checks._server.pid).children()


async def until(condition: Any) -> None:
    async with asyncio.timeout(GUARD_S):
        while not condition():
            await asyncio.sleep(0.02)


LOOP = json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})
REFUSED: list[tuple[str, str, str]] = [
    ("json_schema", LOOP, "no text that ends"),
    ("json_schema", '{"type": "integer", "multipleOf": 3}', "not supported"),
    ("json_schema", '{"a":' * 500 + "1" + "}" * 500, "too deeply"),
    ("json_schema", json.dumps({"enum": ["x" * 300_000]}), "at most 262144"),
    ("regex", "((", "parenthesis"),
    ("regex", "a" * 300_000, "at most 262144"),
    ("regex", "a\0", "NUL"),
    ("grammar", "root ::= (", "parser error"),
    ("grammar", " ", "must not be empty"),
]


@pytest.mark.parametrize(("kind", "text", "reason"), REFUSED)
async def test_what_cannot_be_is_refused_and_names_its_field(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch, kind: str, text: str, reason: str
) -> None:
    monkeypatch.setattr(compiling, "SHORT_S", 600.0)  # whatever else runs here
    with pytest.raises(InvalidInput, match=reason) as caught:
        await check(checks, **{kind: text})
    assert caught.value.field == f"sampling.{kind}"


async def test_what_takes_too_long_is_killed(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "SHORT_S", 0.2)
    monkeypatch.setattr(compiling, "LONG_S", 0.4)
    with pytest.raises(InvalidInput, match=r"takes longer than 0\.4 s"):
        await check(checks, json_schema=SLOW)
    await until(lambda: not compilations(checks))


async def test_a_client_that_leaves_ends_the_compilation(checks: GrammarChecks) -> None:
    task = asyncio.create_task(check(checks, json_schema=SLOW))
    await until(lambda: compilations(checks))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not compilations(checks))


async def test_short_ones_do_not_wait_for_long_ones(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "LONG_S", 600.0)
    slow = [asyncio.create_task(check(checks, json_schema=SLOW.replace("p1", f"x{i}"))) for i in range(3)]
    await until(lambda: len(checks._long._waiters or ()) == 2)  # all have proved long
    monkeypatch.setattr(compiling, "SHORT_S", 600.0)
    await check(checks, json_schema='{"type": "object", "properties": {"a": {"type": "integer"}}}')
    assert not any(task.done() for task in slow)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    await until(lambda: not compilations(checks))


async def test_a_short_one_is_compiled_once(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "SHORT_S", 10.0)
    await check(checks, regex="(a|b)+")
    monkeypatch.setattr(checks, "_connect", None)
    await check(checks, regex="(a|b)+")


def test_tools_have_a_size() -> None:
    tool = thinker_pb2.Tool(name="a", parameters_json=json.dumps({"description": "x" * 600_000}))
    start = thinker_pb2.GenerateStart(tools=[tool, tool])
    with pytest.raises(InvalidInput, match=r"tools\[1\]\.parameters_json: makes all tools' larger"):
        read_tools(start)
