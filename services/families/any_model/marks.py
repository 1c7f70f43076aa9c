"""What a chat template says of calls and thoughts, by the marks that it writes around them."""

from typing import Any

from services.thinker.family import ReasoningMarkers, ToolCallMarkers

# vLLM's parser of calls, by texts that a template has: the first row whose texts it has all is taken.
PARSERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<longcat_tool_call>",), "longcat"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|action_start|>",), "internlm"),
    (("<tool_calls>",), "jamba"),
    (('"parameters": dictionary of argument name',), "llama3_json"),
)
_OPENING, _CLOSING = "<tool_call>", "</tool_call>"  # around JSON
# Tokens around a thought, and vLLM's parser of them.
THOUGHTS = (
    ("<think>", "</think>", "deepseek_r1"),
    ("[THINK]", "[/THINK]", "mistral"),
    ("<seed:think>", "</seed:think>", "seed_oss"),
    ("<mm:think>", "</mm:think>", "minimax_m3"),
)


def tool_parser(template: str) -> str | None:
    """Name of the parser that finds calls as `template` writes them; None: none does, or they are `tool_markers`'."""
    return next((parser for marks, parser in PARSERS if all(mark in template for mark in marks)), None)


def tool_markers(template: str) -> ToolCallMarkers | None:
    """None: it writes no calls in JSON between these marks."""
    has_calls = _OPENING in template and _CLOSING in template and tool_parser(template) is None
    return ToolCallMarkers(_OPENING, _CLOSING) if has_calls else None


def reasoning_markers(template: str, tokenizer: Any) -> ReasoningMarkers | None:
    """None: no thoughts, or their marks are no tokens."""
    vocabulary = tokenizer.get_vocab()
    for opening, closing, parser in THOUGHTS:
        if closing in template and opening in vocabulary and closing in vocabulary:
            return ReasoningMarkers(opening, closing, vocabulary[opening], vocabulary[closing], parser)
    return None
