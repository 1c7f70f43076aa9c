"""A checkpoint that thinks and has no speech, served by `quartet up` to the openai client: equal to transformers."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from quartet.v1 import thinker_pb2, thinker_pb2_grpc
from services.registry import TEXT_PIPELINE
from tests.support.clients.anthropic import anthropic_report
from tests.support.references.thinker_engine import Reference
from tests.support.systems.command import quartet
from tests.support.systems.stack import Stack, free_port, running, until
from tests.support.weights.checkpoints import thinking_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.long]
ENDS, GOES_ON = "boats", "What is it?"  # a thought of 18 tokens, and one of more than 80
SCHEMA = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return thinking_checkpoint()


@pytest.fixture(scope="module")
def system(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = ["--thinker-arg=--max-running-requests=2", "--thinker-arg=--tool-call-parser=hermes"]
    with running(checkpoint, tmp_path_factory.mktemp("run"), *flags) as system:
        yield system


@pytest.fixture(scope="module")
def client(system: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


def ask(client: openai.OpenAI, question: str, **options: Any) -> Any:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "temperature": 0, **options}
    return client.chat.completions.create(model=client.models.list().data[0].id, **asked)


def thought_of(message: Any) -> str | None:
    return getattr(message, "reasoning_content", None)


def expected(reference: Reference, question: str, tokens: int) -> tuple[str, str, int]:
    """(thought, answer, tokens of the thought) by transformers."""
    ids = reference.answer([{"role": "user", "content": question}], tokens).output_ids
    tokenizer = reference.processor.tokenizer
    end = tokenizer.convert_tokens_to_ids("</think>")
    at = ids.index(end) if end in ids else len(ids)
    return tokenizer.decode(ids[:at]), tokenizer.decode(ids[at + 1 :]), at


def test_the_thinker_is_started_alone(system: Stack) -> None:
    assert set(system.addresses) == {"thinker"}
    (model,) = system.http.get("/v1/models").json()["data"]
    assert model["quartet"]["output_modalities"] == ["text"]


@pytest.mark.parametrize("question", [ENDS, GOES_ON])
def test_thought_and_answer_are_those_of_transformers(
    client: openai.OpenAI, reference: Reference, question: str
) -> None:
    thought, answer, tokens = expected(reference, question, 40)
    assert (answer == "") == (question == GOES_ON)
    whole = ask(client, question, max_tokens=40, logprobs=True)
    choice = whole.choices[0]
    assert (thought_of(choice.message), choice.message.content) == (thought, answer)
    assert choice.finish_reason == "length"
    assert (whole.usage.completion_tokens, whole.usage.completion_tokens_details.reasoning_tokens) == (40, tokens)
    assert len(choice.logprobs.content) == 40  # those of the thought and of its end among them, as vLLM has it

    chunks = list(ask(client, question, max_tokens=40, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(thought_of(delta) or "" for delta in deltas) == thought
    assert "".join(delta.content or "" for delta in deltas) == answer
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == tokens


def test_a_thought_has_a_budget_or_is_left_out(client: openai.OpenAI, reference: Reference) -> None:
    thought, _, _ = expected(reference, GOES_ON, 9)  # the template's line end after the marker counts, too
    whole = ask(client, GOES_ON, max_tokens=40, extra_body={"thinking_token_budget": 10})
    choice = whole.choices[0]
    assert whole.usage.completion_tokens_details.reasoning_tokens == 9
    assert thought_of(choice.message) == thought
    assert choice.message.content
    hidden = {"thinking_token_budget": 10, "include_reasoning": False, "return_token_ids": True}
    other = ask(client, GOES_ON, max_tokens=40, logprobs=True, extra_body=hidden).choices[0]
    assert (thought_of(other.message), other.message.content) == (None, choice.message.content)
    assert (other.logprobs, other.token_ids) == (None, None)


def test_anthropics_clients_get_the_thought_and_send_it_back(system: Stack, reference: Reference) -> None:
    thought, answer, _ = expected(reference, ENDS, 40)
    report = anthropic_report(system.url, "", ENDS)
    (blocks,) = report["thoughts"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == (thought, answer)
    assert blocks[0]["signature"]
    ((counted, read),) = report["counts"]
    assert counted == read


def test_what_stops_an_answer_stops_a_thought(client: openai.OpenAI, reference: Reference) -> None:
    thought, answer, _ = expected(reference, ENDS, 40)
    for stop, told in (
        (thought[6:12], (thought[: thought.index(thought[6:12])], "")),
        (answer[8:16], (thought, answer[: answer.index(answer[8:16])])),
        ("</think>", (thought, "")),
    ):
        choice = ask(client, ENDS, max_tokens=40, stop=[stop]).choices[0]
        assert (thought_of(choice.message), choice.message.content) == told
        assert choice.finish_reason == "stop"


def test_a_structure_is_that_of_the_answer_after_the_thought(client: openai.OpenAI, reference: Reference) -> None:
    thought, _, _ = expected(reference, ENDS, 40)
    json_schema = {"name": "b", "schema": SCHEMA}
    choice = ask(client, ENDS, response_format={"type": "json_schema", "json_schema": json_schema}).choices[0]
    assert thought_of(choice.message) == thought
    assert isinstance(json.loads(choice.message.content)["b"], bool)


def test_a_call_may_follow_a_thought(client: openai.OpenAI, checkpoint: Path, reference: Reference) -> None:
    end = reference.processor.tokenizer.convert_tokens_to_ids("</think>")
    # the random model may think for ever; a structure rules the token out once the thought has ended
    choice = ask(client, ENDS, tools=[TOOL], tool_choice="required", logit_bias={str(end): 20}).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason) == ("look", "tool_calls")
    assert isinstance(json.loads(call.function.arguments)["b"], bool)


def test_a_stage_alone_tells_thought_and_calls_apart(system: Stack, reference: Reference) -> None:
    """The calls by a parser of vLLM's registry; what the random model writes is dictated to it."""
    end = reference.processor.tokenizer.convert_tokens_to_ids("</think>")
    (answer, *_) = reference.processor.tokenizer.encode("Well.")  # it might as well begin with a call
    written = r'Well\.<tool_call>\{"name": "look", "arguments": \{"b": (true|false)\}\}</tool_call>'
    start = thinker_pb2.GenerateStart(
        request_id="alone",
        messages=[thinker_pb2.ChatMessage(role="user", content=[thinker_pb2.ContentPart(text=ENDS)])],
        sampling=thinker_pb2.SamplingParameters(
            temperature=0, regex=written, logit_bias={end: 20, answer: 10}, max_tokens=200
        ),
        tools=[thinker_pb2.Tool(name="look", parameters_json=json.dumps(SCHEMA))],
    )
    with grpc.insecure_channel(system.addresses["thinker"]) as channel:
        stub = thinker_pb2_grpc.ThinkerServiceStub(channel)
        responses = list(stub.Generate(iter([thinker_pb2.GenerateRequest(start=start)])))
    deltas = [response.delta for response in responses if response.HasField("delta")]
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    thought = ids[: ids.index(end)]
    assert "".join(delta.reasoning for delta in deltas) == reference.processor.tokenizer.decode(thought)
    assert "".join(delta.text for delta in deltas) == "Well."
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert "".join(call.name for call in calls) == "look"
    assert isinstance(json.loads("".join(call.arguments_json for call in calls))["b"], bool)
    summary = responses[-1].summary
    assert summary.finish_reason == thinker_pb2.FINISH_REASON_TOOL_CALLS
    assert (summary.reasoning_tokens, summary.completion_tokens) == (len(thought), len(ids))


def test_of_those_who_wait_the_lower_priority_goes_first(system: Stack, client: openai.OpenAI) -> None:
    """Both places are taken; then one becomes free."""
    endless = {"max_tokens": 12_000, "stream": True, "extra_body": {"ignore_eos": True}}
    before = [ask(client, question, **endless) for question in (ENDS, GOES_ON)]
    until(lambda: system.metric("thinker", "quartet_thinker_requests_running") == 2, "both run")
    ended: list[int] = []

    def wait(priority: int) -> None:
        ask(client, ENDS, max_tokens=3, extra_body={"priority": priority})
        ended.append(priority)

    waiting = []
    for priority in (1, -1):
        waiting.append(threading.Thread(target=wait, args=[priority]))
        waiting[-1].start()
        count = len(waiting)
        until(lambda: system.metric("thinker", "quartet_thinker_requests_waiting") == count, f"{count} wait")  # noqa: B023
    before[0].close()
    for thread in waiting:
        thread.join()
    before[1].close()
    assert ended == [-1, 1]


def test_the_commands_say_what_the_model_lacks(system: Stack, checkpoint: Path, tmp_path: Path) -> None:
    server = ["--url", system.url]
    answered = quartet("chat", ENDS, *server, "--max-tokens", "30", cwd=tmp_path)
    assert answered.returncode == 0
    assert answered.stderr.strip()  # the thought, which is no part of the answer
    for command in (("chat", ENDS, "--out", "a.wav"), ("talk", "--out", "a.wav"), ("say", "hi", "--out", "a.wav")):
        refused = quartet(*command, *server, cwd=tmp_path)
        assert (refused.returncode, list(tmp_path.iterdir())) == (1, [])
        assert "speech" in refused.stderr or "speaks" in refused.stderr
    started = quartet(
        "up", "--model", str(checkpoint), "--pipeline", "qwen3-omni", "--port", str(free_port()), cwd=tmp_path
    )
    assert started.returncode == 2
    assert f"has no talker: give --pipeline {Path(TEXT_PIPELINE).stem}" in started.stderr
