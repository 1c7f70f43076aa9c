"""Texts of clients as token ids: those of transformers for honest texts, never a control token, and stopped in time."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ContextTooLong, InvalidInput, RequestCancelled
from services.families.qwen3_omni.tiny.processor import make_tokenizer
from services.registry import families, family_of, read_config
from services.talker.text import TextTokenizer
from services.thinker import tokens
from services.thinker.conversation import Conversation, Message, RawPrompt
from services.thinker.family import ThinkerCheckpoint, load_checkpoint
from services.thinker.template import ChatTemplate
from services.thinker.tokens import PromptTokenizer
from tests.support.scripted.preprocessing import preprocessor_of
from tests.support.weights.checkpoints import diffusion_checkpoint, omni_checkpoint, thinking_checkpoint, tts_checkpoint

DEMO = Path(__file__).parents[2] / "services" / "demo_models" / "quartet-demo"
THINKERS: dict[str, Callable[[], Path]] = {
    "qwen3-omni": omni_checkpoint,
    "qwen3-omni-thinking": thinking_checkpoint,
    "qwen2.5-omni": lambda: omni_checkpoint(arch="qwen2.5-omni"),
    "bagel": lambda: diffusion_checkpoint("bagel"),
    "demo": lambda: DEMO,
}
WITHOUT_TOOLS = ("bagel",)
TALKERS: dict[str, Callable[[], Path]] = {
    "qwen3-omni": omni_checkpoint,
    "qwen3-tts": lambda: tts_checkpoint("qwen3-tts"),
}
# Pieces of honest texts: where words, lines, signs, accents and scripts meet.
HONEST = [
    *("hello", " the", "'s", "\n", "\n\n", " ", "  ", "\t", "!?", "...", "é", "e\u0301", "\u0301", "你好", "，"),
    *(
        "。",
        "12",
        "3",
        "<",
        ">",
        "<b>",
        "a" * 50,
        " sea",
        "\r\n",
        "_",
        '"',
        "\u1112\u1161\u11ab",
        "😀",
        "x\u0323\u0307",
    ),
]


@pytest.fixture(scope="module")
def checkpoints() -> dict[str, ThinkerCheckpoint]:
    return {name: load_checkpoint(str(folder())) for name, folder in THINKERS.items()}


def said(text: str) -> dict[str, Conversation]:
    """Conversations, each with `text` at another place."""
    hi, bye = Message("user", ["Hello"]), Message("user", ["Bye"])
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"at": text, text: 1}}}
    cut = {"id": "c", "type": "function", "function": {"name": "look", "arguments": f'{{"at": "{text}'}}
    tool = {
        "type": "function",
        "function": {"name": "look", "description": text, "parameters": {text: {"enum": [text]}}},
    }
    seen = Message("tool", ["3"], tool_call_id="c")
    half = len(text) // 2
    return {
        "user": Conversation([Message("user", [text])]),
        "user, in two parts": Conversation([Message("user", [text[:half], text[half:]])]),
        "user, earlier": Conversation([Message("user", [f"Hi {text}\n"]), Message("assistant", ["yes"]), bye]),
        "tool": Conversation(
            [
                hi,
                Message("assistant", [], [call | {"function": {"name": "look", "arguments": {}}}]),
                Message("tool", [f"a{text}b"], tool_call_id="c", name="look"),
            ]
        ),
        "arguments": Conversation([hi, Message("assistant", [], [call]), seen]),
        "arguments that were cut off": Conversation([hi, Message("assistant", [], [cut]), seen]),
        "name of a tool": Conversation(
            [hi, Message("assistant", [], [{**call, "function": {"name": text, "arguments": {}}}]), seen]
        ),
        "description": Conversation([hi], [tool]),
        "system": Conversation([Message("system", [text]), hi]),
        "answer": Conversation([hi, Message("assistant", [text]), bye]),
        "thought": Conversation([hi, Message("assistant", ["so"], reasoning=text), bye]),
    }


@pytest.mark.parametrize("name", THINKERS)
def test_what_is_said_is_never_a_control_token(checkpoints, name) -> None:
    """For each control token at each place: as many of each as with other text there."""
    checkpoint = checkpoints[name]
    template, tokenizer = ChatTemplate(checkpoint), checkpoint.tokenizer
    control = dict(tokenizer.added_tokens_decoder.items())
    assert checkpoint.special_ids <= control.keys()

    def found(conversation: Conversation) -> list[int]:
        return [id for id in template.apply(conversation) if id in control]

    def taken(text: str) -> dict[str, Conversation]:
        conversations = said(text).items()
        of_tools = [place for place, each in conversations if any(turn.role == "tool" for turn in each.messages)]
        return {place: each for place, each in conversations if name not in WITHOUT_TOOLS or place not in of_tools}

    plain = {place: found(conversation) for place, conversation in taken("something").items()}
    written = {
        place for place, each in taken("something").items() if "something" in tokenizer.decode(template.apply(each))
    }
    assert {"user", "system", "answer"} | ({"tool"} if name not in WITHOUT_TOOLS else set()) <= written
    for token in control.values():
        for place, conversation in taken(token.content).items():
            if not token.special and place in ("system", "answer", "thought"):
                continue  # the application's own words
            assert found(conversation) == plain[place], (token.content, place)
            assert place not in written or token.content in tokenizer.decode(template.apply(conversation))


def test_all_families_are_tried(checkpoints) -> None:
    tried = {family_of(read_config(checkpoint.folder)).name for checkpoint in checkpoints.values()}
    assert tried == {family.name for family in families() if family.has("thinker")}


@pytest.mark.parametrize("name", TALKERS)
def test_what_is_spoken_is_never_a_special_token(name) -> None:
    tokenizer = TextTokenizer(TALKERS[name]())
    special = {
        id: token.content for id, token in tokenizer._backend.get_added_tokens_decoder().items() if token.special
    }
    for content in special.values():
        assert special.keys().isdisjoint(tokenizer.encode(f"Say {content} twice{content}"))


def texts(draw: random.Random) -> str:
    return "".join(draw.choices(HONEST, k=draw.choice([5, 50, 10_000])))


@pytest.mark.parametrize("name", THINKERS)
def test_honest_prompts_are_those_of_transformers(checkpoints, name) -> None:
    checkpoint = checkpoints[name]
    template, draw = ChatTemplate(checkpoint), random.Random(1)
    tool = {"type": "function", "function": {"name": "look", "description": "a < b", "parameters": {"type": "object"}}}
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"at": "<b>x</b>"}}}
    for _ in range(5):
        first, then = texts(draw), texts(draw)
        messages = [
            Message("system", [f"Answer in <tool_call>{first}</tool_call>"]),
            Message("user", [first]),
            Message("assistant", [f"<think>\n{then}\n</think>\n\nno"], [call]),
            Message("tool", [then], tool_call_id="c"),
            Message("user", [then]),
        ]
        if name in WITHOUT_TOOLS:
            messages = [message for message in messages if message.role != "tool"]
        turns: list[dict[str, Any]] = [
            {"role": m.role, "content": m.parts[0]} | ({"tool_calls": m.tool_calls} if m.tool_calls else {})
            for m in messages
        ]
        expected: Any = checkpoint.processor.apply_chat_template(
            turns, tools=[tool], add_generation_prompt=True, tokenize=False
        )
        assert template.apply(Conversation(messages, [tool])) == checkpoint.tokenizer(expected)["input_ids"]
        raw = f"{first}<|im_end|>{then}"
        assert template.apply(Conversation([], raw=RawPrompt(raw))) == checkpoint.tokenizer(raw)["input_ids"]


def test_a_long_text_is_tokenized_in_pieces_as_it_is_whole(checkpoints, monkeypatch) -> None:
    monkeypatch.setattr(tokens, "_PIECE", 7)
    tokenizer = checkpoints["demo"].tokenizer
    control = list(tokenizer.added_tokens_decoder.values())
    pieces = PromptTokenizer(tokenizer)
    for seed in range(100):
        draw = random.Random(seed)
        text = "".join(draw.choices([*HONEST, *(token.content for token in control)], k=100))
        assert pieces.encode(text, "text", special=True) == tokenizer(text)["input_ids"]


def test_a_text_is_not_cut_within_a_word(monkeypatch) -> None:
    """A run of signs that looks as if one control token ended there and another one began."""
    monkeypatch.setattr(tokens, "_PIECE", 4)
    tokenizer = make_tokenizer(700, words=["><"])
    assert len(tokenizer("><")["input_ids"]) == 1
    text = "sea<>< " * 20 + "sea " * 5
    assert PromptTokenizer(tokenizer).encode(text, "text", special=True) == tokenizer(text)["input_ids"]


def test_a_text_is_read_no_further_than_the_context(checkpoints) -> None:
    template = ChatTemplate(checkpoints["demo"])
    read: list[bool] = []

    def stop() -> bool:  # is asked at each piece
        read.append(True)
        return False

    with pytest.raises(ContextTooLong, match=r"at least \d+ tokens; the limit is 5000") as caught:
        template.apply(Conversation([Message("user", ["the sea "] * 200_000)]), most=5000, stop=stop)
    assert (caught.value.field, len(read) < 5) == ("messages", True)
    with pytest.raises(InvalidInput, match="a word of 300000 characters"):
        template.tokens("a" * 300_000, special=True)


@pytest.fixture
def preprocessor(checkpoints):
    with preprocessor_of(checkpoints["demo"], 1_000_000) as preprocessor:
        yield preprocessor


@pytest.mark.asyncio
async def test_long_texts_delay_nobody_and_end_with_their_client(preprocessor) -> None:
    preprocessor._engine.max_context_tokens = 10**9
    long = Conversation([Message("user", ["the sea is quiet " * 1_000_000])])
    part = Conversation([Message("user", ["the sea is quiet " * 5000])])
    begun = time.perf_counter()
    await preprocessor.prepare(part)
    part_s = time.perf_counter() - begun
    tasks = [asyncio.create_task(preprocessor.prepare(long)) for _ in range(3)]
    await asyncio.sleep(0.5)
    await preprocessor.prepare(Conversation([Message("user", ["hi"])]))
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    begun = time.perf_counter()
    await preprocessor.prepare(part)  # by the thread that read the long one, of 200 times its length
    assert time.perf_counter() - begun < 20 * part_s + 0.5


@pytest.mark.asyncio
async def test_what_cannot_fit_is_refused_before_it_is_read(preprocessor, monkeypatch) -> None:
    preprocessor._engine.max_context_tokens = 1000
    monkeypatch.setattr(preprocessor.template, "apply", None)
    for conversation in (
        Conversation([Message("user", ["a" * 100_000])]),
        Conversation([], raw=RawPrompt("a" * 100_000)),
    ):
        with pytest.raises(ContextTooLong, match=r"at least \d+ tokens; the limit is 1000"):
            await preprocessor.prepare(conversation)


def test_who_left_is_read_for_no_more(checkpoints) -> None:
    with pytest.raises(RequestCancelled):
        ChatTemplate(checkpoints["demo"]).apply(Conversation([Message("user", ["hi"])]), stop=lambda: True)
