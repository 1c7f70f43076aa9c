"""Tool calls by parsers of vLLM's registry, however the answer is cut into pieces."""

import json
from typing import Any

import pytest

from services.common.errors import InvalidInput
from services.families.any_model import marks
from services.thinker.family import ReasoningMarkers, ThinkerCheckpoint, load_checkpoint
from services.thinker.reasoning import find_markers
from services.thinker.tools import NamedToolParser, calls_by, find_parser

xgrammar = pytest.importorskip("xgrammar")  # vLLM brings it
testing = pytest.importorskip("xgrammar.testing")

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
ANSWERS = {
    "hermes": 'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>',
    "qwen3_coder": (
        "Let me see.<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>"
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint) -> ThinkerCheckpoint:
    return load_checkpoint(str(tiny_checkpoint))


@pytest.mark.parametrize("tokens", [1, 3, 1000])
@pytest.mark.parametrize("name", ANSWERS)
def test_calls_are_separated_from_text(checkpoint: ThinkerCheckpoint, name: str, tokens: int) -> None:
    tokenizer = checkpoint.tokenizer
    parser = NamedToolParser(find_parser(name, tokenizer), tokenizer, TOOLS)
    ids = tokenizer(ANSWERS[name])["input_ids"]
    text, names, arguments, call_ids = "", "", "", []
    for at in range(0, len(ids), tokens):
        piece = ids[at : at + tokens]
        delta = parser.feed(tokenizer.decode(piece), piece, is_last=at + tokens >= len(ids))
        text += delta.text
        for call in delta.tool_calls:
            assert call.index == 0
            names += call.name
            arguments += call.arguments_json
            call_ids += [call.id] if call.id else []
    assert (text.strip(), names, parser.calls) == ("Let me see.", "weather", 1)
    assert json.loads(arguments) == {"city": "Rome", "days": 2}
    assert len(call_ids) == 1


def test_a_call_of_no_tool_is_text_and_the_next_one_is_told(checkpoint: ThinkerCheckpoint) -> None:
    parser = NamedToolParser(find_parser("hermes", checkpoint.tokenizer), checkpoint.tokenizer, TOOLS)
    answer = '<tool_call>\n{"name": "erase", "arguments": {"all": true}}\n</tool_call>' + ANSWERS["hermes"][11:]
    ids = checkpoint.tokenizer(answer)["input_ids"]
    deltas = [
        parser.feed(checkpoint.tokenizer.decode([each]), [each], is_last=at == len(ids) - 1)
        for at, each in enumerate(ids)
    ]
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert ({call.index for call in calls}, "".join(call.name for call in calls), parser.calls) == ({0}, "weather", 1)
    assert 'erase{"all": true}' in "".join(delta.text for delta in deltas)


@pytest.mark.parametrize(("name", "answer"), ANSWERS.items())
def test_how_a_parser_s_calls_are_written(checkpoint: ThinkerCheckpoint, name: str, answer: str) -> None:
    """In the grammar of an answer that may be a call instead."""
    calls = calls_by(find_parser(name, checkpoint.tokenizer), checkpoint.tokenizer, TOOLS)
    grammar = xgrammar.Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": calls}))
    call = answer.removeprefix("Let me see.")
    assert testing._is_grammar_accept_string(grammar, call)
    assert not testing._is_grammar_accept_string(grammar, call.replace("weather", "erase"))
    with pytest.raises(InvalidInput, match=r"tools: with this model's --tool-call-parser they cannot be beside"):
        calls_by(find_parser("phi4_mini_json", checkpoint.tokenizer), checkpoint.tokenizer, TOOLS)


def test_an_answer_without_a_call_is_text(checkpoint: ThinkerCheckpoint) -> None:
    parser = NamedToolParser(find_parser("hermes", checkpoint.tokenizer), checkpoint.tokenizer, TOOLS)
    text = "".join(
        parser.feed(piece, checkpoint.tokenizer(piece)["input_ids"], is_last).text
        for piece, is_last in (("No <tool", False), (" is", False), (" needed.", True))
    )
    assert (text, parser.calls) == ("No <tool is needed.", 0)


def test_a_parser_that_is_not_there_or_not_for_this_model_is_named(checkpoint: ThinkerCheckpoint) -> None:
    with pytest.raises(ValueError, match=r"--tool-call-parser nobodys: vLLM has no such parser; it has .*hermes, "):
        find_parser("nobodys", checkpoint.tokenizer)
    with pytest.raises(ValueError, match="--tool-call-parser mistral: is not for this model's tokenizer: "):
        find_parser("mistral", checkpoint.tokenizer)


def test_all_parsers_that_templates_name_are_there() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert {name for _, name in marks.PARSERS} <= {*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers}
    there = {*ReasoningParserManager.reasoning_parsers, *ReasoningParserManager.lazy_parsers}
    assert {name for *_, name in marks.THOUGHTS} <= there


def test_a_parser_of_thoughts_says_their_tokens(checkpoint: ThinkerCheckpoint) -> None:
    tokenizer = checkpoint.tokenizer
    opening, closing = (tokenizer.get_vocab()[token] for token in ("<think>", "</think>"))
    for name in ("deepseek_r1", "qwen3"):
        assert find_markers(name, tokenizer) == ReasoningMarkers("<think>", "</think>", opening, closing, name)
    with pytest.raises(ValueError, match=r"--reasoning-parser nobodys: vLLM has no such parser; it has .*qwen3, "):
        find_markers("nobodys", tokenizer)
    with pytest.raises(ValueError, match=r"--reasoning-parser seed_oss: (is not for|finds thou)"):
        find_markers("seed_oss", tokenizer)
    with pytest.raises(ValueError, match="--reasoning-parser openai_gptoss: "):
        find_markers("openai_gptoss", tokenizer)
