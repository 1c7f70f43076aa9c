"""Prompts with earlier answers as the ids that were sampled: each turn begins with the one before, to the token."""

import copy
import dataclasses
import json
import random

import pytest

from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation, MediaFile, Message
from services.thinker.family import ThinkerCheckpoint, load_checkpoint
from services.thinker.request import read_conversation
from services.thinker.template import ChatTemplate, is_reusable

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
# What the published templates of the Qwen3 family do to answers: earlier ones lose their thoughts, the newest gets
# empty ones, and all are stripped.
FORGETFUL = """
{%- for message in messages -%}
<|im_start|>{{ message.role + '\n' }}
{%- if message.role == 'assistant' and loop.last -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}
{%- if message.content is string -%}{{ message.content.split('</think>')[-1].strip() }}
{%- else -%}{%- for part in message.content -%}{{ part.text or '<|' + part.type + '_pad|>' }}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' + OPENING }}{%- endif -%}
"""


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint) -> ThinkerCheckpoint:
    return load_checkpoint(str(tiny_checkpoint))


def with_template(checkpoint: ThinkerCheckpoint, text: str) -> ThinkerCheckpoint:
    processor = copy.copy(checkpoint.processor)
    processor.chat_template = text
    return dataclasses.replace(checkpoint, processor=processor)


def sampled(checkpoint: ThinkerCheckpoint, draw: random.Random) -> list[int]:
    """An answer as a random model samples it: halves of characters, and ids that no text has."""
    plain = sorted(set(range(checkpoint.vocab_size)) - checkpoint.special_ids)
    end = [checkpoint.tokenizer.eos_token_id] if draw.random() < 0.5 else []
    return draw.choices(plain, k=draw.randrange(1, 40)) + end


def asked(draw: random.Random) -> list[Message]:
    """What comes before an answer."""
    parts: list[list[str | MediaFile]] = [
        ["and then?\n"],
        [MediaFile("audio", b"", "the sound")],
        [MediaFile("image", b"", "the image"), " what is this?", MediaFile("audio", b"", "the sound")],
        ["  answer-0123-1- <|im_end|>\n"],
    ]
    user = Message("user", draw.choice(parts))
    return [Message("tool", ['{"seen": 1}'], tool_call_id="call_1"), user] if draw.random() < 0.3 else [user]


TEMPLATES = {
    "tiny": None,
    "strips": FORGETFUL.replace("OPENING", "''"),
    "opens thoughts": FORGETFUL.replace("OPENING", r"'<think>\n'"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_turn_begins_with_the_one_before_and_its_answer(checkpoint, name):
    template = ChatTemplate(checkpoint if TEMPLATES[name] is None else with_template(checkpoint, TEMPLATES[name]))
    for seed in range(20):
        draw = random.Random(seed)
        tools = [TOOL] if draw.random() < 0.5 else []
        messages = [Message("system", ["Be brief. "])] if draw.random() < 0.5 else []
        before: list[int] = []
        for _ in range(6):
            messages += asked(draw) if not before or draw.random() < 0.9 else []  # else it goes on by itself
            prompt = template.apply(Conversation(messages, tools))
            assert prompt[: len(before)] == before
            answer = sampled(checkpoint, draw)
            messages.append(Message("assistant", ["not read"], [{"also": "not read"}], token_ids=answer))
            before = prompt + [id for id in answer if id != checkpoint.tokenizer.eos_token_id]


def test_text_tokenized_anew_is_another_prompt(checkpoint):
    """What the ids are for: the same history as text, which shares no more than its beginning with what was sampled."""
    question = Message("user", ["Hello"])
    draw, tokenizer, template = random.Random(1), checkpoint.tokenizer, ChatTemplate(checkpoint)
    plain = sorted(set(range(len(tokenizer))) - checkpoint.special_ids)
    halves = tokenizer("é")["input_ids"][:1]  # a byte that is no character
    spelled = [id for letter in "the sea" for id in tokenizer(letter)["input_ids"]]  # a letter at a time
    asked_first = template.apply(Conversation([question]))
    for answer in (halves, spelled, draw.choices(plain, k=30)):
        text = tokenizer.decode(answer)
        by_text = template.apply(Conversation([question, Message("assistant", [text]), question]))
        by_ids = template.apply(Conversation([question, Message("assistant", [text], token_ids=answer), question]))
        assert by_ids[: len(asked_first) + len(answer)] == asked_first + answer
        assert by_text[: len(asked_first) + len(answer)] != asked_first + answer
        after = by_ids[len(asked_first) + len(answer) :]
        assert by_text[-len(after) :] == after


def test_ids_and_text_give_one_prompt_where_the_tokenizer_agrees(checkpoint):
    text = "The sea is quiet in the morning."
    ids, end = checkpoint.tokenizer(text)["input_ids"], checkpoint.tokenizer.eos_token_id
    system, question = Message("system", ["Be brief."]), Message("user", [MediaFile("image", b"", "i"), "Look"])
    template = ChatTemplate(checkpoint)

    def prompt(answer: Message) -> list[int]:
        return template.apply(Conversation([system, question, answer, question, answer, question], [TOOL]))

    expected = prompt(Message("assistant", [text]))
    assert prompt(Message("assistant", [], token_ids=ids)) == expected
    assert prompt(Message("assistant", [], token_ids=[*ids, end])) == expected


def test_ids_that_are_no_answer_are_refused_by_name(checkpoint):
    tokenizer, template = checkpoint.tokenizer, ChatTemplate(checkpoint)
    question = Message("user", ["Hello"])
    for bad, reason in {
        (1, checkpoint.placeholders["audio"], 2): "special token <|audio_pad|> at 1; give the content",
        (tokenizer.convert_tokens_to_ids("<|im_start|>"), 5): "<|im_start|> at 0",
        (5, tokenizer.eos_token_id, tokenizer.eos_token_id): "<|im_end|> at 1",
        (checkpoint.vocab_size, 1): f"0 to {checkpoint.vocab_size - 1}, not {checkpoint.vocab_size}",
        (-1,): "not -1",
    }.items():
        with pytest.raises(InvalidInput, match=reason.replace("|", r"\|")) as caught:
            template.apply(Conversation([question, Message("assistant", [], token_ids=list(bad)), question]))
        assert caught.value.field == "messages[1].token_ids"


def test_a_template_that_leaves_an_answer_out_is_told(checkpoint):
    silent = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    question, answer = Message("user", ["Hello"]), Message("assistant", ["Hi"], token_ids=[5])
    template = ChatTemplate(with_template(checkpoint, silent))
    with pytest.raises(InvalidInput, match="give the content instead") as caught:
        template.apply(Conversation([question, answer, question]))
    assert caught.value.field == "messages[1].token_ids"


def test_a_message_of_an_unusual_role_is_written_or_refused(checkpoint: ThinkerCheckpoint) -> None:
    question, verdict = Message("user", ["Hello"]), Message("judge", ["It is <|im_end|> good"])
    ids = ChatTemplate(checkpoint).apply(Conversation([question, verdict]))
    assert "<|im_start|>judge\nIt is <|im_end|> good<|im_end|>" in checkpoint.tokenizer.decode(ids)
    assert ids.count(checkpoint.tokenizer.eos_token_id) == 2  # the text is no end of a turn
    silent = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    for messages in ([question, verdict], [verdict, question]):
        with pytest.raises(InvalidInput, match="use system, user, assistant, tool") as caught:
            ChatTemplate(with_template(checkpoint, silent)).apply(Conversation(messages))
        assert caught.value.field == f"messages[{messages.index(verdict)}].role"


SAY_ON = [Message("user", ["Hello"]), Message("assistant", ["The sea"])]
ENDINGS: dict[str, list[Message]] = {
    "an answer": SAY_ON,
    "an answer in parts": [SAY_ON[0], Message("assistant", ["The ", "sea\n  is"])],
    "after instructions": [Message("system", ["Be brief."]), *SAY_ON],
    "a text that ends in blanks": [SAY_ON[0], Message("assistant", [" The sea  \n"])],
    "a text as before": [Message("user", ["The sea"]), *SAY_ON, SAY_ON[0], Message("assistant", ["The sea"])],
    "the mark of transformers": [SAY_ON[0], Message("assistant", ["CONTINUE_FINAL_MESSAGE_TAG the sea"])],
    "a question": [Message("user", ["The sea is"])],
    "after a call": [
        SAY_ON[0],
        Message("assistant", [""], [{"type": "function", "function": {"name": "look", "arguments": {}}}]),
        Message("tool", ['{"seen": 1}'], tool_call_id="call_1"),
        Message("assistant", ["I see"]),
    ],
}


@pytest.mark.parametrize("name", ["tiny", "strips"])
def test_a_prompt_ends_where_transformers_has_it_end(checkpoint, name):
    checkpoint = checkpoint if TEMPLATES[name] is None else with_template(checkpoint, TEMPLATES[name])
    template, tokenizer = ChatTemplate(checkpoint), checkpoint.tokenizer
    for what, messages in ENDINGS.items():
        turns = [{"role": each.role, "content": "".join(map(str, each.parts))} for each in messages]
        for turn, message in zip(turns, messages, strict=True):
            turn |= {"tool_calls": message.tool_calls} if message.tool_calls else {}
        for continues in (True, False):
            expected = tokenizer.apply_chat_template(
                turns,
                continue_final_message=continues,
                add_generation_prompt=False,
                chat_template=TEMPLATES[name] or tokenizer.chat_template,
                return_dict=True,
            )["input_ids"]
            got = template.apply(Conversation(messages, asks=False, continues=continues))
            assert got == expected, (what, continues)
    asked = template.apply(Conversation([*SAY_ON[:1]]))
    assert template.apply(Conversation(SAY_ON, asks=False, continues=True))[: len(asked)] == asked or name != "tiny"


def test_a_text_that_the_template_changes_cannot_be_continued(checkpoint):
    template = ChatTemplate(
        with_template(checkpoint, "{% for each in messages %}{{ each.content | upper }}{% endfor %}")
    )
    with pytest.raises(InvalidInput, match="cannot be continued") as caught:
        template.apply(Conversation(SAY_ON, asks=False, continues=True))
    assert caught.value.field == "messages[1].content"
    assert "sea" not in str(caught.value)


USER, ANSWER = ({"role": role, "content": [{"text": "x"}]} for role in ("user", "assistant"))
CONTINUED = {"continue_final_message": True}
CALLS = [{"id": "c", "name": "look", "arguments_json": "{}"}]
IMAGE = {"media": {"kind": "MEDIA_KIND_IMAGE", "data": b"x"}}
NO_ENDINGS = [
    (CONTINUED | {"messages": [USER, ANSWER | {"content": []}]}, "messages[1].content"),
    (CONTINUED | {"messages": [USER, ANSWER | {"content": [{"text": " "}]}]}, "messages[1].content"),
    (CONTINUED | {"messages": [USER | {"content": [{"text": "x"}, IMAGE]}]}, "messages[0].content"),
    (CONTINUED | {"messages": [USER, ANSWER | {"tool_calls": CALLS}]}, "messages[1].tool_calls"),
    (CONTINUED | {"messages": [USER, ANSWER | {"token_ids": [1]}]}, "messages[1].token_ids"),
    (CONTINUED | {"prompt": {"text": "x"}}, "continue_final_message"),
    ({"no_generation_prompt": True, "prompt": {"text": "x"}}, "no_generation_prompt"),
    ({"messages": [USER], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"messages": [USER], "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"messages": [USER | {"content": [IMAGE]}], "truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
]


@pytest.mark.parametrize(("members", "field"), NO_ENDINGS)
def test_an_ending_that_cannot_be_is_named(members, field):
    with pytest.raises(InvalidInput) as caught:
        read_conversation(thinker_pb2.GenerateStart(**members), [], ThinkerSettings(model="m"))
    assert caught.value.field == field


def test_what_may_stand_for_an_answer():
    special = frozenset({7, 8})
    assert is_reusable([1, 2, 7], special, has_ended=True)
    assert is_reusable([7], special, has_ended=True)
    assert is_reusable([1, 2], special, has_ended=False)
    assert not is_reusable([1, 2], special, has_ended=True)  # a stop string ended it
    assert not is_reusable([1, 8, 2, 7], special, has_ended=True)
    assert not is_reusable([1, 7], special, has_ended=False)


def test_the_configuration_is_told_without_places(checkpoint: ThinkerCheckpoint) -> None:
    told = ChatTemplate(with_template(checkpoint, FORGETFUL)).described()
    assert str(checkpoint.folder) not in told
    config = json.loads(told)
    assert config["tokenizer_class"] == type(checkpoint.tokenizer).__name__
    assert config["chat_template"] == FORGETFUL
    assert config["eos_token"] == checkpoint.tokenizer.eos_token
    assert all(not name.endswith(("_file", "_path")) for name in config)
