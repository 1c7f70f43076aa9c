"""Sends prompts through the stages, without HTTP."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import structlog
from PIL import Image

from cli.plan import Tls
from gateway.answers.chat_dialog import needs_dialog, run_dialog
from gateway.answers.diffusion import ImageRequest
from gateway.answers.gateway import Gateway
from gateway.answers.image_chat import ImageChat, answers_with_images
from gateway.answers.images import ImageGeneration, InputImages, to_generation
from gateway.answers.jobs import to_jobs
from gateway.answers.meter import Meter
from gateway.answers.request import ChatCompletionRequest
from gateway.answers.tools.calls import Rules
from gateway.answers.tools.generators import ImageGenerator
from gateway.answers.turn import AnswerEvent
from gateway.media.check import MediaFile
from gateway.pipeline.config import load_pipeline
from gateway.pipeline.run import run
from gateway.pipeline.stage import Stage
from gateway.settings import GatewaySettings
from gateway.validation import validated
from quartet.answers import Answer, AnswerBuilder, Event, ImageDelta, TextDelta, image_of
from quartet.errors import Error, StartError, as_errors, as_start_errors, refused
from quartet.media import Media, OwnFiles
from quartet.messages import PromptOptions, members
from quartet.system import Deployment
from services.common.rpc import tls
from services.common.rpc.channels import Channels

REACH_S = 10.0  # longest wait until running stages serve
ATTEMPTS = 3  # a prompt that kills its stage each time must not do so forever
_POLL_S = 0.1
_FULL_S = 0.5  # wait after a full queue
_HEALTH_TIMEOUT_S = 10.0  # a dead stage refuses connections at once; a slow one is not down
# Limits protect a server from strangers. A stage says itself what it can hold.
_LIMITS = (
    *("max_body_bytes", "media_max_bytes", "media_max_parts"),
    *("media_max_image_pixels", "media_max_request_image_pixels", "media_max_audio_s", "media_max_video_s"),
)
_UNLIMITED: dict[str, Any] = dict.fromkeys(_LIMITS, 2**40)
log = logging.getLogger("quartet")
Result = TypeVar("Result")


async def start(deployment: Deployment, concurrency: int, timeout_s: float) -> "Client":
    """Starts own stages, and connects to the stages. Raises StartError."""
    if not structlog.is_configured():  # its default prints to stdout
        _log_by_logging()
    with as_start_errors():
        if deployment.processes is not None:
            await deployment.processes.start()
        config = load_pipeline(deployment.pipeline, dict(deployment.addresses))
        credentials = _credentials(deployment.tls)
    settings = GatewaySettings(
        pipeline=deployment.pipeline,
        request_timeout_s=timeout_s,
        health_timeout_s=_HEALTH_TIMEOUT_S,
        media_private_addresses=True,
        hosted_tools=[ImageGenerator.name] if config.outputs.image else [],
        **_UNLIMITED,
    )
    files = OwnFiles(settings)
    gateway = await Gateway(settings, config, Channels(credentials), fetcher=files).__aenter__()
    client = Client(gateway, files, deployment.processes is not None, concurrency)
    try:
        async with asyncio.timeout(REACH_S):
            await client.until_serving()
    except TimeoutError:
        states = "; ".join(f"{name}: {stage.state}" for name, stage in gateway.pipeline.by_name.items())
        await client.close()
        raise StartError(f"address: the stages do not serve: {states}", "address", "stage_unavailable") from None
    except BaseException:
        await client.close()
        raise
    return client


def _credentials(files: Tls) -> tls.Credentials | None:
    try:
        return tls.load(files)
    except SystemExit as error:
        raise StartError(f"tls: {error}", "tls", "start_failed") from None


def _log_by_logging() -> None:
    """Sends log lines to the logger "quartet": a library prints nothing."""
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, structlog.processors.KeyValueRenderer(key_order=["event"])],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=lambda *_: log,
    )


class Client:
    """Requests answers from the stages.

    Args:
        gateway: entered.
        restarts: whether a lost stage comes back.
        concurrency: prompts at a time.
    """

    def __init__(self, gateway: Gateway, files: OwnFiles, restarts: bool, concurrency: int) -> None:
        self._gateway, self._files, self._restarts = gateway, files, restarts
        self._places = asyncio.Semaphore(concurrency)
        self._closed = False

    async def close(self) -> None:
        """Cancels all prompts and closes the connections."""
        if not self._closed:
            self._closed = True
            await self._gateway.__aexit__(None, None, None)

    @property
    def _makes_images(self) -> bool:
        return not self._gateway.pipeline.answer and self._gateway.pipeline.output("image") is not None

    async def until_serving(self) -> None:
        while not self._gateway.pipeline.ready:  # noqa: ASYNC110  there is no event for it
            await asyncio.sleep(_POLL_S)

    def check(self, options: PromptOptions) -> None:
        """Raises Error: an option is at fault whatever the prompt."""
        given, _ = members("", options, self._speaks_only)
        self._validated({**given, "messages": [{"role": "user", "content": "x"}]})

    @property
    def _speaks_only(self) -> bool:
        return self._gateway.pipeline.config.outputs.text is None and not self._makes_images

    def _validated(self, given: dict[str, Any]) -> ChatCompletionRequest:
        main = self._gateway.catalog.model_of(self._gateway.pipeline.main) or ""
        with as_errors():
            return validated(ChatCompletionRequest, {**given, "model": main})

    async def answer(self, prompt: Any, options: PromptOptions) -> Answer:
        """Raises Error."""

        async def work(deadline: float) -> Answer:
            last: Event | None = None
            async with aclosing(self._events(prompt, options, deadline)) as events:
                async for event in events:
                    last = event
            assert isinstance(last, Answer)
            return last

        return await self._with_retries(work)

    async def stream(self, prompt: Any, options: PromptOptions) -> AsyncGenerator[Event, None]:
        """Raises Error."""
        async with self._places, aclosing(self._events(prompt, options, self._deadline())) as events:
            async for event in events:
                yield event

    def _deadline(self) -> float:
        return time.monotonic() + self._gateway.settings.request_timeout_s

    async def _with_retries(self, work: Callable[[float], Awaitable[Result]]) -> Result:
        """The result of `work`, which gets its deadline in `time.monotonic()`. Tries again after a loss."""
        async with self._places:
            deadline, losses = self._deadline(), 0
            while True:
                try:
                    return await work(deadline)
                except Error as error:
                    losses += error.code == "stage_unavailable"
                    lost = error.code == "stage_unavailable" and self._restarts and losses < ATTEMPTS
                    if not lost and error.code != "queue_full":
                        raise
                    try:
                        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                            await asyncio.sleep(_FULL_S)  # a loss may not be known yet
                            await self.until_serving()
                    except TimeoutError:
                        raise error from None

    async def _events(self, prompt: Any, options: PromptOptions, deadline: float) -> AsyncGenerator[Event, None]:
        given, files = members(prompt, options, self._speaks_only)
        contents = [await asyncio.to_thread(media.file, field) for field, media, _ in files]
        request_id = uuid.uuid4().hex
        with self._files.holding(contents) as urls:
            for (_, _, member), url in zip(files, urls, strict=True):
                member["url"] = url
            request = self._validated(given)
            image = self._gateway.pipeline.output("image")
            if image is not None and answers_with_images(self._gateway, image, request):
                async with aclosing(self._image_events(request, image, request_id, deadline)) as events:
                    async for event in events:
                        yield event
                return
            builder = AnswerBuilder(0, "", 0, rate_hz=self._rate_hz)
            if needs_dialog(self._gateway, request):  # each turn reads the files again
                turns = run_dialog(self._gateway, request, None, Rules(), _meter(request_id, deadline))
                async with aclosing(_deltas(turns, builder)) as events:
                    async for event in events:
                        yield event
                yield builder.answer(bool(request.logprobs))
                return
            with as_errors():
                jobs = await to_jobs(self._gateway, request, request_id, None)
        left_s = max(0.0, deadline - time.monotonic())
        async with aclosing(_deltas(run(self._gateway.pipeline, jobs, left_s), builder)) as events:
            async for event in events:
                yield event
        yield builder.answer(bool(request.logprobs))

    @property
    def _rate_hz(self) -> int:
        code2wav = self._gateway.pipeline.info("code2wav")
        return code2wav.sample_rate_hz if code2wav is not None else 0

    async def _image_events(
        self, request: ChatCompletionRequest, stage: Stage, request_id: str, deadline: float
    ) -> AsyncGenerator[Event, None]:
        """Of an answer of images, with what was written before them. Raises Error."""
        made: dict[int, tuple[Image.Image, dict[str, Any]]] = {}
        with as_errors():
            request.model = self._gateway.catalog.model_of(stage) or ""
            chat = ImageChat(self._gateway, request, stage, None)
            generation = await chat.generation(_meter(request_id, deadline))
            async with aclosing(chat.parts(generation)) as parts:
                async for part in parts:
                    if isinstance(part, str):
                        yield TextDelta("", [], part)
                        continue
                    index, sent = part
                    image = await asyncio.to_thread(image_of, sent["image_url"]["url"].partition(",")[2])
                    made[index] = image, sent
                    yield ImageDelta(image, None)
        images, sent_parts = zip(*(made[i] for i in sorted(made)), strict=True)
        yield Answer(
            images=list(images),
            reasoning=generation.thoughts,
            finish_reason="stop",
            timings=generation.quartet()["timings"],
            _image_parts=list(sent_parts),
        )

    async def images(
        self, prompt: str, images: Sequence[Any], mask: Any, controls: Sequence[Any], options: dict[str, Any]
    ) -> list[Image.Image]:
        """Raises Error."""
        stage = self._image_stage()
        with as_errors():
            request = validated(ImageRequest, {**options, "prompt": prompt})
        if request.stream or request.partial_images:
            raise refused("stream", "the images come when they are finished; leave it out")
        loaded = [await _image_file(each, f"images[{i}]") for i, each in enumerate(images)]
        hole = None if mask is None else await _image_file(mask, "mask")
        steering = [await _image_file(each, f"control_images[{i}]") for i, each in enumerate(controls)]
        inputs = InputImages(loaded, hole, [*request.control_images, *steering])

        async def work(deadline: float) -> list[Image.Image]:
            with as_errors():
                request.model = self._gateway.catalog.model_of(stage)
                generation = await to_generation(self._gateway, request, inputs, _meter(uuid.uuid4().hex, deadline))
                return await _to_pillow(generation)

        return await self._with_retries(work)

    def _image_stage(self) -> Stage:
        with as_errors():
            return self._gateway.catalog.stage_for("image", None)


async def _deltas(
    events: AsyncGenerator[tuple[int, AnswerEvent], None], builder: AnswerBuilder
) -> AsyncGenerator[Event, None]:
    """The caller's events for those of one answer, which `builder` takes. Raises Error."""
    with as_errors():
        async with aclosing(events):
            async for _, event in events:
                builder.take(event)
                for delta in builder.deltas(event):
                    yield delta


def _meter(request_id: str, deadline: float) -> Meter:
    """The meter of a request that ends at `deadline`, in `time.monotonic()`."""
    return Meter(request_id, max(0.0, deadline - time.monotonic()))


async def _image_file(image: Any, name: str) -> MediaFile:
    part = image if isinstance(image, Media) else Media("image", image)
    return MediaFile(name, "image", part.url or "", b"" if part.url else await asyncio.to_thread(part.file, name))


async def _to_pillow(generation: ImageGeneration) -> list[Image.Image]:
    async with aclosing(generation.finished()) as finished:
        made = {image.output: Image.fromarray(image.pixels) async for image in finished}
    return [made[i] for i in sorted(made)]
