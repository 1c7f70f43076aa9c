"""From messages to token ids: the chat template, in which earlier answers are the sampled ids."""

import json
import re
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from services.common.errors import InvalidInput, StageError
from services.thinker.conversation import ROLES, Conversation, MediaFile, Message, RawPrompt, check_token_ids
from services.thinker.family import ThinkerCheckpoint, templater
from services.thinker.tokens import PromptTokenizer, Stop, never

_AT_A_TIME = 1000  # tokens
_PLACE = re.compile("_file$|_files$|_or_path$|^backend$|^is_local$|^local_files_only$")


class ChatTemplate:
    """Applies a checkpoint's chat template. For any thread.

    What messages and tools say becomes no control token, however it is written: those are the template's.

    Attributes:
        reads_users: whether the template writes what users say in words. One for models that write down speech may not.
    """

    def __init__(self, checkpoint: ThinkerCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._special_ids = checkpoint.special_ids
        media = checkpoint.tokenizer.convert_ids_to_tokens(list(checkpoint.placeholders.values()))
        self._texts = PromptTokenizer(checkpoint.tokenizer, " ".join([checkpoint.chat_template, *media]))
        mark = str(secrets.randbits(128))  # that changing letters leaves as it is
        has_text = self._is_written(mark, mark)
        self._takes_parts = not has_text and self._is_written(mark, [{"type": "text", "text": mark}])
        self.reads_users = has_text or self._takes_parts

    def least(self, conversation: Conversation) -> int:
        """Fewest tokens that the prompt can have: templates may leave out earlier answers."""
        parts = [part for message in conversation.messages if message.role != "assistant" for part in message.parts]
        texts = [conversation.raw.text] if conversation.raw is not None else parts
        return self._texts.least(sum(len(text) for text in texts if isinstance(text, str)))

    def apply(self, conversation: Conversation, most: int | None = None, stop: Stop = never) -> list[int]:
        """Token ids, not cut, with one placeholder for each medium.

        A prompt whose last answer is given by its ids begins with the prompt that was answered, and these ids.

        Raises:
            InvalidInput: names the field: token ids that are no answer's, messages that the template refuses, a raw
                prompt whose placeholders do not fit its media.
            ContextTooLong: there are `most` ids before all of the text is read.
            RequestCancelled: `stop` says so.
        """
        raw = conversation.raw
        token_ids = self._templated(conversation, most, stop) if raw is None else self._given(raw, most, stop)
        for kind, token_id in self._checkpoint.placeholders.items():
            count = sum(file.kind == kind for file in conversation.media)
            if token_ids.count(token_id) != count:
                token = self._checkpoint.tokenizer.convert_ids_to_tokens(token_id)
                reason = f"must have the placeholder {token} {count} times: once for each {kind}"
                raise InvalidInput(conversation.field, reason)
        return token_ids

    def tokens(self, text: str, special: bool, stop: Stop = never) -> list[int]:
        """Ids of a text, with the `special` ones that the tokenizer puts before it, or without."""
        return self._texts.encode(text, "text", special, stop=stop)

    def spelled(self, token_ids: Sequence[int], stop: Stop = never) -> list[str]:
        """The text of each id; U+FFFD where it is not UTF-8 by itself."""
        texts: list[str] = []
        for begin in range(0, len(token_ids), _AT_A_TIME):
            if stop():
                break
            texts += map(self._checkpoint.tokenizer.decode, token_ids[begin : begin + _AT_A_TIME])
        return texts

    def text(self, token_ids: Sequence[int], stop: Stop = never) -> str:
        """Text of ids, special tokens included. Raises InvalidInput: one is not in the vocabulary."""
        check_token_ids("token_ids", token_ids, self._checkpoint.vocab_size)
        return "" if stop() else self._checkpoint.tokenizer.decode(token_ids, skip_special_tokens=False)

    def described(self, stop: Stop = never) -> str:
        """The tokenizer's configuration as a JSON object, without places of files."""
        tokenizer = self._checkpoint.tokenizer
        members = {name: value for name, value in tokenizer.init_kwargs.items() if not _PLACE.search(name)}
        members["tokenizer_class"] = type(tokenizer).__name__
        if self._checkpoint.chat_template:
            members["chat_template"] = self._checkpoint.chat_template
        # an added token is its text
        return json.dumps(members, ensure_ascii=False, default=lambda value: getattr(value, "content", str(value)))

    def _given(self, raw: RawPrompt, most: int | None, stop: Stop) -> list[int]:
        if raw.token_ids:
            check_token_ids("prompt.token_ids", raw.token_ids, self._checkpoint.vocab_size)
            return list(raw.token_ids)
        return self._texts.encode(raw.text, "prompt.text", True, most, stop)

    def _templated(self, conversation: Conversation, most: int | None, stop: Stop) -> list[int]:
        if not self._checkpoint.chat_template:
            reason = "this model takes none: it has no chat template, and continues texts; send a prompt instead"
            raise InvalidInput("messages", f"{reason} (/v1/completions)")
        try:
            self._refuse_unwritten(conversation)
            given = [(i, message) for i, message in enumerate(conversation.messages) if message.token_ids]
            return self._apply(conversation, {i: self._answer(i, message) for i, message in given}, most, stop)
        except StageError:
            raise
        except Exception as error:  # a template may raise anything; it ran on the user's input
            if conversation.continues and isinstance(error, ValueError):  # transformers' quotes the whole prompt
                reason = "the chat template does not write its text as it is, so it cannot be continued"
                raise InvalidInput(f"messages[{len(conversation.messages) - 1}].content", reason) from error
            reason = f"the model's chat template refuses them: {self._texts.reveal(str(error))}"
            raise InvalidInput("messages", reason) from error

    def _is_written(self, mark: str, content: Any) -> bool:
        """Whether the template writes `mark`, which a user's `content` has. True: it refuses such a message."""
        try:
            turns = [{"role": "user", "content": content}]
            return mark in templater(self._checkpoint.processor).apply_chat_template(turns, tokenize=False)
        except Exception:  # a template may raise anything
            return True

    def _refuse_unwritten(self, conversation: Conversation) -> None:
        """Raises InvalidInput: the template leaves out a message of an unusual role, or what a user says in words."""
        for i, message in enumerate(conversation.messages):
            if message.role == "user" and not self.reads_users and any(map(_is_text, message.parts)):
                reason = "the model's chat template leaves out what users write; send sounds alone"
                raise InvalidInput(f"messages[{i}].content", f"{reason}, and what is to be known as a system message")
        unusual = [i for i, message in enumerate(conversation.messages) if message.role not in ROLES]
        if not unusual:
            return
        mark = secrets.token_hex(16)
        turns = [
            {"role": message.role, "content": self._text(f"{mark}-{i}-")} if i in unusual else self._turn(message)
            for i, message in enumerate(conversation.messages)
        ]
        text = self._render(turns, conversation, conversation.asks)
        for i in unusual:
            if text.count(f"{mark}-{i}-") != 1:
                reason = f"the model's chat template does not write messages of such a role; use {', '.join(ROLES)}"
                raise InvalidInput(f"messages[{i}].role", reason)

    def opens_thought(self, conversation: Conversation, stop: Stop = never) -> bool:
        """Whether the prompt of `conversation` ends in a thought. Only what the template writes last counts: a user may
        write markers."""
        markers = self._checkpoint.reasoning
        is_open = conversation.asks or conversation.continues
        if markers is None or not is_open or stop():
            return False
        if conversation.raw is not None:
            return conversation.raw.opens_thought
        if conversation.continues:
            last = "".join(part for part in conversation.messages[-1].parts if isinstance(part, str))
            return last.rfind(markers.opening) > last.rfind(markers.closing)
        turns = [self._turn(message) for message in conversation.messages]
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

    def _apply(
        self, conversation: Conversation, answers: dict[int, list[int]], most: int | None, stop: Stop
    ) -> list[int]:
        """The prompt, with `answers` by the index of their messages."""
        # Stands for an answer while the template runs; no text can have it, as nobody can guess it.
        mark = f"answer-{secrets.token_hex(16)}"
        turns = [
            {"role": message.role, "content": self._text(f"{mark}-{i}-")} if i in answers else self._turn(message)
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
            token_ids += self._encode(_as_sampled(before, opening), token_ids, most, stop) + answers[i]
        return token_ids + self._encode(texts[-1], token_ids, most, stop)

    def _render(
        self, turns: Sequence[dict[str, Any]], conversation: Conversation, asks: bool, continues: bool = False
    ) -> str:
        """The text: up to where an answer begins if it `asks`, up to the end of the last text if it `continues`."""
        system = self._checkpoint.system_prompt
        has_own = system is None or (turns and turns[0]["role"] == "system")
        return templater(self._checkpoint.processor).apply_chat_template(
            turns if has_own else [{"role": "system", "content": system}, *turns],
            tools=self._concealed(conversation.tools) or None,
            add_generation_prompt=asks,
            continue_final_message=continues,
            tokenize=False,
            **self._concealed(conversation.template_kwargs),
        )

    def _encode(self, text: str, before: list[int], most: int | None, stop: Stop) -> list[int]:
        return self._texts.encode(text, "messages", False, most, stop, len(before))

    def _turn(self, message: Message) -> dict[str, Any]:
        """As templates take it. Of what an application says itself, text that means a call or a thought stays so."""
        conceal = partial(self._texts.conceal, keep_plain=message.role in ("system", "assistant"))
        content: Any = [
            {"type": part.kind} if isinstance(part, MediaFile) else {"type": "text", "text": conceal(part)}
            for part in message.parts
        ]
        if spelled := [
            self._checkpoint.spelled.get(part.kind) for part in message.parts if isinstance(part, MediaFile)
        ]:
            texts = [conceal(part) for part in message.parts if isinstance(part, str)]
            content = "\n".join([*map(str, spelled), *texts]) if all(spelled) else content
        else:
            content = self._text(conceal("".join(part for part in message.parts if isinstance(part, str))))
        turn: dict[str, Any] = {"role": message.role, "content": content}
        optional = {
            "reasoning_content": conceal(message.reasoning),
            "tool_calls": self._concealed(message.tool_calls),
            "tool_call_id": self._texts.conceal(message.tool_call_id),
            "name": self._texts.conceal(message.name),
        }
        return turn | {key: value for key, value in optional.items() if value}

    def _text(self, text: str) -> Any:
        """The content of a message that is a text."""
        return [{"type": "text", "text": text}] if self._takes_parts else text

    def _concealed(self, value: Any) -> Any:
        """JSON, with all text in it concealed."""
        if isinstance(value, dict):
            return {self._texts.conceal(name): self._concealed(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self._concealed(each) for each in value]
        return self._texts.conceal(value) if isinstance(value, str) else value


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


def _is_text(part: Any) -> bool:
    return isinstance(part, str) and bool(part.strip())


def _field(index: int) -> str:
    return f"messages[{index}].token_ids"
