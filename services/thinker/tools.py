"""Tool calls: what a choice of tools imposes on the answer, and finding the calls in it."""

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from services.common.rpc.errors import InvalidInput
from services.thinker.family import ToolCallMarkers

Mode = Literal["none", "auto", "required", "function"]


@dataclass(frozen=True)
class ToolChoice:
    """Whether and which tool is to be called; `name` for mode "function"."""

    mode: Mode
    name: str = ""

    def output_schema(self, tools: Sequence[dict[str, Any]]) -> str | None:
        """The JSON schema the answer must fit, or None where it is free.

        Raises:
            InvalidInput: there is no such tool.
        """
        parameters = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        if self.mode in ("none", "auto"):
            return None
        if not parameters:
            raise InvalidInput("tool_choice", "forces a call, but there are no tools")
        if self.mode == "function":
            if self.name not in parameters:
                raise InvalidInput("tool_choice.name", f"'{self.name}' is not one of the tools {sorted(parameters)}")
            return json.dumps(_call_schema(self.name, parameters[self.name]))
        return json.dumps({"anyOf": [_call_schema(name, schema) for name, schema in parameters.items()]})


def _call_schema(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"type": "object", **parameters}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


@dataclass
class ToolCallPiece:
    """A piece of a call: the first one of a call has its id and name."""

    index: int
    id: str = ""
    name: str = ""
    arguments_json: str = ""


@dataclass
class Parsed:
    """What new text turned out to be."""

    text: str = ""
    calls: list[ToolCallPiece] = field(default_factory=list)


# A name with an escape that JSON lacks, or with half a surrogate pair, is none.
_NAME = r'"(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})*"'
_HEAD = re.compile(rf'\s*\{{\s*"name"\s*:\s*({_NAME})\s*,\s*"arguments"\s*:\s*(?=\S)', re.DOTALL)


class ToolCallParser:
    """Separates an answer, as it arrives, into text and tool calls `{"name": ..., "arguments": {...}}`.

    A call's arguments are passed on as they arrive. What looks like a call but is none becomes text again.

    Args:
        markers: what stands around a call.
        forced: the whole answer is one call, without the markers.
    """

    def __init__(self, markers: ToolCallMarkers, forced: bool = False) -> None:
        self._opening, self._closing = markers.opening, markers.closing
        self._forced = forced
        self._pending = ""
        self._inside = forced
        self._arguments: _JsonEnd | None = None  # while inside a call's arguments
        self._done = False  # past the arguments: only the closing is left
        self.calls = 0

    def feed(self, text: str) -> Parsed:
        """Takes the next piece of the answer."""
        self._pending += text
        parsed = Parsed()
        while self._advance(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """The answer is complete: what was held back is text after all."""
        rest, self._pending = self._pending, ""
        if self._done or self._arguments:
            return Parsed()
        return Parsed(text=self._opening + rest if self._inside and not self._forced else rest)

    def _advance(self, parsed: Parsed) -> bool:
        """One step; whether another may be possible."""
        if self._arguments:
            return self._read_arguments(parsed)
        if self._done:
            return self._read_closing()
        if self._inside:
            return self._read_head(parsed)
        return self._read_text(parsed)

    def _read_text(self, parsed: Parsed) -> bool:
        before, opening, after = self._pending.partition(self._opening)
        if opening:
            parsed.text += before
            self._pending, self._inside = after, True
            return True
        held = next((n for n in range(len(self._opening) - 1, 0, -1) if before.endswith(self._opening[:n])), 0)
        parsed.text += before[: len(before) - held]
        self._pending = before[len(before) - held :]
        return False

    def _read_head(self, parsed: Parsed) -> bool:
        if head := _HEAD.match(self._pending):
            name = json.loads(head.group(1), strict=False)
            parsed.calls.append(ToolCallPiece(self.calls, f"call_{uuid.uuid4().hex}", name))
            self._pending, self._arguments = self._pending[head.end() :], _JsonEnd()
            self.calls += 1
            return True
        before, closing, after = self._pending.partition(self._closing)
        if closing:  # not a call of ours
            parsed.text += f"{self._opening}{before}{self._closing}"
            self._pending, self._inside = after, self._forced
            return True
        return False

    def _read_arguments(self, parsed: Parsed) -> bool:
        assert self._arguments
        end = self._arguments.find(self._pending)
        piece = self._pending if end is None else self._pending[:end]
        if piece:
            parsed.calls.append(ToolCallPiece(self.calls - 1, arguments_json=piece))
        self._pending = self._pending[len(piece) :]
        if end is None:
            return False
        self._arguments, self._done = None, True
        return True

    def _read_closing(self) -> bool:
        _, closing, after = self._pending.partition(self._closing)
        if not closing or self._forced:
            return False
        self._pending, self._done, self._inside = after, False, False
        return True


class _JsonEnd:
    """Finds where a JSON object that arrives in pieces ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """Index just after the end, or None when `text` (the next piece) does not hold it."""
        for i, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        return None
