"""Finding the thought before an answer, however its tokens' text is cut into pieces or comes late."""

import copy
import dataclasses

import pytest

from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput
from services.families.qwen3_omni import has_speech
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation, Message
from services.thinker.engine import Step
from services.thinker.family import ReasoningMarkers, ThinkerCheckpoint, ToolCallMarkers, load_checkpoint
from services.thinker.output import DeltaWriter
from services.thinker.reasoning import ThoughtParser
from services.thinker.request import read_conversation
from services.thinker.template import ChatTemplate
from services.thinker.tools import ToolCallParser
from tests.support.weights.checkpoints import thinking_checkpoint

MARKERS = ReasoningMarkers("<think>", "</think>", 1, 2, "deepseek_r1")
IDS = {"<think>": 1, "</think>": 2}
CASES = {
    "opened by the prompt": (True, ["a <", "b", "</think>", "\n\nc", "d"], "a <b", "\n\ncd", 2),
    "opened by the answer": (False, ["<think>", "a", "</think>", "c"], "a", "c", 1),
    "opened twice": (True, ["<think>", "a", "</think>", "c"], "a", "c", 1),
    "not opened": (False, ["a", "</think>", "c", "<think>"], "", "a</think>c<think>", 0),
    "cut": (True, ["a", "b</"], "ab</", "", 2),
    "ended at once": (True, ["</think>"], "", "", 0),
    "empty": (True, [], "", "", 0),
    "closed again": (True, ["a", "</think>", "b", "</think>", "<think>"], "a", "b</think><think>", 1),
}


@pytest.mark.parametrize("late", [0, 3, 20])
@pytest.mark.parametrize("case", CASES)
def test_a_thought_is_separated_from_the_answer(case: str, late: int) -> None:
    has_begun, tokens, thought, answer, count = CASES[case]
    parser, given, sent, text, answer_ids = ThoughtParser(MARKERS, has_begun), ["", ""], 0, "", list[int]()
    for i, token in enumerate(tokens):
        text += token
        ready = len(text) if i == len(tokens) - 1 else max(sent, len(text) - late)
        thoughts, rest, ids = parser.feed(text[sent:ready], [IDS.get(token, 9)])
        given = [given[0] + thoughts, given[1] + rest]
        answer_ids += ids
        sent = ready
    given[0] += parser.finish()
    assert given == [thought, answer]
    markers = 0 if answer and not thought else sum(token in IDS for token in tokens[: count + 2])
    assert len(answer_ids) == len(tokens) - count - min(markers, 2)
    assert parser.tokens == count


def test_all_tokens_may_come_at_once_and_their_text_letter_by_letter() -> None:
    parser = ThoughtParser(MARKERS, has_begun=False)
    assert parser.feed("", [1, 9, 2, 8, 7]) == ("", "", [8, 7])
    pieces = [parser.feed(letter, [])[:2] for letter in "<think>a < b</think>c <d"]
    assert tuple(map("".join, zip(*pieces, strict=True))) == ("a < b", "c <d")
    assert parser.finish() == ""
    assert parser.tokens == 1


def test_an_answer_that_is_stopped_within_the_marker_is_a_thought() -> None:
    parser = ThoughtParser(MARKERS, has_begun=True)
    assert parser.feed("so</thi", [9, 2]) == ("so", "", [])
    assert parser.finish() == "</thi"


def step(text: str, *ids: int, finish_reason: str | None = None) -> Step:
    return Step(text, list(ids), (), finish_reason, 0, 0.0, 0.0)


def test_calls_are_looked_for_after_the_thought_alone() -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    calls = ToolCallParser(ToolCallMarkers("<tool_call>", "</tool_call>"), {"look"})
    writer = DeltaWriter(None, None, calls, ThoughtParser(MARKERS, has_begun=True))
    thinking = writer.delta(step(f"I could {call}", 9))
    assert (thinking.reasoning, thinking.text, list(thinking.tool_calls)) == (f"I could {call}", "", [])
    answering = writer.delta(step(f"</think>{call}", 2, 9, finish_reason="stop"))
    assert (answering.reasoning, answering.text) == ("", "")
    assert answering.tool_calls[0].name == "look"
    assert writer.finish_reason("stop") == thinker_pb2.FINISH_REASON_TOOL_CALLS
    assert writer.reasoning_tokens == 1


@pytest.fixture(scope="module")
def thinking() -> ThinkerCheckpoint:
    return load_checkpoint(str(thinking_checkpoint()))


def test_which_checkpoints_think(thinking: ThinkerCheckpoint, tiny_checkpoint) -> None:
    """All of them have the tokens."""
    speaking = load_checkpoint(str(tiny_checkpoint))
    assert speaking.token_id("<think>") is not None
    assert speaking.reasoning is None
    assert thinking.reasoning is not None
    assert thinking.reasoning.closing_id == thinking.token_id("</think>")
    assert thinking.accept_hidden_layer is None
    assert [kind.name for kind in thinking.row_kinds()] == ["rope_positions"]
    assert has_speech({"talker_config": {}, "enable_audio_output": True})
    assert not has_speech({"talker_config": {}, "enable_audio_output": False})
    assert not has_speech({})


def test_the_template_says_whether_a_thought_is_open(thinking: ThinkerCheckpoint) -> None:
    template = ChatTemplate(thinking)
    assert template.opens_thought(Conversation([Message("user", ["What does </think> mean?"])]))
    processor = copy.copy(thinking.processor)
    for opening, is_open in (("<think>\\n", True), ("<think>\\n\\n</think>\\n\\n", False), ("", False)):
        asks = "{%- if add_generation_prompt -%}{{ 'assistant\\n" + opening + "' }}{%- endif -%}"
        processor.chat_template = "{{ messages[0].content }}" + asks
        template = ChatTemplate(dataclasses.replace(thinking, processor=processor))
        assert template.opens_thought(Conversation([Message("user", ["<think>"])])) == is_open


def test_a_thought_is_open_where_a_message_that_is_continued_leaves_it_so(thinking: ThinkerCheckpoint) -> None:
    template, asked = ChatTemplate(thinking), Message("user", ["<think>"])
    for text, is_open in (("<think>\nso", True), ("<think>so</think>It", False), ("It", False)):
        messages = [asked, Message("assistant", [text])]
        assert template.opens_thought(Conversation(messages, asks=False, continues=True)) == is_open
        assert not template.opens_thought(Conversation(messages, asks=False))


def test_earlier_thoughts_are_the_templates_to_read(thinking: ThinkerCheckpoint) -> None:
    template, decode = ChatTemplate(thinking), thinking.tokenizer.decode
    call = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": {}}}]
    asked = [Message("user", ["one"]), Message("assistant", ["two"], call, reasoning="so")]
    seen = Message("tool", ["3"], tool_call_id="c")
    assert "<think>\nso\n</think>\n\ntwo" in decode(template.apply(Conversation([*asked, seen])))
    later = decode(template.apply(Conversation([*asked, seen, Message("user", ["four"])])))
    assert "so" not in later
    assert later.endswith("<|im_start|>assistant\n<think>\n")


def test_an_answer_given_by_its_ids_keeps_its_thought(thinking: ThinkerCheckpoint) -> None:
    template = ChatTemplate(thinking)
    first = [Message("user", ["one"])]
    answer = thinking.tokenizer("so</think>\n\ntwo")["input_ids"]
    prompt = template.apply(Conversation(first))
    again = template.apply(
        Conversation([*first, Message("assistant", [], token_ids=answer), Message("user", ["three"])])
    )
    assert again[: len(prompt) + len(answer)] == prompt + answer


def test_only_the_assistant_thinks() -> None:
    start = thinker_pb2.GenerateStart(messages=[thinker_pb2.ChatMessage(role="user", reasoning="so")])
    with pytest.raises(InvalidInput, match=r"messages\[0\].reasoning"):
        read_conversation(start, [], ThinkerSettings(model="m"))
    start.messages[0].role = "assistant"
    conversation = read_conversation(start, [], ThinkerSettings(model="m"))
    assert conversation.messages[0].reasoning == "so"
