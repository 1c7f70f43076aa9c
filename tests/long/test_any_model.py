"""Models that no family's row is about, served by `quartet up` as docs/any-model.md says: equal to transformers."""

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from PIL import Image

from cli.ports import free_ports
from tests.support.samples.media import png
from tests.support.systems.hub import serving
from tests.support.systems.stack import running
from tests.support.systems.terminal import Terminal, lines
from tests.support.weights import text_models
from tests.support.weights.text_models import PICTURED, text_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.long]
PAGE = "docs/any-model.md"
QUESTION = "Which day comes after Monday?"
SCHEMA = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
TOKENS = 16
_OF_DIFFUSERS = ("diffusion", "image", "video", "Cosmos3")  # tests/long/test_any_pipeline_page.py types them
TYPED = [line for line in lines(PAGE) if not any(word in line for word in _OF_DIFFUSERS)]


class Reference:
    """transformers' greedy answers, past any end."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = text_models.load(checkpoint)
        self.tokenizer: Any = text_models.transformers.AutoTokenizer.from_pretrained(checkpoint)

    @torch.inference_mode()
    def answer(self, prompt: str, special: bool) -> list[int]:
        inputs = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=special)
        ids = self.model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
        return ids[0, inputs["input_ids"].shape[1] :].tolist()

    def chat(self, question: str, **variables: Any) -> list[int]:
        turns = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False, **variables)
        return self.answer(text, False)


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return text_checkpoint("qwen3")


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def terminal(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Terminal, str, str]:
    """And the URLs of what it starts."""
    port, other = free_ports(2)
    url, of_other = (f"http://127.0.0.1:{each}" for each in (port, other))
    ours = {
        "quartet up --model meta-llama/Llama-3.1-8B-Instruct": f"quartet up --model {checkpoint} --port {port}",
        "quartet up --model DIR": f"quartet up --model {checkpoint} --port {other}",
        "quartet chat": f"quartet chat --url {url}",
    }
    said = {line: f".venv/bin/{typed}" for line, typed in ours.items()}
    return Terminal(tmp_path_factory.mktemp("terminal"), said, {}), url, of_other


@pytest.fixture(scope="module")
def served(terminal: tuple[Terminal, str, str]) -> Iterator[openai.OpenAI]:
    (line, *_), (typist, url, _) = TYPED, terminal
    with typist.served(line, "ready after"):
        yield client_of(url)


def ask(client: openai.OpenAI, question: str = QUESTION, **options: Any) -> Any:
    extra = {"return_token_ids": True, "ignore_eos": True} | options.pop("extra_body", {})
    turns = [{"role": "user", "content": question}]
    asked: dict[str, Any] = {"messages": turns, "temperature": 0, "max_tokens": TOKENS} | options
    return client.chat.completions.create(model=client.models.list().data[0].id, extra_body=extra, **asked)


def test_chats_and_completions_are_those_of_transformers(
    served: openai.OpenAI, terminal: tuple[Terminal, str, str], reference: Reference
) -> None:
    _, chat, *_ = TYPED
    assert terminal[0].type(chat).strip()
    choice = ask(served).choices[0]
    assert choice.token_ids == reference.chat(QUESTION)
    assert choice.message.content
    done = served.completions.create(
        model=served.models.list().data[0].id,
        prompt=QUESTION,
        max_tokens=TOKENS,
        temperature=0,
        logprobs=1,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    ).choices[0]
    assert done.token_ids == reference.answer(QUESTION, True)  # pyright: ignore[reportAttributeAccessIssue]
    assert done.logprobs is not None
    assert "".join(done.logprobs.tokens or ()) == done.text


def test_it_has_no_talker_and_sees_nothing(served: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="this model has no speech"):
        ask(served, modalities=["text", "audio"], audio={"voice": "ada", "format": "wav"})
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(openai.BadRequestError, match="image"):
        ask(served, messages=[{"role": "user", "content": [picture]}])


def test_tools_are_called_as_the_template_writes_calls(served: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "look"}}
    (call,) = (
        ask(served, tools=[TOOL], tool_choice=choice, max_tokens=200, extra_body={"ignore_eos": False})
        .choices[0]
        .message.tool_calls
    )
    assert (call.function.name, set(json.loads(call.function.arguments))) == ("look", {"b"})
    assert ask(served, tools=[TOOL]).choices[0].message.content


def test_a_thought_is_left_out_by_the_template(served: openai.OpenAI, reference: Reference) -> None:
    kwargs = {"enable_thinking": False}
    choice = ask(served, extra_body={"chat_template_kwargs": kwargs}).choices[0]
    assert choice.token_ids == reference.chat(QUESTION, **kwargs)


@pytest.mark.weekly  # it starts a system for one answer
def test_parsers_can_be_named(terminal: tuple[Terminal, str, str]) -> None:
    _, _, line, *_ = TYPED
    with terminal[0].served(line, "ready after"):
        assert ask(client_of(terminal[2]), tools=[TOOL]).choices[0].token_ids


@pytest.mark.weekly  # it starts a system for one answer
def test_a_base_model_completes(tmp_path: Path) -> None:
    base = text_checkpoint("llama", template=False)
    reference = Reference(base)
    with running(base, tmp_path / "run") as stack:
        client = client_of(stack.url)
        done = client.completions.create(
            model=stack.model,
            prompt="The old king",
            max_tokens=TOKENS,
            temperature=0,
            logprobs=1,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        ).choices[0]
        assert done.token_ids == reference.answer("The old king", True)  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(openai.BadRequestError, match=r"no chat template.*/v1/completions"):
            ask(client)


@pytest.mark.weekly  # it starts a system for one answer
@pytest.mark.parametrize(
    "name", ["mistral", "gemma3", "phi3", "glm4_moe", "granite_hybrid", "qwen3_vl", "gemma3_images"]
)
def test_other_architectures_answer_over_http_as_transformers(name: str, tmp_path: Path) -> None:
    """Qwen3 and Llama above, Whisper in test_transcriber.py."""
    checkpoint, has_picture = text_checkpoint(name), name in PICTURED
    libraries: Any = text_models.transformers
    processor = libraries.AutoProcessor.from_pretrained(checkpoint)
    file = png(96, 64)
    content: Any = [{"type": "image"}, {"type": "text", "text": QUESTION}] if has_picture else QUESTION
    turns = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    pictures = {"images": [Image.open(io.BytesIO(file)).convert("RGB")]} if has_picture else {}
    inputs = processor(text=text, return_tensors="pt", add_special_tokens=False, **pictures)
    with torch.inference_mode():
        model = text_models.load(checkpoint)
        ids = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)[0]
    url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
    sent = [{"type": "image_url", "image_url": {"url": url}}] if has_picture else []
    asked = [{"role": "user", "content": [*sent, {"type": "text", "text": QUESTION}]}]
    memory = ("--thinker-arg=--dtype=float32", "--thinker-arg=--kv-cache-bytes=67108864")
    with running(checkpoint, tmp_path / "run", *memory) as stack:
        answer = ask(client_of(stack.url), messages=asked)
        assert answer.choices[0].token_ids == ids[inputs["input_ids"].shape[1] :].tolist()
        assert answer.usage.prompt_tokens == inputs["input_ids"].shape[1]


def test_one_of_the_hub_that_cannot_be_a_thinker_is_refused_by_its_config(tmp_path: Path) -> None:
    (folder := tmp_path / "asr").mkdir()
    config = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(bytes(8))
    with serving("some/asr", folder) as hub:
        command = [sys.executable, "-m", "cli.main", "up", "--model", hub.model, "--pipeline", "text"]
        environment = {**os.environ, **hub.environment(tmp_path)}
        refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    sentence = "some/asr: config.json's architecture is WhisperForConditionalGeneration, which writes down speech"
    assert (refused.returncode, sentence in " ".join(refused.stderr.split())) == (2, True)
    assert {path for _, path in hub.log if not path.startswith("/")} == {"config.json"}
