"""Prompts that no chat template writes, over HTTP: completions, ids in and out, the tokenizer; a scripted thinker."""

import asyncio
import base64
import json
import math
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.access.api_keys import new_key
from gateway.answers import rendering
from services.common.errors import ContextTooLong, InvalidInput, QueueFull
from tests.pure.test_api_keys import bearer, entry, write
from tests.support.k8s.pool import METRICS
from tests.support.samples.media import png
from tests.support.scripted.thinker import MEDIUM, MEDIUM_TOKENS, PIECES
from tests.support.systems.gateway import Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "".join(PIECES)
ASK: dict[str, Any] = {"model": "scripted", "prompt": "Once"}
IDS: dict[str, Any] = {"token_ids": [5, 6, 7]}


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


def events_of(text: str) -> list[dict[str, Any]]:
    *events, done = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
    assert done == "[DONE]"
    return list(map(json.loads, events))


async def test_a_prompt_is_gone_on_with(gateway: Running) -> None:
    whole = await gateway.openai.completions.create(**ASK, seed=7, logprobs=None)
    (choice,) = whole.choices
    assert (choice.text, choice.finish_reason, whole.object) == (TEXT, "stop", "text_completion")
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (10, 3, 13)
    (start,) = gateway.scripts["thinker"].requests
    assert (start.prompt.text, list(start.messages)) == ("Once", [])
    assert (start.sampling.max_tokens, start.sampling.seed) == (16, 7)

    stream = await gateway.openai.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    assert chunks[-1].usage is not None


async def test_several_prompts_and_answers_each(gateway: Running) -> None:
    whole = await gateway.openai.completions.create(model="scripted", prompt=[[1, 2], [3]], n=2, echo=True, seed=1)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in whole.choices] == [f"\x01\x02{TEXT}"] * 2 + [f"\x03{TEXT}"] * 2
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (20, 12)
    starts = sorted(gateway.scripts["thinker"].requests, key=lambda start: start.request_id)
    assert [list(start.prompt.token_ids.ids) for start in starts] == [[1, 2], [1, 2], [3], [3]]
    assert [start.sampling.seed for start in starts] == [1, 2, 3, 4]


async def test_log_probabilities_are_lists(gateway: Running) -> None:
    gateway.scripts["thinker"].logprobs = True
    whole = await gateway.openai.completions.create(**ASK, logprobs=1)
    told = whole.choices[0].logprobs
    assert told is not None
    assert (told.tokens, told.token_logprobs) == (list(PIECES), [-0.5] * 3)
    assert told.top_logprobs == [{"x": -0.5, piece: -0.5} for piece in PIECES]
    assert told.text_offset == [0, len(PIECES[0]), len(PIECES[0] + PIECES[1])]
    response = await gateway.http.post("/v1/completions", json=ASK | {"logprobs": 1, "stream": True})
    chunks = [chunk["choices"][0] for chunk in events_of(response.text)]
    assert [token for chunk in chunks for token in chunk["logprobs"]["tokens"]] == list(PIECES)
    assert [at for chunk in chunks for at in chunk["logprobs"]["text_offset"]] == told.text_offset


async def test_completions_tell_token_ids(gateway: Running) -> None:
    asked = ASK | {"prompt": ["Once", "ab"], "return_token_ids": True, "n": 2}
    prompts = [[*map(ord, "Once")]] * 2 + [[97, 98]] * 2
    choices = (await gateway.http.post("/v1/completions", json=asked)).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == prompts
    assert [choice["token_ids"] for choice in choices] == [[0, 1, 2]] * 4
    for body, first in ((asked, prompts[3]), (asked | {"prompt": [[5, 6]], "echo": True}, [5, 6])):
        streamed = await gateway.http.post("/v1/completions", json=body | {"stream": True})
        last = [choice for each in events_of(streamed.text) for choice in each["choices"]]
        last = [choice for choice in last if choice["index"] == last[-1]["index"]]
        assert [choice["prompt_token_ids"] for choice in last] == [first, *[None] * (len(last) - 1)]
        assert [token_id for choice in last for token_id in choice["token_ids"]] == [0, 1, 2]
    assert (await gateway.http.post("/v1/completions", json=ASK)).json()["choices"][0]["token_ids"] is None


async def test_an_echoed_prompt_has_its_log_probabilities(gateway: Running) -> None:
    gateway.scripts["thinker"].logprobs = True
    whole = await gateway.openai.completions.create(**ASK, echo=True, logprobs=1, n=2)
    for choice in whole.choices:
        told = choice.logprobs
        assert told is not None
        assert choice.text == "".join(told.tokens or ()) == "Once" + TEXT
        assert told.token_logprobs == [None, -1.0, -0.5, pytest.approx(-1 / 3), -0.5, -0.5, -0.5]
        prompt = [{"x": -0.125, "n": -1.0}, {"x": -0.125, "c": -0.5}, {"x": -0.125, "e": pytest.approx(-1 / 3)}]
        assert told.top_logprobs == [None, *prompt, *({"x": -0.5, piece: -0.5} for piece in PIECES)]
        assert told.text_offset == [0, 1, 2, 3, 4, 9, 11]
    asked = [start.sampling.HasField("prompt_logprobs") for start in gateway.scripts["thinker"].requests]
    assert sorted(asked) == [False, True]  # once for each prompt
    body = ASK | {"echo": True, "logprobs": 1, "stream": True}
    response = await gateway.http.post("/v1/completions", json=body)
    chunks = [chunk["choices"][0] for chunk in events_of(response.text)]
    assert "".join(chunk["text"] for chunk in chunks) == "Once" + TEXT
    assert [value for chunk in chunks for value in chunk["logprobs"]["token_logprobs"]] == told.token_logprobs
    assert [at for chunk in chunks for at in chunk["logprobs"]["text_offset"]] == told.text_offset
    alone = await gateway.openai.completions.create(**ASK, logprobs=1)
    assert alone.choices[0].logprobs is not None
    assert alone.choices[0].logprobs.tokens == list(PIECES)


async def test_prompts_of_ids_have_log_probabilities(gateway: Running) -> None:
    asked = {"token_ids": [97, 98, 99], "sampling_params": {"prompt_logprobs": 1, "n": 2}}
    whole = (await gateway.http.post("/inference/v1/generate", json=asked)).json()
    first, *others = whole["prompt_logprobs"]
    likely = {"logprob": -0.125, "rank": 1, "decoded_token": "x"}
    assert first is None
    assert others == [
        {"98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"}, "120": likely},
        {"99": {"logprob": -0.5, "rank": 2, "decoded_token": "c"}, "120": likely},
    ]
    asked["sampling_params"]["prompt_logprobs"] = 0
    assert [len(each or ()) for each in (await _generated(gateway, asked))["prompt_logprobs"]] == [0, 1, 1]
    assert "prompt_logprobs" not in await _generated(gateway, IDS)


async def test_chosen_tokens_of_prompts_have_log_probabilities(gateway: Running) -> None:
    chosen = {"prompt_logprob_token_ids": [[3], [4, 10]], "prompt_logprob_start": 1, "n": 2}
    whole = await _generated(gateway, {"token_ids": [1, 2, 3, 4], "sampling_params": chosen})
    scores = np.load(BytesIO(base64.b64decode(whole["prompt_token_id_logprobs"])))
    assert (scores.dtype, scores.tolist()) == (np.float32, [[-3.0, -math.inf], [-4.0, -10.0]])
    first, second = sorted(gateway.scripts["thinker"].requests, key=lambda start: start.request_id)
    assert [list(row.ids) for row in first.sampling.prompt_logprob_token_ids] == [[3], [4, 10]]
    assert (first.sampling.prompt_logprob_start, len(second.sampling.prompt_logprob_token_ids)) == (1, 0)
    assert "prompt_token_id_logprobs" not in await _generated(gateway, IDS)


async def _generated(gateway: Running, body: dict[str, Any]) -> dict[str, Any]:
    return (await gateway.http.post("/inference/v1/generate", json=body)).raise_for_status().json()


async def test_a_thinker_that_does_not_tell_them_is_named(gateway: Running) -> None:
    gateway.scripts["thinker"].error = InvalidInput("sampling.prompt_logprobs", "are not told")
    generate = IDS | {"sampling_params": {"prompt_logprobs": 1}}
    complete = ASK | {"echo": True, "logprobs": 1}
    named = [
        (await gateway.http.post(path, json=body)).json()["error"]["message"]
        for path, body in (("/inference/v1/generate", generate), ("/v1/completions", complete))
    ]
    assert named == ["sampling_params.prompt_logprobs: are not told", "echo: are not told"]


async def test_what_benchmarks_send_is_taken(gateway: Running) -> None:
    """vLLM's, guidellm's and aiperf's bodies."""
    vllm = {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None, "ignore_eos": True}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    for body in (
        ASK | vllm | {"stream": True, "stream_options": {"include_usage": True}},
        ASK | {"stream": True, "stream_options": usage, "stop": None, "ignore_eos": True, "max_tokens": 8},
    ):
        response = await gateway.http.post("/v1/completions", json=body)
        assert events_of(response.text)[-1]["usage"]["completion_tokens"] == 3


async def test_ids_in_and_ids_out(gateway: Running) -> None:
    gateway.scripts["thinker"].logprobs = True
    asked = IDS | {"request_id": "mine", "sampling_params": {"logprobs": 1, "max_tokens": 9}, "return_token_ids": True}
    whole = (await gateway.http.post("/inference/v1/generate", json=asked)).json()
    assert (whole["request_id"], whole["prompt_token_ids"]) == ("mine", [5, 6, 7])
    (choice,) = whole["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([0, 1, 2], "stop")
    assert len(choice["logprobs"]["content"]) == 3
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["logprob"] == -0.5
    assert whole["output_mode"] == "tokens"
    ids = [[top["token_id"] for top in each["top_logprobs"]] for each in choice["logprobs"]["content"]]
    assert all(token_id in tops for token_id, tops in zip(choice["token_ids"], ids, strict=True))
    assert whole["usage"]["total_tokens"] == 13
    streamed = await gateway.http.post("/inference/v1/generate", json=asked | {"stream": True, "output_mode": "text"})
    choices = [event["choices"][0] for event in events_of(streamed.text)]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == [0, 1, 2]
    assert "".join(choice["text"] for choice in choices) == TEXT
    assert choices[-1]["finish_reason"] == "stop"
    assert {event["output_mode"] for event in events_of(streamed.text)} == {"text"}


async def test_media_are_beside_the_ids(gateway: Running) -> None:
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    response = await gateway.http.post("/inference/v1/generate", json=IDS | {"content_parts": [part]})
    assert response.status_code == 200
    (media,) = gateway.scripts["thinker"].requests[-1].prompt.media
    assert (media.data, media.field) == (png(), "content_parts[0]")


async def test_a_request_is_given_up_by_its_id(gateway: Running) -> None:
    def heard() -> float | None:  # answers whose first token has come
        return REGISTRY.get_sample_value("quartet_gateway_ttft_seconds_count")

    thinker, mine = gateway.scripts["thinker"], IDS | {"request_id": "mine"}
    thinker.hold, thinker.after = True, 2
    before = heard()
    asking = asyncio.create_task(gateway.http.post("/inference/v1/generate", json=mine))
    await thinker.holding.wait()
    await gateway.until(lambda: heard() != before)
    again = await gateway.http.post("/inference/v1/generate", json=mine)
    assert again.json()["error"]["param"] == "request_id"
    abort = {"request_ids": ["other", "mine"]}
    aborted = await gateway.http.post("/inference/v1/abort_requests", json=abort)
    assert (aborted.status_code, aborted.json()) == (200, {})
    (choice,) = (await asking).json()["choices"]
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [0])
    await gateway.until(lambda: thinker.ended == ["cancelled"])

    async with gateway.http.stream("POST", "/inference/v1/generate", json=mine | {"stream": True}) as told:
        lines = told.aiter_lines()
        body = f"{await anext(lines)}\n"
        await gateway.http.post("/inference/v1/abort_requests", json=abort)
        body += "\n".join([line async for line in lines])
    choices = [event["choices"][0] for event in events_of(body)]
    assert [(choice["finish_reason"], choice["token_ids"]) for choice in choices] == [(None, [0]), ("abort", [])]


async def test_another_key_gives_nothing_up(tmp_path: Path) -> None:
    alice, bob = new_key(), new_key()
    keys = write(tmp_path / "keys.yaml", entry("alice", alice), entry("bob", bob))
    async with running(api_keys_file=keys) as gateway:
        thinker = gateway.scripts["thinker"]
        thinker.hold, thinker.after = True, 2
        mine = IDS | {"request_id": "mine"}
        asking = asyncio.create_task(gateway.http.post("/inference/v1/generate", json=mine, headers=bearer(alice)))
        await thinker.holding.wait()
        ids = {"request_ids": ["mine"]}
        assert (
            await gateway.http.post("/inference/v1/abort_requests", json=ids, headers=bearer(bob))
        ).status_code == 200
        thinker.go_on()
        assert (await asking).json()["choices"][0]["finish_reason"] == "stop"


async def test_the_tokenizer_is_asked(gateway: Running) -> None:
    asked = {"prompt": "hé", "return_token_strs": True}
    told = (await gateway.http.post("/tokenize", json=asked)).json()
    assert told == {"count": 2, "max_model_len": told["max_model_len"], "tokens": [104, 233], "token_strs": ["h", "é"]}
    assert (await gateway.http.post("/detokenize", json={"tokens": [104, 233]})).json() == {"prompt": "hé"}
    assert (await gateway.http.get("/tokenizer_info")).json() == {"tokenizer_class": "Letters"}
    chat = {"messages": [{"role": "user", "content": "ab"}], "add_generation_prompt": False}
    assert (await gateway.http.post("/tokenize", json=chat)).json()["tokens"] == [97, 98]
    assert gateway.scripts["thinker"].requests[-1].no_generation_prompt


async def test_the_tokenizer_reads_media(gateway: Running) -> None:
    """The ids are those that a chat of the same messages has, media included."""
    url = f"data:image/png;base64,{base64.b64encode(png(8, 8)).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    chat = {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "ab"}]}]}
    given = {
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "chat_template_kwargs": {"b": 3},
        "add_generation_prompt": False,
    }
    told = (await gateway.http.post("/tokenize", json=chat | given)).json()
    asked = gateway.scripts["thinker"].requests[-1]
    assert (told["tokens"], told["count"], told["token_strs"]) == ([*[MEDIUM] * 3, 97, 98], 5, None)
    assert (asked.count_only, asked.no_generation_prompt, len(asked.tools)) == (True, True, 1)
    assert (asked.chat_template_kwargs_json, bool(asked.messages[0].content[0].media.data)) == ('{"b": 3}', True)
    refused = await gateway.http.post("/tokenize", json=chat | {"return_token_strs": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_token_strs")
    broken = {"messages": [{"role": "user", "content": [image | {"image_url": {"url": "data:image/png;base64,AAAA"}}]}]}
    refused = (await gateway.http.post("/tokenize", json=broken)).json()["error"]
    assert (refused["param"], refused["code"]) == ("messages[0].content[0]", "invalid_media")


PNG = f"data:image/png;base64,{base64.b64encode(png(8, 8)).decode()}"
SEEN = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG}}, {"type": "text", "text": "ab"}]}
RENDERED = [  # members of a chat and, of the rendered request, members that differ from its own, with their values
    ({}, {}, {"max_tokens": None, "logprobs": None}),
    (
        {"temperature": 0.5, "stop": "x", "logit_bias": {"5": 1}, "n": 2, "max_tokens": 9, "seed": 3},
        {},
        {"temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1.0}, "n": 2, "max_tokens": 9, "seed": 3},
    ),
    ({"logprobs": True, "prompt_logprobs": 1}, {}, {"logprobs": 0, "prompt_logprobs": 1}),
    ({"structured_outputs": {"json": {"type": "object"}}}, {}, {"structured_outputs": {"json": {"type": "object"}}}),
    ({"response_format": {"type": "json_object"}}, {}, {"response_format": {"type": "json_object"}}),
    (
        {"stream": True, "stream_options": {"include_usage": True}, "priority": 2},
        {"stream": True, "stream_options": {"include_usage": True}, "priority": 2},
        {},
    ),
]


@pytest.mark.parametrize("has_media", [False, True])
async def test_a_rendered_chat_is_answered_as_it_would_be(gateway: Running, has_media: bool) -> None:
    """What is rendered goes as it is to generate, and the thinker is asked the same, but for the prompt's form."""
    thinker = gateway.scripts["thinker"]

    def latest(requests: list[Any]) -> Any:
        """Of several answers, which come in any order, the last one's."""
        return max(requests[-members.get("n", 1) :], key=lambda request: request.sampling.seed)

    for members, own, sampling in RENDERED:
        chat = {"model": "scripted", "messages": [SEEN if has_media else {"role": "user", "content": "ab"}], **members}
        told = (await gateway.http.post("/v1/chat/completions/render", json=chat)).raise_for_status().json()
        assert thinker.requests[-1].count_only
        ids = [*[MEDIUM] * (MEDIUM_TOKENS * has_media), 97, 98]
        assert told["token_ids"] == ids
        assert told["reasoning_ended"] is True
        assert {name: told[name] for name in own} == own
        assert told["sampling_params"].items() >= sampling.items()
        await gateway.http.post("/inference/v1/generate", json=told)
        of_ids = latest(thinker.requests)
        assert list(of_ids.prompt.token_ids.ids) == [*[MEDIUM] * has_media, 97, 98]
        assert [each.data for each in of_ids.prompt.media] == [png(8, 8)] * has_media
        await gateway.http.post("/v1/chat/completions", json=chat)
        of_chat = latest(thinker.requests)
        assert (of_ids.sampling, of_ids.priority) == (of_chat.sampling, of_chat.priority), members


async def test_features_are_the_media_and_their_places(gateway: Running) -> None:
    chat = {"messages": [SEEN, SEEN]}
    told = (await gateway.http.post("/v1/chat/completions/render", json=chat)).json()
    ids, media = told["token_ids"], told["features"]
    places = [{"offset": 0, "length": 3}, {"offset": 5, "length": 3}]
    assert (media["mm_placeholders"], len(media["mm_hashes"]["image"])) == ({"image": places}, 2)
    without = (await gateway.http.post("/v1/chat/completions/render", json=chat | {"mm_payload": "none"})).json()
    assert without["features"] == media | {"kwargs_data": None}
    # the same ids with the files beside them, in vLLM's form of a part
    parts = [{"type": "image_url", "url": PNG}] * 2
    asked = {"token_ids": [MEDIUM, 97, 98] * 2, "content_parts": parts, "return_token_ids": True}
    whole = await _generated(gateway, asked)
    assert (whole["prompt_token_ids"], whole["mm_placeholders"]) == (ids, {"image": places})
    streamed = events_of((await gateway.http.post("/inference/v1/generate", json=asked | {"stream": True})).text)
    assert [event.get("prompt_token_ids") for event in streamed] == [ids, *[None] * (len(streamed) - 1)]
    assert streamed[0]["mm_placeholders"] == {"image": places}
    bad = [
        (without, "features.kwargs_data"),
        (told | {"content_parts": parts}, "features"),
        (told | {"features": media | {"mm_hashes": {}}}, "features.mm_hashes"),
        (told | {"features": media | {"kwargs_data": {"image": ["AAAA"] * 2}}}, "features.kwargs_data.image[0]"),
        (told | {"token_ids": ids[:-3]}, "features.mm_placeholders"),
        (told | {"token_ids": [*ids, 97], "features": _at(media, 0, 4)}, "token_ids"),
        (told | {"features": _at(media, 0, 6)}, "features.mm_placeholders"),
    ]
    for body, param in bad:
        refused = await gateway.http.post("/inference/v1/generate", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


async def test_large_media_are_not_given_back(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MAX_FILE_BYTES", len(png(8, 8)))
    for messages, status in (([SEEN], 200), ([SEEN, SEEN], 400)):
        told = await gateway.http.post("/v1/chat/completions/render", json={"messages": messages})
        assert told.status_code == status
    assert told.json()["error"]["param"] == "mm_payload"
    without = {"messages": messages, "mm_payload": "none"}
    assert (await gateway.http.post("/v1/chat/completions/render", json=without)).status_code == 200


def _at(media: dict[str, Any], index: int, length: int) -> dict[str, Any]:
    """`media`, of which image `index` is longer."""
    places = [dict(place) for place in media["mm_placeholders"]["image"]]
    places[index]["length"] = length
    return media | {"mm_placeholders": {"image": places}}


async def test_a_prompt_that_ends_in_a_thought_stays_so(gateway: Running) -> None:
    gateway.scripts["thinker"].thought = ("hm",)
    chat = {"messages": [{"role": "user", "content": "ab"}]}
    told = (await gateway.http.post("/v1/chat/completions/render", json=chat)).json()
    assert told["reasoning_ended"] is False
    await gateway.http.post("/inference/v1/generate", json=told)
    assert gateway.scripts["thinker"].requests[-1].prompt.opens_thought


async def test_rendered_completions(gateway: Running) -> None:
    thinker, asked = gateway.scripts["thinker"], ASK | {"prompt": ["ab", "c"], "logprobs": 2, "seed": 5}
    told = (await gateway.http.post("/v1/completions/render", json=asked)).raise_for_status().json()
    assert [each["token_ids"] for each in told] == [[97, 98], [99]]
    for each in told:
        await _generated(gateway, each)
        sampling = thinker.requests[-1].sampling
        assert (sampling.max_tokens, sampling.top_logprobs, sampling.seed) == (16, 2, 5)


async def test_a_client_that_leaves_ends_the_work(gateway: Running) -> None:
    thinker = gateway.scripts["thinker"]
    for path, body in (("/v1/completions", ASK), ("/inference/v1/generate", IDS)):
        thinker.hold, thinker.after = True, 2
        thinker.holding.clear()
        thinker.release.clear()
        asking = asyncio.create_task(gateway.http.post(path, json=body))
        await thinker.holding.wait()
        asking.cancel()
        await gateway.until(lambda: thinker.running == 0)
    assert thinker.ended == ["cancelled", "cancelled"]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
LAMP = {"type": "function", "function": {"name": "lamp"}}
RENDER = "/v1/chat/completions/render"
BAD = [
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": ["a", ""]}, "prompt"),
    ("/v1/completions", {"prompt": ["a"] * 129}, "prompt"),
    ("/v1/completions", {"n": 9}, "n"),
    ("/v1/completions", {"prompt": ["a"] * 128, "n": 2, "seed": 2**63 - 129}, "seed"),
    ("/v1/completions", {"suffix": "x"}, "suffix"),
    ("/v1/completions", {"best_of": 2}, "best_of"),
    ("/v1/completions", {"echo": True, "logprobs": 1, "stream": True, "n": 2}, "echo"),
    ("/v1/completions", {"stream_options": {}}, "stream_options"),
    ("/v1/completions", {"logprobs": 21}, "logprobs"),
    ("/v1/completions", {"max_tokens": 0}, "max_tokens"),
    ("/v1/completions", {"model": "another"}, "model"),
    ("/v1/completions", {"promt": "x"}, "promt"),
    ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [-1]}, "token_ids[0]"),
    ("/inference/v1/generate", {"token_ids": ["a"]}, "token_ids[0]"),
    ("/inference/v1/generate", {"features": {}}, "features.mm_hashes"),
    ("/inference/v1/generate", {"features": {"mm_hashes": {}, "mm_placeholders": {}, "kwargs": {}}}, "features.kwargs"),
    (RENDER, {"use_beam_search": True}, "use_beam_search"),
    (RENDER, {"echo": True}, "echo"),
    (RENDER, {"modalities": ["text", "audio"]}, "modalities"),
    (RENDER, {"tools": [LAMP], "tool_choice": "required"}, "tool_choice"),
    (RENDER, {"tools": [LAMP], "response_format": {"type": "json_object"}}, "tools"),
    (RENDER, {"quartet": {"thinker": {"use_audio_in_video": True}}}, "quartet.thinker.use_audio_in_video"),
    (RENDER, {"mm_payload": "files"}, "mm_payload"),
    (RENDER, {"model": "another"}, "model"),
    (RENDER, {"media_io_kwargs": {"video": {"num_frames": 4}}}, "media_io_kwargs"),
    ("/v1/completions/render", {"echo": True}, "echo"),
    ("/v1/completions/render", {"use_beam_search": True}, "use_beam_search"),
    ("/v1/completions/render", {"prompt": ""}, "prompt"),
    ("/inference/v1/generate", {"cache_salt": "x"}, "cache_salt"),
    ("/inference/v1/generate", {"kv_transfer_params": {}}, "kv_transfer_params"),
    ("/inference/v1/generate", {"sampling_params": {"prompt_logprobs": 21}}, "sampling_params.prompt_logprobs"),
    (
        "/inference/v1/generate",
        {"sampling_params": {"prompt_logprobs": 1}, "stream": True},
        "sampling_params.prompt_logprobs",
    ),
    (
        "/inference/v1/generate",
        {"sampling_params": {"prompt_logprob_token_ids": [[1]]}, "stream": True},
        "sampling_params.prompt_logprob_token_ids",
    ),
    (
        "/inference/v1/generate",
        {"sampling_params": {"prompt_logprob_token_ids": [[1] * 21]}},
        "sampling_params.prompt_logprob_token_ids[0]",
    ),
    (
        "/inference/v1/generate",
        {"sampling_params": {"prompt_logprob_start": 1}},
        "sampling_params.prompt_logprob_start",
    ),
    ("/inference/v1/generate", {"sampling_params": {"temperature": 3}}, "sampling_params.temperature"),
    ("/inference/v1/generate", {"content_parts": [IMAGE]}, "content_parts[0]"),
    ("/inference/v1/generate", {"content_parts": [{"type": "text"}]}, "content_parts[0].type"),
    ("/inference/v1/abort_requests", {"request_ids": []}, "request_ids"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x" * (4 * 1024 * 1024)}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": [IMAGE]}], "return_token_strs": True}, "return_token_strs"),
    ("/detokenize", {"tokens": [1_114_112]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": ASK,
    "/v1/completions/render": ASK,
    RENDER: {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]},
    "/inference/v1/generate": IDS,
    "/inference/v1/abort_requests": {"request_ids": ["x"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}


@pytest.mark.parametrize(("path", "members", "param"), BAD)
async def test_bad_input_is_named(gateway: Running, path: str, members: dict[str, Any], param: str) -> None:
    body = members if path == "/tokenize" else GOOD[path] | members
    response = await gateway.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (404 if param == "model" else 400, param)
    assert error["message"].startswith(param)
    assert (await gateway.http.post(path, json=GOOD[path])).status_code == 200


async def test_refusals_of_the_thinker_name_the_prompt(gateway: Running) -> None:
    thinker = gateway.scripts["thinker"]
    for path, field in (("/v1/completions", "prompt"), ("/inference/v1/generate", "token_ids")):
        thinker.error = ContextTooLong("prompt", "the prompt has 9 tokens; the limit is 8")
        refused = await gateway.http.post(path, json=GOOD[path] | {"stream": True})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, field, "context_length_exceeded")
        assert error["message"].startswith(f"{field}: the prompt has 9")
        thinker.error = QueueFull("full", 1.0)
        assert (await gateway.http.post(path, json=GOOD[path])).status_code == 429
        thinker.error = None


async def test_routers_read_vllms_gauges(gateway: Running) -> None:
    thinker = gateway.scripts["thinker"]
    thinker.hold, thinker.queued = True, 3
    asking = [asyncio.create_task(gateway.http.post("/v1/completions", json=ASK)) for _ in range(2)]
    (replica,) = gateway.app.state.gateway.pipeline.output("text").replicas.values()
    await gateway.until(lambda: (replica.running, replica.queued) == (2, 3))
    text = (await gateway.http.get("/metrics")).text
    families = {family.name for family in text_string_to_metric_families(text)}
    # an engine of vLLM that another test has had in this process leaves its metrics in the registry
    engines = {family.name for family in text_string_to_metric_families(generate_latest(REGISTRY).decode())}
    assert {name for name in families - engines if name.startswith("vllm:")} <= METRICS <= families
    told = text.splitlines()
    assert 'vllm:num_requests_running{model_name="scripted"} 2.0' in told
    assert 'vllm:num_requests_waiting{model_name="scripted"} 3.0' in told
    assert 'vllm:kv_cache_usage_perc{model_name="scripted"} 0.5' in told
    assert 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0' in told
    thinker.go_on()
    await asyncio.gather(*asking)
