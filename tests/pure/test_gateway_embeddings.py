"""Embeddings and scores over HTTP, beside a thinker; the embedders follow a script."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from gateway.answers import room
from gateway.dialects.openai import embeddings
from quartet.v1 import thinker_pb2
from services.common.errors import ContextTooLong, InvalidInput, Unavailable
from tests.support.scripted.embedder import DIMENSIONS, MOST_INPUTS, embedding
from tests.support.systems.gateway import Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
PIPELINE = """\
stages:
  thinker: {kind: thinker, address: 'h:1'}
  embedder: {kind: embedder, address: 'h:2'}
  reranker: {kind: embedder, address: 'h:3'}
outputs: {text: thinker, embedding: embedder, scores: reranker}
"""
QUERY, DOCUMENTS = "abc", ["xyz", "abx", "abc", "axy"]
SCORES = [0.0, 2 / 3, 1.0, 1 / 3]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    file = tmp_path_factory.mktemp("embeddings") / "embeddings.yaml"
    file.write_text(PIPELINE)
    async with running(file) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(started: Running) -> AsyncIterator[Running]:
    yield started
    await started.reset()


async def refusal(gateway: Running, path: str, **body: Any) -> tuple[int, str | None, str]:
    response = await gateway.http.post(path, json=body)
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


@pytest.mark.parametrize("given", ["four", ["four", "six"], [5, 6, 7], [[5], [6, 7]], ["", "a"]])
async def test_embeddings_come_in_the_order_of_the_inputs(gateway: Running, given: Any) -> None:
    is_single = isinstance(given, str) or isinstance(given[0], int)
    counts = [len(each) for each in ([given] if is_single else given)]
    for form in ("float", "base64"):
        made = await gateway.openai.embeddings.create(model="scripted-embedder", input=given, encoding_format=form)
        assert [each.index for each in made.data] == list(range(len(counts)))
        for i, each in enumerate(made.data):
            values: Any = each.embedding
            if form == "base64":
                values = np.frombuffer(base64.b64decode(values), "<f4")
            assert np.allclose(values, embedding(i, counts[i]), atol=1e-7)
        assert (made.usage.prompt_tokens, made.usage.total_tokens) == (sum(counts),) * 2
        assert (made.object, made.model) == ("list", "scripted-embedder")
    sent = gateway.scripts["embedder"].requests[-1]
    assert sent.inputs[0].WhichOneof("content") == ("text" if isinstance(given[0], str) else "token_ids")


async def test_what_openais_client_makes_of_its_own_default_is_the_same(gateway: Running) -> None:
    """It asks for base64, and reads that."""
    made = await gateway.openai.embeddings.create(model="text-embedding-3-small", input=["a", "bc"], user="me")
    assert np.allclose([each.embedding for each in made.data], [embedding(0, 1), embedding(1, 2)])


async def test_many_embeddings_are_written_in_pieces(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "_PIECE", 2 * DIMENSIONS)
    response = await gateway.http.post("/v1/embeddings", json={"input": list("abcde")})
    assert [each["index"] for each in response.json()["data"]] == [0, 1, 2, 3, 4]


async def test_members_reach_the_stage(gateway: Running) -> None:
    members = {"dimensions": 3, "truncate_prompt_tokens": -1, "truncation_side": "left", "priority": 7}
    response = await gateway.http.post("/v1/embeddings", json={"input": "a", "add_special_tokens": False, **members})
    sent = gateway.scripts["embedder"].requests[-1]
    assert len(response.json()["data"][0]["embedding"]) == sent.dimensions == 3
    assert (sent.truncate_tokens, sent.truncation_side) == (-1, thinker_pb2.TRUNCATION_SIDE_LEFT)
    assert (sent.priority, sent.no_special_tokens) == (7, True)
    body = {"query": QUERY, "documents": DOCUMENTS, "max_tokens_per_doc": 9, "truncate_prompt_tokens": 8}
    await gateway.http.post("/v1/rerank", json=body)
    sent = gateway.scripts["reranker"].requests[-1]
    assert (sent.max_document_tokens, sent.truncate_tokens) == (9, 8)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_documents_are_put_in_order(gateway: Running, path: str) -> None:
    for documents in (DOCUMENTS, [{"text": each} for each in DOCUMENTS]):
        response = await gateway.http.post(path, json={"query": QUERY, "documents": documents, "model": "rerank-v3.5"})
        body = response.json()
        order = [2, 1, 3, 0]
        assert [each["index"] for each in body["results"]] == order
        assert np.allclose([each["relevance_score"] for each in body["results"]], [SCORES[i] for i in order])
        told = [each.get("document") for each in body["results"]]
        assert told == [None if path == "/v2/rerank" else {"text": DOCUMENTS[i]} for i in order]
        assert (body["model"], body["usage"]["total_tokens"]) == ("scripted-reranker", 24)
    asked = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": path == "/v2/rerank"}
    results = (await gateway.http.post(path, json=asked)).json()["results"]
    assert [(each["index"], "document" in each) for each in results] == [
        (2, path == "/v2/rerank"),
        (1, path == "/v2/rerank"),
    ]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_pairs_are_scored(gateway: Running, path: str) -> None:
    for first, second in (("text_1", "text_2"), ("queries", "documents")):
        body = (await gateway.http.post(path, json={first: QUERY, second: DOCUMENTS})).json()
        assert np.allclose([each["score"] for each in body["data"]], SCORES)
        assert [each["index"] for each in body["data"]] == [0, 1, 2, 3]
    body = (await gateway.http.post(path, json={"text_1": ["abc", "x"], "text_2": ["abc", "a"]})).json()
    assert [each["score"] for each in body["data"]] == [1.0, 0.0]


async def test_models_say_what_they_make(gateway: Running) -> None:
    models = {each.id: each.to_dict() for each in (await gateway.openai.models.list()).data}
    assert list(models) == ["scripted", "scripted-embedder", "scripted-reranker"]
    facts: Any = models["scripted-embedder"]["quartet"]
    assert (facts["output_modalities"], facts["dimensions"], facts["pooling"]) == (["embedding"], DIMENSIONS, "mean")
    assert models["scripted-embedder"]["max_model_len"] == 16
    scores: Any = models["scripted-reranker"]["quartet"]
    assert (scores["output_modalities"], scores["embeds"]) == (["scores"], False)


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/embeddings", {"input": []}, "input", "is empty"),
    ("/v1/embeddings", {"input": ["a"] * (MOST_INPUTS + 1)}, "input", f"at most {MOST_INPUTS} are taken"),
    ("/v1/embeddings", {}, "input", "required"),
    ("/v1/embeddings", {"input": [1, "a"]}, "input", ""),
    ("/v1/embeddings", {"input": [-1]}, "input", ""),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", ""),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", ""),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ""),
    ("/v1/embeddings", {"input": "a", "model": "scripted-reranker"}, "model", "does not do this"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents", "is empty"),
    ("/v1/rerank", {"query": "a", "documents": ["a"] * 7}, "documents", "at most 6 are taken"),
    ("/v1/rerank", {"query": "a", "documents": [{"image": "x"}]}, "documents", ""),
    ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", ""),
    ("/v1/rerank", {"query": "a", "documents": ["a"], "model": "scripted-embedder"}, "model", "does not do this"),
    ("/v1/score", {"text_1": "a"}, "text_2", "required"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "send 1, or as many"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "queries": "c"}, "documents", "required"),
    ("/v1/score", {"queries": "a", "documents": []}, "documents", "is empty"),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), BAD)
async def test_bad_input_names_the_member(
    gateway: Running, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    status, named, message = await refusal(gateway, path, **body)
    assert (status, (named or "").startswith(param), words in message) == (400, True, True), (named, message)
    assert not gateway.scripts["embedder"].requests + gateway.scripts["reranker"].requests


REFUSED: list[tuple[str, dict[str, Any], InvalidInput, str]] = [
    ("/v1/embeddings", {"input": "long"}, ContextTooLong("inputs[0].text", "has 17 tokens"), "input"),
    ("/v1/embeddings", {"input": ["a", "long"]}, ContextTooLong("inputs[1].text", "has 17 tokens"), "input[1]"),
    ("/v1/embeddings", {"input": [1, 99]}, InvalidInput("inputs[0].token_ids[1]", "is not in"), "input[1]"),
    ("/v1/embeddings", {"input": "a", "dimensions": 9}, InvalidInput("dimensions", "must be 1 to 4"), "dimensions"),
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}, ContextTooLong("documents[1]", "long"), "documents[1]"),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}, ContextTooLong("documents[1]", "long"), "text_2[1]"),
    ("/v1/embeddings", {"input": "a"}, InvalidInput("truncate_tokens", "wrong"), "truncate_prompt_tokens"),
]


@pytest.mark.parametrize(("path", "body", "error", "param"), REFUSED)
async def test_what_the_stage_refuses_is_in_the_requests_words(
    gateway: Running, path: str, body: dict[str, Any], error: InvalidInput, param: str
) -> None:
    for script in (gateway.scripts["embedder"], gateway.scripts["reranker"]):
        script.error = error
    status, named, message = await refusal(gateway, path, **body)
    assert (status, named, message) == (400, param, f"{param}: {error.reason}")


async def test_a_chat_does_not_go_to_the_embedder(gateway: Running) -> None:
    status, error = await gateway.refusal(
        {"model": "scripted-embedder", "messages": [{"role": "user", "content": "x"}]}
    )
    assert (status, error["param"], error["code"]) == (400, "model", "unsupported_model")
    assert (await gateway.chat({"messages": [{"role": "user", "content": "x"}]})).status_code == 200


async def test_a_model_that_does_not_do_what_the_file_says_is_a_refusal(gateway: Running) -> None:
    info = gateway.stages.infos["reranker"].info
    info.embedder.scores, info.embedder.embeds = False, True
    try:
        await gateway.publish_info("reranker")
        status, param, message = await refusal(gateway, "/v1/rerank", query="a", documents=["b"])
        assert (status, param) == (400, "model")
        assert "'scripted-reranker' makes embeddings; a server for scores needs another model" in message
    finally:
        info.embedder.scores, info.embedder.embeds = True, False
        await gateway.publish_info("reranker")


@pytest.mark.parametrize(
    ("path", "stage", "body"),
    [
        ("/v1/embeddings", "embedder", {"input": ["a", "b"]}),
        ("/v1/rerank", "reranker", {"query": "a", "documents": ["b", "c"]}),
    ],
)
async def test_a_client_that_leaves_ends_the_stages_work(
    gateway: Running, path: str, stage: str, body: dict[str, Any]
) -> None:
    script = gateway.scripts[stage]
    script.after, script.hold = 1, True
    asking = asyncio.create_task(gateway.http.post(path, json=body))
    await script.holding.wait()
    asking.cancel()
    await gateway.until(lambda: script.ended == ["cancelled"])
    await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == 0)
    assert gateway.app.state.gateway.embedding_room._left == room.ROOM_VALUES


async def test_a_stage_that_fails_midway_is_a_status_not_half_an_answer(gateway: Running) -> None:
    script = gateway.scripts["embedder"]
    script.after, script.error = 1, Unavailable("gone")
    response = await gateway.http.post("/v1/embeddings", json={"input": ["a", "b"]})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "stage_unavailable")


async def test_a_request_waits_for_room_and_then_goes_on(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    state = gateway.app.state.gateway
    monkeypatch.setattr(state, "embedding_room", room.Room(3 * DIMENSIONS))
    script = gateway.scripts["embedder"]
    script.hold = True
    first, second = (asyncio.create_task(gateway.http.post("/v1/embeddings", json={"input": ["a", "b"]})) for _ in "ab")
    await script.holding.wait()
    assert len(script.requests) == 1
    script.go_on()
    assert [(await each).status_code for each in (first, second)] == [200, 200]
    assert len(script.requests) == 2


async def test_as_many_numbers_as_a_request_may_have(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "MAX_VALUES", 2 * DIMENSIONS)
    assert await refusal(gateway, "/v1/embeddings", input=["a", "b", "c"]) == (
        *(400, "input"),
        "input: has 3 items, of 4 dimensions; at most 2 are taken in one request",
    )


async def test_they_are_counted(gateway: Running) -> None:
    def count(page: str, name: str) -> float:
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

    before = (await gateway.http.get("/metrics")).text
    await gateway.http.post("/v1/embeddings", json={"input": ["ab", "c"]})
    await gateway.http.post("/v1/rerank", json={"query": "a", "documents": ["bc"]})
    after = (await gateway.http.get("/metrics")).text
    for name, more in (("quartet_gateway_embedded_inputs_total", 3), ("quartet_gateway_prompt_tokens_total", 6)):
        assert count(after, name) - count(before, name) == more


async def test_members_without_effect_are_named(gateway: Running) -> None:
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})):
        response = await gateway.http.post(path, json=body | {"user": "me"})
        assert (response.status_code, response.headers["x-quartet-ignored"]) == (200, "user")
        status, param, _ = await refusal(gateway, path, **body, colour="red")
        assert (status, param) == (400, "colour")


async def test_the_body_is_json_of_float32() -> None:
    text = embeddings._written([np.array([0.1, -0.0, 3e-39], "<f4").tobytes()], 5, False)
    (member,) = json.loads(b"[" + text + b"]")
    assert member["index"] == 5
    assert np.array(member["embedding"], "<f4").tobytes() == np.array([0.1, -0.0, 3e-39], "<f4").tobytes()
