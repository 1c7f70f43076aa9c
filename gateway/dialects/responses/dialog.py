"""The conversation of a response, for the answer loop."""

from collections.abc import Sequence
from dataclasses import replace

from gateway.answers.gateway import Gateway
from gateway.answers.jobs import to_jobs
from gateway.answers.request import Tool
from gateway.answers.turns import Dialog
from gateway.dialects.responses.files import filled
from gateway.dialects.responses.messages import Messages, chat_request, last_picture, own_name
from gateway.dialects.responses.output import OutputItem
from gateway.dialects.responses.parts import Item
from gateway.dialects.responses.spec import ResponseSpec
from gateway.pipeline.run import Job


class ResponseDialog(Dialog):
    """The items before a response, and its `outputs`, which grow by turns and results."""

    def __init__(self, gateway: Gateway, spec: ResponseSpec, outputs: Sequence[OutputItem]) -> None:
        self._gateway, self._spec, self._outputs = gateway, spec, outputs
        self._context = [(place, filled(item, spec.files)) for place, item in spec.named_items]
        self._added = 0  # outputs that the context has
        self._messages, self._places = Messages(sees_images=False), list[str]()

    async def job(self, request_id: str, offers_tools: bool, is_first: bool) -> Job:
        spec, tools = self._spec, self._spec.tools
        self._context += self._new()
        self._added = len(self._outputs)
        thinker = self._gateway.pipeline.info("thinker")
        messages = self._messages = Messages(sees_images=thinker is not None and "image" in thinker.input_modalities)
        offered, self._places = self._offered(offers_tools)
        if spec.request.instructions:
            said = [{"type": "input_text", "text": spec.request.instructions}]
            messages.add("instructions", {"type": "message", "role": "system", "content": said})
        for place, item in self._context:
            messages.add(place, item)
        choice = tools.choice if offered and is_first else None
        chat = chat_request(spec.request, messages.messages, offered, choice)
        (job,) = await to_jobs(self._gateway, chat, request_id, spec.owner)
        return replace(job, conversation_id=self._conversation_id)

    def shorten(self) -> bool:
        """Leaves out the oldest quarter of the items, never the last one; whether it has done so."""
        count = max(1, (len(self._context) - 1) // 4)
        if self._spec.request.truncation != "auto" or len(self._context) <= count:
            return False
        kept = self._context[count:]
        called = {item["call_id"] for _, item in kept if item["type"] == "function_call"}
        self._context = [
            (place, item) for place, item in kept if item["type"] != "function_call_output" or item["call_id"] in called
        ]
        return bool(self._context)

    def last_image(self) -> str | None:
        return last_picture([item for _, item in (*self._context, *self._new())])

    def own_name(self, member: str) -> str:
        return own_name(self._spec.request.own_name(member), self._messages.places, self._places)

    def _new(self) -> list[tuple[str, Item]]:
        return [("output", output.item) for output in self._outputs[self._added :]]

    def _offered(self, with_hosted: bool) -> tuple[list[Tool], list[str]]:
        """(tools that the model may call now, where in the request each is)."""
        offered = list(self._spec.tools.functions)
        if with_hosted:
            offered += [(tool.function(), place) for tool, place in self._spec.tools.hosted.values()]
        return [tool for tool, _ in offered], [place for _, place in offered]

    @property
    def _conversation_id(self) -> str:
        """Routes all turns of a conversation to one thinker; "": the prompt decides."""
        request = self._spec.request
        name = request.conversation.id if request.conversation else request.prompt_cache_key
        return f"{self._spec.owner or ''}/{name}" if name else ""
