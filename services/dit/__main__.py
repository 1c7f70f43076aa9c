"""Starts the diffusion stage: `python -m services.dit --model DIR_OR_ID --port 50054`."""

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog
import torch

from quartet.v1 import dit_pb2, dit_pb2_grpc, server_info_pb2
from services.common.engine.process import keep_freed_memory
from services.common.stage import Stage, main
from services.diffusion.model_info import dit_info, warm_up_side
from services.diffusion.pipelines import silence_libraries
from services.diffusion.request import check, resolve
from services.dit.config import DitSettings
from services.dit.engine import DitEngine
from services.dit.models import Models
from services.dit.output import Done, Event, Failed
from services.dit.parallel_group import Group
from services.dit.parallel_worker import work
from services.dit.servicer import DitServicer

SERVICE = "quartet.v1.DitService"
WARM_UP_TIMEOUT_S = 900.0  # compiling blocks takes minutes
WARM_UP_STEPS = 2

log = structlog.get_logger()


async def serve(stage: Stage, settings: DitSettings) -> None:
    """Runs the stage until it is told to stop."""
    servicer = DitServicer(stage.admission, stage.consumer, settings)
    dit_pb2_grpc.add_DitServiceServicer_to_server(servicer, stage.grpc)
    await stage.serve(
        load=lambda: asyncio.to_thread(start_engine, settings, stage.fatal),
        warm_up=lambda engine: asyncio.to_thread(warm_up, engine, describe(engine.models, settings)),
        describe=lambda engine: stage.describe(
            str(engine.models.dtype), str(engine.models.device), dit=describe(engine.models, settings)
        ),
        bind=lambda engine, info: servicer.bind(engine, info.dit),
    )


def start_engine(settings: DitSettings, on_fatal: Callable[[Exception], object] = lambda error: None) -> DitEngine:
    """The engine of this stage, loaded as `settings` say; not warmed up. Blocks until it is loaded.

    Raises:
        ValueError: no such checkpoint, or settings that do not fit it.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    keep_freed_memory()
    # In a thread that ends. libgomp keeps workers for every thread that has computed, and when all workers together
    # are more than the cores, they no longer spin between operations: each then costs a wake-up, on two cores more
    # than the steps of a small model themselves. So only the engine's thread may have workers.
    group = Group(settings, work) if settings.parallel_devices > 1 else None
    with ThreadPoolExecutor(1, "dit-load") as loading:
        models = loading.submit(Models, settings, group=group).result()
    return DitEngine(models, settings.max_running_outputs, settings.max_batch, on_fatal)


def describe(models: Models, settings: DitSettings) -> server_info_pb2.DitInfo:
    """This stage's part of the server info."""
    info = dit_info(models, settings)
    info.loras.extend(models.lora_names)
    info.batched, info.not_batched = not models.unbatched, models.unbatched
    info.needs_source = settings.encoders == "stream"
    return info


def warm_up(engine: DitEngine, info: server_info_pb2.DitInfo) -> None:
    """Makes one small output, unless prompts come encoded; blocks until that is done.

    Raises:
        StageError: it failed.
        TimeoutError: it did not come back.
    """
    from PIL import Image

    log.info("loaded", pipeline=info.pipeline, tasks=[dit_pb2.DitTask.Name(task) for task in info.tasks])
    if info.needs_source:
        return

    side = warm_up_side(info)
    start = dit_pb2.DitStart(prompt="warm-up", seed=0, width=side, height=side, num_inference_steps=WARM_UP_STEPS)
    if info.frames_multiple:
        start.num_frames = info.frames_multiple + 1
    takes_image = info.tasks[0] in (dit_pb2.DIT_TASK_IMAGE_EDIT, dit_pb2.DIT_TASK_IMAGE_TO_VIDEO)
    images = [Image.new("RGB", (side, side), "gray")] if takes_image else []
    for _ in images:
        start.images.add()
    task = check(start, info)
    spec = resolve(start, task, images, None, engine.models, info).outputs[0]
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(spec, events.put)
    while True:
        try:
            event = events.get(timeout=WARM_UP_TIMEOUT_S)
        except queue.Empty:
            raise TimeoutError(f"the warm-up took more than {WARM_UP_TIMEOUT_S:g} s") from None
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Done):
            return


if __name__ == "__main__":
    loaded = DitSettings.load()
    silence_libraries()
    main(loaded, "dit", SERVICE, serve, streams=False)
