"""From messages to token ids: the chat template, in which earlier answers are the sampled ids."""

import re
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from services.common.errors import InvalidInput
from services.thinker.conversation import Conversation, MediaFile, Message, RawPrompt, check_token_ids
from services.thinker.family import ThinkerCheckpoint

_AT_A_TIME = 1000  # tokens


class ChatTemplate:
    """Applies a checkpoint's chat template. For any thread."""

    def __init__(self, checkpoint: ThinkerCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._lock = threading.Lock()  # transformers' fast tokenizers refuse concurrent calls
        self._special_ids = checkpoint.special_ids  # read before there are any

    def apply(self, conversation: Conversation) -> list[int]:
        """Token ids, not cut, with one placeholder for each medium.

        A prompt whose last answer is given by its ids begins with the prompt that was answered, and these ids.

        Raises:
            InvalidInput: names the field: token ids that are no answer's, a placeholder in a text, or messages that
                the template refuses.
        """
        raw = conversation.raw
        token_ids = self._templated(conversation) if raw is None else self._given(raw)
        for kind, token_id in self._checkpoint.placeholders.items():
            count = sum(file.kind == kind for file in conversation.media)
            if token_ids.count(token_id) != count:
                token = self._checkpoint.tokenizer.convert_ids_to_tokens(token_id)
                reason = f"their text must not contain the placeholder {token}"
                if raw is not None:
                    reason = f"must have the placeholder {token} {count} times: once for each {kind}"
                raise InvalidInput(conversation.field, reason)
        return token_ids

    def tokens(self, text: str, special: bool) -> list[int]:
        """Ids of a text, with the `special` ones that the tokenizer puts before it, or without."""
        with self._lock:
            return self._tokens(text, special)

    def spelled(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each id; U+FFFD where it is not UTF-8 by itself."""
        texts: list[str] = []
        for begin in range(0, len(token_ids), _AT_A_TIME):
            with self._lock:  # others have their turn between
                texts += map(self._checkpoint.tokenizer.decode, token_ids[begin : begin + _AT_A_TIME])
        return texts

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens included. Raises InvalidInput: one is not in the vocabulary."""
        check_token_ids("token_ids", token_ids, self._checkpoint.vocab_size)
        with self._lock:
            return self._checkpoint.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _given(self, raw: RawPrompt) -> list[int]:
        if raw.token_ids:
            check_token_ids("prompt.token_ids", raw.token_ids, self._checkpoint.vocab_size)
            return list(raw.token_ids)
        return self.tokens(raw.text, special=True)

    def _templated(self, conversation: Conversation) -> list[int]:
        try:
            with self._lock:
                given = [(i, message) for i, message in enumerate(conversation.messages) if message.token_ids]
                return self._apply(conversation, {i: self._answer(i, message) for i, message in given})
        except InvalidInput:
            raise
        except Exception as error:  # a template may raise anything; it ran on the user's input
            if conversation.continues and isinstance(error, ValueError):  # transformers' quotes the whole prompt
                reason = "the chat template does not write its text as it is, so it cannot be continued"
                raise InvalidInput(f"messages[{len(conversation.messages) - 1}].content", reason) from error
            raise InvalidInput("messages", f"the model's chat template refuses them: {error}") from error

    def opens_thought(self, conversation: Conversation) -> bool:
        """Whether the prompt of `conversation` ends in a thought. Only what the template writes last counts: a user may
        write markers."""
        markers = self._checkpoint.reasoning
        if markers is None or conversation.raw is not None or not (conversation.asks or conversation.continues):
            return False
        if conversation.continues:
            last = "".join(part for part in conversation.messages[-1].parts if isinstance(part, str))
            return last.rfind(markers.opening) > last.rfind(markers.closing)
        turns = [_to_template(message) for message in conversation.messages]
        with self._lock:
            prompt, ended = (self._render(turns, conversation, asks) for asks in (True, False))
        last = prompt[len(ended) :] if prompt.startswith(ended) else prompt
        return last.rfind(markers.opening) > last.rfind(markers.closing)

    def _answer(self, index: int, message: Message) -> list[int]:
        """The ids of message `index`, without the special token that ended it. Raises InvalidInput."""
        token_ids = message.token_ids[:-1] if message.token_ids[-1] in self._special_ids else message.token_ids
        check_token_ids(_field(index), token_ids, self._checkpoint.vocab_size)
        for place, token_id in enumerate(token_ids):
            if token_id in self._special_ids:
                token = self._checkpoint.tokenizer.convert_ids_to_tokens(token_id)
                raise InvalidInput(_field(index), f"has the special token {token} at {place}; give the content instead")
        return token_ids

    def _apply(self, conversation: Conversation, answers: dict[int, list[int]]) -> list[int]:
        """The prompt, with `answers` by the index of their messages."""
        # Stands for an answer while the template runs; no text can have it, as nobody can guess it.
        mark = f"answer-{secrets.token_hex(16)}"
        turns = [
            {"role": message.role, "content": f"{mark}-{i}-"} if i in answers else _to_template(message)
            for i, message in enumerate(conversation.messages)
        ]
        text = self._render(turns, conversation, conversation.asks, conversation.continues)
        opening = ""
        if answers:
            ended = self._render(turns, conversation, False)
            opening = text[len(ended) :] if text.startswith(ended) else ""
        first, *rest = re.split(f"{mark}-([0-9]+)-", text)
        found = list(map(int, rest[::2]))
        for i in answers:
            if found.count(i) != 1:
                reason = "the chat template does not write this message once; give the content instead"
                raise InvalidInput(_field(i), reason)
        texts = [first, *rest[1::2]]
        token_ids: list[int] = []
        for i, before in zip(found, texts, strict=False):
            token_ids += self._tokens(_as_sampled(before, opening), not token_ids) + answers[i]
        return token_ids + self._tokens(texts[-1], not token_ids)

    def _render(
        self, turns: Sequence[dict[str, Any]], conversation: Conversation, asks: bool, continues: bool = False
    ) -> str:
        """The text: up to where an answer begins if it `asks`, up to the end of the last text if it `continues`."""
        system = self._checkpoint.system_prompt
        has_own = system is None or (turns and turns[0]["role"] == "system")
        return self._checkpoint.processor.apply_chat_template(
            turns if has_own else [{"role": "system", "content": system}, *turns],
            tools=conversation.tools or None,
            add_generation_prompt=asks,
            continue_final_message=continues,
            tokenize=False,
            **conversation.template_kwargs,
        )

    def _tokens(self, text: str, special: bool) -> list[int]:
        return self._checkpoint.tokenizer(text, add_special_tokens=special)["input_ids"]


def is_reusable(token_ids: Sequence[int], special_ids: frozenset[int], has_ended: bool) -> bool:
    """Whether all ids sampled of an answer may stand for it in a later prompt.

    They may not if a special token stands before their end: it would begin another turn, or stand for a medium. Nor if
    a stop string or a stop token that is text ended them, which the answer does not have.

    Args:
        has_ended: by its end or a stop, not by its length.
    """
    if has_ended and (not token_ids or token_ids[-1] not in special_ids):
        return False
    return special_ids.isdisjoint(token_ids[:-1] if has_ended else token_ids)


def _as_sampled(before: str, opening: str) -> str:
    """The text before an answer, as it was when the answer was sampled.

    Templates may begin an earlier answer without the thoughts that were opened, or with empty ones.

    Args:
        before: as the template writes it before an earlier answer.
        opening: what it writes last where it asks for one; "": not known.
    """
    for size in range(len(opening), 0, -1):
        if before.endswith(opening[:size]):
            return before[: len(before) - size] + opening
    start = before.rfind(opening) if opening else -1
    return before if start < 0 else before[: start + len(opening)]


def _to_template(message: Message) -> dict[str, Any]:
    content: Any = [
        {"type": part.kind} if isinstance(part, MediaFile) else {"type": "text", "text": part} for part in message.parts
    ]
    if all(isinstance(part, str) for part in message.parts):
        content = "".join(part for part in message.parts if isinstance(part, str))
    turn: dict[str, Any] = {"role": message.role, "content": content}
    optional = {
        "reasoning_content": message.reasoning,
        "tool_calls": message.tool_calls,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    return turn | {key: value for key, value in optional.items() if value}


def _field(index: int) -> str:
    return f"messages[{index}].token_ids"
