"""A thinker of quantized weights through HTTP: it writes vLLM's own answer, and its speech is in full precision."""

import base64
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import soundfile

from cli.sizes import read_sizes
from quartet.v1 import server_info_pb2_grpc
from quartet.v1.server_info_pb2 import GetServerInfoRequest
from services.thinker.execution import has_amx
from tests.support.references.plain_vllm import answers
from tests.support.systems.stack import Stack, running
from tests.support.weights.quantized import awq_checkpoint, fp8_checkpoint, gptq_checkpoint, int8_checkpoint

pytestmark = [pytest.mark.weekly, pytest.mark.e2e, pytest.mark.timeout(600)]

MAX_TOKENS, MAX_FRAMES = 12, 8
QUESTIONS = ("Tell me about the sea.", "Which way is north?", "你好，请介绍一下大海和天空。")


@dataclass(frozen=True)
class Case:
    """A way to quantize, the precision that all else of the thinker has, and how near log-probabilities are to it."""

    made: Callable[[Path], Path]
    dtype: str
    near: float


# vLLM's int8 kernels for a CPU with AMX take no float32.
INT8 = Case(int8_checkpoint, "bfloat16", 1e-2) if has_amx() else Case(int8_checkpoint, "float32", 1e-4)
# vLLM has kernels for these on GPUs only.
ON_GPU = {"fp8": fp8_checkpoint, "awq": awq_checkpoint, "gptq": gptq_checkpoint}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(INT8, id="int8"),
        *(pytest.param(Case(made, "float16", 1e-2), id=name, marks=pytest.mark.gpu) for name, made in ON_GPU.items()),
    ],
)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(case: Case, tiny_checkpoint: Path) -> Path:
    return case.made(tiny_checkpoint)


@pytest.fixture(scope="module")
def stack(case: Case, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = f"--thinker-arg=--dtype={case.dtype}", "--thinker-arg=--compile=off"
    with running(checkpoint, tmp_path_factory.mktemp("run"), *settings) as started:
        yield started


def test_it_writes_what_vllm_writes_without_quartet(case: Case, stack: Stack, checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=True) for each in asked]
    expected = answers(checkpoint, [list(prompt["input_ids"]) for prompt in prompts], MAX_TOKENS, case.dtype)
    for messages, answer in zip(asked, expected, strict=True):
        body = {
            "model": stack.model,
            "messages": messages,
            "modalities": ["text", "audio"],
            "audio": {"format": "wav"},
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "logprobs": True,
            "quartet": {"talker": {"temperature": 0, "max_frames": MAX_FRAMES}},
        }
        response = stack.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        assert choice["message"]["content"] == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert logprobs == pytest.approx(answer.logprobs, abs=case.near)
        samples, rate_hz = soundfile.read(io.BytesIO(base64.b64decode(choice["message"]["audio"]["data"])))
        assert len(samples) > 0
        assert rate_hz == 24_000


def test_every_stage_computes_in_the_precision_of_its_own_weights(case: Case, stack: Stack) -> None:
    for stage, address in stack.addresses.items():
        with grpc.insecure_channel(address) as channel:
            info = server_info_pb2_grpc.ServerInfoServiceStub(channel).GetServerInfo(GetServerInfoRequest())
        assert (info.stage, info.dtype) == (stage, case.dtype if stage == "thinker" else "float32")


def test_the_budget_counts_quantized_weights(tiny_checkpoint: Path) -> None:
    """Every weight of the attention has one byte instead of four, and every output a scale."""
    full, quantized = read_sizes(str(tiny_checkpoint)), read_sizes(str(int8_checkpoint(tiny_checkpoint)))
    layers, hidden, heads, kv_heads, head = 6, 64, 4, 2, 32
    outputs = (heads + 2 * kv_heads) * head + hidden
    elements = hidden * (heads + 2 * kv_heads) * head + heads * head * hidden
    assert full.weights["thinker"] - quantized.weights["thinker"] == layers * (3 * elements - 4 * outputs)
    assert full.weights["talker"] == quantized.weights["talker"]
    assert (full.kv_per_token, full.states_per_token) == (quantized.kv_per_token, quantized.states_per_token)
