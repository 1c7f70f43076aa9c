"""A scripted dit stage that makes videos and sound, and a gateway in front of it."""

import asyncio
import io
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import av
import grpc
import httpx
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cli.plan import DIT_PIPELINE as PIPELINE
from cli.supervisor import free_ports
from gateway.app import create_app
from gateway.pipeline.config import load_pipeline
from gateway.pipeline.dit import media_of
from gateway.pipeline.kinds import KINDS
from gateway.settings import GatewaySettings
from quartet.v1 import dit_pb2, dit_pb2_grpc, server_info_pb2, server_info_pb2_grpc, tensor_pb2
from services.common.rpc import channels
from tests.support.scripted.script import TIMINGS, Script
from tests.support.systems.gateway import HEALTH_TIMEOUT_S, clients, serving

MODEL = "scripted-video"
STEPS = 5
FPS = 16.0
RATE_HZ = 44100
DRAWN_SEED = 4711
VIDEO_INFO = server_info_pb2.DitInfo(
    tasks=[dit_pb2.DIT_TASK_TEXT_TO_VIDEO, dit_pb2.DIT_TASK_IMAGE_TO_VIDEO],
    default_width=64,
    default_height=48,
    size_multiple=16,
    max_pixels=256 * 256,
    default_inference_steps=STEPS,
    max_inference_steps=50,
    default_guidance_scale=5,
    negative_prompt=True,
    max_images=1,
    max_count=1,
    default_frames=9,
    max_frames=33,
    frames_multiple=4,
    frames_per_second=FPS,
    loras=["film"],
)
SOUND_INFO = server_info_pb2.DitInfo(
    tasks=[dit_pb2.DIT_TASK_TEXT_TO_AUDIO],
    default_inference_steps=STEPS,
    max_inference_steps=50,
    negative_prompt=True,
    max_count=1,
    default_audio_s=0.5,
    max_audio_s=47,
    sample_rate_hz=RATE_HZ,
)


def frames_of(start: dit_pb2.DitStart) -> np.ndarray:
    """What the stage makes of `start`: smooth colours that move, (frames, height, width, 3) uint8."""
    width, height = start.width or VIDEO_INFO.default_width, start.height or VIDEO_INFO.default_height
    y, x = np.mgrid[0:height, 0:width]
    frames = []
    for i in range(start.num_frames or VIDEO_INFO.default_frames):
        frames.append(np.stack([x * 255 // width, y * 255 // height, np.full_like(x, 20 * i % 256)], axis=-1))
    return np.stack(frames).astype(np.uint8)


def samples_of(start: dit_pb2.DitStart) -> np.ndarray:
    """What the stage makes of `start`: a tone on the left, another on the right, (samples, 2) float32."""
    samples = max(1, int((start.audio_s or SOUND_INFO.default_audio_s) * RATE_HZ))
    time_s = np.arange(samples) / RATE_HZ
    left, right = np.sin(2 * np.pi * 440 * time_s), 0.5 * np.sin(2 * np.pi * 880 * time_s)
    return np.stack([left, right], axis=-1).astype(np.float32)


def _pieces(whole: np.ndarray, rows: int) -> list[dit_pb2.DitServiceGenerateResponse]:
    dtype = tensor_pb2.DATA_TYPE_UINT8 if whole.dtype == np.uint8 else tensor_pb2.DATA_TYPE_FLOAT32
    result = []
    for first in range(0, len(whole), rows):
        part = whole[first : first + rows]
        piece = dit_pb2.DitPiece(
            first=first,
            total=len(whole),
            data=tensor_pb2.Tensor(dtype=dtype, shape=part.shape, inline=part.tobytes()),
            frames_per_second=FPS if whole.ndim == 4 else 0,
            sample_rate_hz=RATE_HZ if whole.ndim == 2 else 0,
        )
        result.append(dit_pb2.DitServiceGenerateResponse(piece=piece))
    return result


class ScriptedDit(dit_pb2_grpc.DitServiceServicer, server_info_pb2_grpc.ServerInfoServiceServicer):
    """The stage. Responses are: started, a progress for each of STEPS steps, pieces, summary.

    Attributes:
        script: what it does; to be changed by tests.
        info: what it says of itself.
        most: calls it had at a time.
    """

    def __init__(self, info: server_info_pb2.DitInfo) -> None:
        self.script, self.info, self.running, self.most, self.address = Script(), info, 0, 0, ""

    async def Generate(self, request_iterator, context):
        start = (await anext(request_iterator)).start
        received = bytearray()
        while len(received) < sum(file.size_bytes for file in media_of(start)):
            received += (await anext(request_iterator)).media.data
        self.script.media += received
        sound = dit_pb2.DIT_TASK_TEXT_TO_AUDIO in self.info.tasks
        started = dit_pb2.DitStarted(
            seed=start.seed if start.HasField("seed") else DRAWN_SEED, count=1, num_inference_steps=STEPS
        )
        responses = [dit_pb2.DitServiceGenerateResponse(started=started)]
        for step in range(1, STEPS + 1):
            progress = dit_pb2.DitProgress(step=step, num_inference_steps=STEPS)
            responses.append(dit_pb2.DitServiceGenerateResponse(progress=progress))
        if sound or self.info.soundtrack_rate_hz:
            responses += _pieces(samples_of(start), 10_000)
        if not sound:
            responses += _pieces(frames_of(start), 4)
        summary = dit_pb2.DitSummary(count=1, steps=STEPS, timings=TIMINGS, mean_batch=1)
        responses.append(dit_pb2.DitServiceGenerateResponse(summary=summary))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            async for response in self.script.play(start, responses, context):
                yield response
        finally:
            self.running -= 1

    async def GetServerInfo(self, request, context):
        return server_info_pb2.GetServerInfoResponse(stage="dit", model=MODEL, dit=self.info)

    async def GetLoad(self, request, context):
        return server_info_pb2.GetLoadResponse(running=self.running, serving=True)


@asynccontextmanager
async def scripted_dit(info: server_info_pb2.DitInfo) -> AsyncIterator[ScriptedDit]:
    """A running stage."""
    stage, server = ScriptedDit(info), grpc.aio.server(options=channels.SERVER_OPTIONS)
    dit_pb2_grpc.add_DitServiceServicer_to_server(stage, server)
    server_info_pb2_grpc.add_ServerInfoServiceServicer_to_server(stage, server)
    health_servicer = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
    await health_servicer.set(KINDS["dit"].service, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    stage.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield stage
    finally:
        await server.stop(grace=None)


class Client:
    """HTTP and OpenAI clients of a gateway."""

    def __init__(self, url: str, stage: ScriptedDit, jobs_dir: Path) -> None:
        self.url, self.stage, self.script, self.jobs_dir = url, stage, stage.script, jobs_dir
        self.http, self.openai = clients(url)

    async def reset(self) -> None:
        """As it was when it had started, without the videos that were made: for the next test."""
        self.script.go_on()
        for video in (await self.http.get("/v1/videos")).json().get("data", []):
            await self.http.delete(f"/v1/videos/{video['id']}")
        await self.script.reset()
        self.stage.most = 0

    async def close(self) -> None:
        await self.http.aclose()
        await self.openai.close()

    async def until(self, condition, timeout_s: float = 60) -> None:
        """Waits until `condition()`, a coroutine function's result or a plain one, is true."""
        async with asyncio.timeout(timeout_s):
            while True:
                result = condition()
                if await result if asyncio.iscoroutine(result) else result:
                    return
                await asyncio.sleep(0.01)

    async def video(self, video_id: str) -> dict:
        response = await self.http.get(f"/v1/videos/{video_id}")
        assert response.status_code == 200, response.text
        return response.json()

    async def reaches(self, video_id: str, status: str) -> dict:
        async def there() -> bool:
            return (await self.video(video_id))["status"] == status

        await self.until(there)
        return await self.video(video_id)

    async def refusal(self, path: str, body: dict) -> tuple[int, str | None, str]:
        """(status, param, message) of a refused request."""
        response = await self.http.post(path, json=body)
        error = response.json()["error"]
        return response.status_code, error["param"], error["message"]


async def create(client: Client, **more) -> str:
    """Id of a new video."""
    response = await client.http.post("/v1/videos", json={"model": MODEL, "prompt": "a boat"} | more)
    assert response.status_code == 200, response.text
    return response.json()["id"]


def decode_mp4(file: bytes) -> tuple[np.ndarray, float]:
    """Frames (n, height, width, 3) of an H.264 MP4, and its frames a second."""
    with av.open(io.BytesIO(file)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])  # pyright: ignore[reportAttributeAccessIssue]
        assert stream.average_rate
        return frames, float(stream.average_rate)


@asynccontextmanager
async def gateway_before(stage: ScriptedDit, jobs_dir: Path, **settings) -> AsyncIterator[Client]:
    """A gateway in this process."""
    settings = {"drain_timeout_s": 1, "health_timeout_s": HEALTH_TIMEOUT_S, **settings}
    loaded = GatewaySettings(pipeline=PIPELINE, jobs_dir=jobs_dir, **settings)
    app = create_app(loaded, load_pipeline(PIPELINE, {"dit": stage.address}))
    async with serving(app, loaded) as url:
        client = Client(url, stage, jobs_dir)
        await client.until(lambda: app.state.gateway.pipeline.ready)
        try:
            yield client
        finally:
            await client.close()


@asynccontextmanager
async def gateway_process(
    stage: ScriptedDit, jobs_dir: Path, **settings
) -> AsyncIterator[tuple[Client, asyncio.subprocess.Process]]:
    """A gateway in a process of its own. Raises RuntimeError, with its output, if it ends before it listens."""
    (port,) = free_ports(1)
    flags = {"pipeline": PIPELINE, "stage": f"dit={stage.address}", "port": port, "jobs-dir": jobs_dir, **settings}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway"),
        *(part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout
    output = asyncio.create_task(process.stdout.read())
    client = Client(f"http://127.0.0.1:{port}", stage, jobs_dir)

    async def ready() -> bool:
        if process.returncode is not None:
            raise RuntimeError((await output).decode())
        try:
            return (await client.http.get("/ready")).status_code == 200
        except httpx.TransportError:
            return False

    try:
        await client.until(ready, timeout_s=120)
        yield client, process
    finally:
        await client.close()
        if process.returncode is None:
            process.kill()
        await process.wait()
        await output
