"""When each word of an answer is heard, by an aligner: for what an interrupted user has heard of it."""

import asyncio

import structlog

from gateway.answers.gateway import Gateway
from gateway.answers.word_times import for_aligner
from gateway.dialects.realtime.conversation.items import Item, SpokenWord
from gateway.dialects.realtime.events import new_id
from gateway.media.encode import BYTES_PER_SAMPLE
from gateway.pipeline.aligner import word_times
from gateway.pipeline.stage import Stage
from gateway.tasks import cancel
from quartet.v1 import aligner_pb2
from services.common.errors import StageError

log = structlog.get_logger()
_MOST_S = 120.0  # of an answer; the words of longer ones are estimated
_TIMEOUT_S = 30.0


class WordTimer:
    """Of one session. An answer's words have no times before its sound is complete, nor if the aligner fails."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._tasks = set[asyncio.Task[None]]()

    @property
    def stage(self) -> Stage | None:
        """None: there is no aligner."""
        return self._gateway.pipeline.output("words")

    def takes(self, size: int, rate_hz: int) -> bool:
        """Whether an answer of `size` bytes of PCM16 can be timed."""
        return self.stage is not None and size <= _MOST_S * rate_hz * BYTES_PER_SAMPLE

    def time(self, item: Item, text: str, pcm16: bytes, rate_hz: int, speed: float) -> None:
        """Finds `item.words`, of an answer that is spoken `speed` times as fast as `pcm16`."""
        stage = self.stage
        if stage is not None and text.strip():
            task = asyncio.create_task(self._time(stage, item, text, pcm16, rate_hz, speed))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _time(self, stage: Stage, item: Item, text: str, pcm16: bytes, rate_hz: int, speed: float) -> None:
        resampled = await asyncio.to_thread(for_aligner, pcm16, rate_hz)
        request = aligner_pb2.AlignRequest(request_id=new_id("words"), pcm16=resampled, text=text)
        try:
            words = await word_times(stage, request, _TIMEOUT_S)
        except StageError as error:
            log.warning("an answer's words have no times", item_id=item.id, reason=str(error))
            return
        if not item.is_cut:
            middles = ((word.begin_ms + word.end_ms) / 2 / speed for word in words)
            item.words = [SpokenWord(word.text_end, at) for word, at in zip(words, middles, strict=True)]

    async def close(self) -> None:
        await cancel(*self._tasks)
