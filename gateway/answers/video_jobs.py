"""Makes videos in the background, in order, a limited number at a time."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
import structlog

from gateway import metrics
from gateway.access.shared import SharedState
from gateway.answers.video_leases import VideoLeases
from gateway.answers.video_pieces import frames_of, samples_of
from gateway.answers.video_places import VideoPlaces
from gateway.answers.video_store import LeaseLost, VideoJob, VideoStore
from gateway.answers.video_task import VideoTask
from gateway.errors import ApiError, from_error
from gateway.media.encode import MAX_SIDE_PIXELS
from gateway.media.video_file import VideoFile
from gateway.pipeline.dit import Misfit, Pieces, generate, media_of
from gateway.pipeline.stage import Stage
from gateway.settings import GatewaySettings
from quartet.v1 import dit_pb2
from services.common.engine.process import lower_priority
from services.common.errors import DeadlineExceeded, InternalError, InvalidInput, QueueFull, StageError, Unavailable

Result = TypeVar("Result")

_MAX_SWEEP_INTERVAL_S = 60.0
_ORPHANS_S = 3600.0
_STORE_AGAIN_S = 5.0
_SHARED_WITHIN_S = 60.0  # a video took minutes to make: a place that is away for a moment does not cost it
_STAGE_AGAIN_S = 1.0
_BEFORE_FILE = 99  # percent: the steps are done, the file is not

log = structlog.get_logger()


class VideoJobs:
    """The jobs of an open store. Use as `async with VideoJobs(...)`.

    Args:
        shared: where all workers count those that are made; None: this is the only one.
    """

    def __init__(self, store: VideoStore, settings: GatewaySettings, shared: SharedState | None = None) -> None:
        self.store, self._settings = store, settings
        self._jobs: dict[str, VideoTask] = {}
        self._leases = VideoLeases(store, self._jobs)
        self._places = VideoPlaces(shared or SharedState(), settings.max_running_videos, settings.max_queued_videos)
        self._encoders = ThreadPoolExecutor(settings.max_running_videos, "video-file", lower_priority)
        self._closing = False

    async def __aenter__(self) -> "VideoJobs":
        self._keeping = asyncio.create_task(self._leases.keep())
        self._sweeping = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(self, *_) -> None:
        """Waits for running jobs, and fails the others as interrupted."""
        self._closing = True
        jobs = list(self._jobs.values())
        for job in jobs:
            if job.waits:
                job.cancel()
        if jobs:
            log.info("draining videos", running=sum(not job.waits for job in jobs), given_up=sum(j.waits for j in jobs))
            await asyncio.wait([job.task for job in jobs], timeout=self._settings.drain_timeout_s)
        self._sweeping.cancel()
        for job in jobs:
            job.cancel()
        await asyncio.gather(self._sweeping, *(job.task for job in jobs), return_exceptions=True)
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        self._encoders.shutdown()
        if jobs:
            with suppress(ApiError):  # which is logged; another gateway fails them then, when their leases are over
                await self.store.give_up()

    async def submit(
        self,
        video: VideoJob,
        stage: Stage,
        start: dit_pb2.DitStart,
        media: Sequence[bytes],
        on_end: Callable[[], object],
    ) -> None:
        """Accepts a job; once this returns, no crash can lose it.

        Args:
            start: its files have no data.
            media: the files of `media_of(start)`.
            on_end: called at the job's end, however it ends.

        Raises:
            QueueFull: too many wait.
            Unavailable: the gateway is stopping.
            ApiError: 503, the job cannot be counted now; 500 or 503, it cannot be stored.
        """
        if self._closing:
            raise Unavailable("the gateway is stopping; send the request to another one")
        self._places.take(video.id)
        job = self._jobs[video.id] = VideoTask(video, stage, start)
        job.task = asyncio.create_task(self._run(job))
        self.store.live[video.id] = video
        job.task.add_done_callback(lambda _: (self._jobs.pop(video.id, None), self.store.live.pop(video.id, None)))
        job.task.add_done_callback(lambda _: (self._places.give_back(video.id), on_end()))
        try:
            for path, file in zip(self.store.files.inputs(video.id), media, strict=False):
                # on disk: files of waiting jobs must not take the container's memory
                await asyncio.to_thread(path.write_bytes, file)
            await self.store.add(video)
        except BaseException:
            job.task.cancel()  # if there is a row nevertheless, nobody renews its lease
            await asyncio.to_thread(self.store.files.remove_unfinished, video.id)
            raise
        job.stored.set()

    async def delete(self, video_id: str, owner: str | None = None) -> bool:
        """Removes a job and its files, and cancels an unfinished one; another gateway's ends a second later. False: not
        found."""
        if await self.store.get(video_id, owner) is None:
            return False
        if job := self._jobs.get(video_id):
            job.cancel()
            await asyncio.wait([job.task])
        await self.store.remove(video_id)
        return True

    async def _sweep(self) -> None:
        loop, swept_s = asyncio.get_running_loop(), -float("inf")
        while True:
            try:
                await self.store.end_lost()
                if count := await self.store.remove_expired():
                    log.info("expired videos removed", count=count)
                if loop.time() - swept_s >= _ORPHANS_S:
                    await self.store.sweep()
                    swept_s = loop.time()
            except ApiError:
                pass  # the store has logged it, and may be there again next time
            except Exception:
                log.exception("expired videos could not be removed")
            await asyncio.sleep(min(_MAX_SWEEP_INTERVAL_S, self.store.ttl_s / 2))

    async def _run(self, job: VideoTask) -> None:
        await job.stored.wait()
        try:
            await self._places.reach_front(job.video.id)
            await self._bring_to_end(job)
        except LeaseLost:
            job.is_lost = True
        finally:
            if job.is_lost:
                log.warning("a video is not this gateway's any more", request_id=job.video.id)
                with suppress(ApiError):  # which is logged; a sweep removes it later
                    await self.store.files.remove(job.video.id)

    async def _bring_to_end(self, job: VideoTask) -> None:
        video = job.video
        began = time.monotonic()
        failure: ApiError | None = None
        try:
            await self._make_when_taken(job)
        except StageError as error:
            failure = from_error(job.stage.kind, error)
            if failure.param == "image":
                failure.rename("input_reference")
        except ApiError as error:  # of the shared place, which has logged it
            failure = error
        except OSError as error:  # most likely a full disk
            why = error.strerror or error  # its own text has the path
            failure = ApiError(500, f"the video could not be stored: {why}", None, "storage_failed")
            log.exception("video failed", request_id=video.id)
        except Exception:
            failure = from_error(job.stage.kind, InternalError("unexpected"))
            log.exception("video failed", request_id=video.id)
        if failure is not None:
            video.error_code, video.error_message = failure.code, failure.message
        await self._end(job, "completed" if failure is None else "failed")
        metrics.VIDEOS.labels(job.video.status).inc()
        duration_ms = round((time.monotonic() - began) * 1000, 1)
        ended = {"status": job.video.status, "code": video.error_code, "duration_ms": duration_ms}
        if failure is not None and "detail" in failure.log:
            ended["detail"] = failure.log["detail"]
        log.info("video", request_id=video.id, **ended)  # the id that the stage knows it by

    async def _end(self, job: VideoTask, status: Literal["completed", "failed"]) -> None:
        """Stores the end before clients see it, so that it holds after a crash. Raises LeaseLost."""
        job.ends = True
        now = time.time()
        ended = replace(job.video, status=status, expires_at=now + self.store.ttl_s)
        if status == "completed":
            ended.progress, ended.completed_at = 100, int(now)
        while True:
            try:
                await asyncio.to_thread(self.store.files.remove_unfinished, ended.id)
                await self.store.end(ended)
                break
            except (OSError, ApiError):  # a full disk may have room again, once the failed video's part is gone
                log.exception("the end of a video cannot be stored; trying again", request_id=ended.id)
                await asyncio.sleep(_STORE_AGAIN_S)
        job.video = ended

    async def _make_when_taken(self, job: VideoTask) -> None:
        """Asks again while the stage is full or down, and keeps its place: later jobs need the same stage."""
        paths = self.store.files.inputs(job.video.id)[: len(media_of(job.start))]
        media = [await asyncio.to_thread(path.read_bytes) for path in paths]
        while True:
            try:
                async with asyncio.timeout(self._settings.video_timeout_s):
                    await self._make(job, media)
                return
            except TimeoutError:
                limit = f"the video took longer than the {self._settings.video_timeout_s:g} s allowed"
                raise DeadlineExceeded(limit) from None
            except (QueueFull, Unavailable) as error:
                if not job.waits or isinstance(error, Misfit):  # lost while it worked on this, or for good
                    raise
                await asyncio.sleep(error.retry_after_s if isinstance(error, QueueFull) else _STAGE_AGAIN_S)

    async def _make(self, job: VideoTask, media: list[bytes]) -> None:
        video, file, timeout_s = job.video, None, self._settings.video_timeout_s
        try:
            total, sound = 0, Pieces()
            async with aclosing(generate(job.stage, job.start, media, timeout_s)) as responses:
                async for response in responses:
                    match response.WhichOneof("message"):
                        case "started":
                            video.status, video.seed = "in_progress", str(response.started.seed)
                        case "progress":
                            progress = response.progress
                            video.progress = _BEFORE_FILE * progress.step // max(1, progress.num_inference_steps)
                        case "piece" if response.piece.sample_rate_hz:
                            sound.add(response.piece)
                        case "piece":
                            frames, total = frames_of(response.piece), response.piece.total
                            if file is None:
                                file = await self._open(video, response.piece.frames_per_second, frames, sound)
                            await self._in_thread(file.add, frames)
            if file is None or file.frames != total:
                raise InternalError(f"the stage sent {file.frames if file else 0} of {total} frames")
            await self._in_thread(self._finish, video, file)
            await self._share(video.id)
        except BaseException:
            if file is not None:
                await self._in_thread(file.abandon)
            raise

    async def _open(self, video: VideoJob, frames_per_second: float, frames: np.ndarray, sound: Pieces) -> VideoFile:
        _, video.height, video.width, _ = frames.shape
        # the model chose the size, or it would have been refused before
        if max(video.width, video.height) > MAX_SIDE_PIXELS["H.264"]:
            raise InvalidInput("width", f"frames of {video.width}x{video.height} are too large for H.264")
        video.frames_per_second = frames_per_second
        picture = self.store.files.part(video.id), frames_per_second, video.width, video.height
        return await self._in_thread(lambda: VideoFile(*picture, samples_of(sound), sound.sample_rate_hz))

    def _finish(self, video: VideoJob, file: VideoFile) -> None:
        file.close()
        with file.path.open("rb") as written:
            os.fsync(written.fileno())
        self.store.files.finish(video.id)
        video.frames = file.frames

    async def _share(self, video_id: str) -> None:
        """Raises ApiError: the shared place cannot be used, or is away for too long."""
        until_s = asyncio.get_running_loop().time() + _SHARED_WITHIN_S
        while True:
            try:
                await self.store.files.share(video_id)
                return
            except ApiError as error:
                if error.status != 503 or asyncio.get_running_loop().time() >= until_s:
                    raise
                log.warning("a video cannot be put where all gateways find it; trying again", request_id=video_id)
                await asyncio.sleep(_STORE_AGAIN_S)

    async def _in_thread(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """The result of `call`. A cancellation waits for it: no two calls touch a file at once."""
        work = asyncio.get_running_loop().run_in_executor(self._encoders, call, *arguments)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise
