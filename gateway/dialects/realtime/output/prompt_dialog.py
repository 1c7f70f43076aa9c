"""The conversation of a realtime response, for the answer loop."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

from gateway.access.api_key import ApiKey
from gateway.answers.gateway import Gateway
from gateway.answers.tools.calls import HostedTool
from gateway.answers.transcription.sound_transcripts import hears
from gateway.answers.turns import Dialog
from gateway.dialects.realtime.conversation.items import Item
from gateway.dialects.realtime.conversation.prompt import Prompt
from gateway.dialects.realtime.input.transcriber import transcribe_items
from gateway.dialects.realtime.output.response_output import ResponseOutput
from gateway.dialects.realtime.output.tools import last_image
from gateway.pipeline.run import Job


class PromptDialog(Dialog):
    """The items of a prompt, and those of its response, `outputs`, which grow by turns and results.

    Args:
        tools: of the session, that run here.
        key: whose uploaded voices can speak.
    """

    def __init__(
        self,
        gateway: Gateway,
        prompt: Prompt,
        tools: Iterable[HostedTool],
        outputs: ResponseOutput,
        key: ApiKey | None,
    ) -> None:
        self._gateway, self._first, self._tools, self._outputs = gateway, prompt, tools, outputs
        self._key = key
        self._prompt = prompt

    async def job(self, request_id: str, offers_tools: bool, is_first: bool) -> Job:
        hosted = [tool.function() for tool in self._tools if offers_tools]
        prompt = replace(self._prompt, items=self._items())
        if not hears(self._gateway):
            await transcribe_items(self._gateway, prompt.items, self._key)
        spoken = await prompt.speech(self._gateway, self._key and self._key.name)
        return await asyncio.to_thread(prompt.job, self._gateway, request_id, hosted, is_first, spoken)

    def shorten(self) -> bool:
        shorter = None if self._outputs else self._prompt.shortened()
        self._prompt = shorter or self._prompt
        return shorter is not None

    def last_image(self) -> str | None:
        return last_image(self._items())

    def own_name(self, member: str) -> str:
        return member

    def left_out(self, prompt_tokens: int) -> Sequence[Item]:
        """The items that later prompts leave out, after a first prompt of so many tokens: they begin where this one
        did, for the thinker's prefix cache."""
        items = self._first.items
        return items[: len(items) - len(self._prompt.retained(prompt_tokens).items)]

    def _items(self) -> list[Item]:
        return [*self._prompt.items, *self._outputs.items]
