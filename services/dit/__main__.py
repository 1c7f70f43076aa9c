"""Starts the diffusion stage: `python -m services.dit --model DIR_OR_ID --port 50054`."""

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog
from google.protobuf.json_format import MessageToDict

from quartet.v1 import dit_pb2, dit_pb2_grpc, server_info_pb2
from services.common.engine.process import keep_freed_memory
from services.common.errors import StageError
from services.common.stage import Stage, main
from services.diffusion.model_info import warm_up_output
from services.diffusion.pipelines import silence_libraries
from services.dit.config import DitSettings
from services.dit.engine import DitEngine
from services.dit.models import Models
from services.dit.output import Done, Event, Failed
from services.dit.servicer import DitServicer

SERVICE = "quartet.v1.DitService"
WARM_UP_TIMEOUT_S = 900.0  # compiling blocks takes minutes
SIDES_TO_TRY = (1, 4)  # of small outputs, in multiples of the least

log = structlog.get_logger()


async def serve(stage: Stage, settings: DitSettings) -> None:
    """Runs the stage until it is told to stop."""
    servicer = DitServicer(stage.admission, stage.consumer, settings)
    dit_pb2_grpc.add_DitServiceServicer_to_server(servicer, stage.grpc)
    stage.resources.callback(servicer.decoders.close)

    async def start() -> server_info_pb2.GetServerInfoResponse:
        engine = await stage.load(asyncio.to_thread(start_engine, settings, stage.fatal))
        await asyncio.to_thread(warm_up, engine)
        servicer.engine = engine
        models = engine.models
        models.keep_encodings("dit", settings.encoding_cache_mib)
        return stage.describe(str(models.dtype), str(models.device), dit=models.info)

    await stage.serve(start)


def start_engine(settings: DitSettings, on_fatal: Callable[[BaseException], object] = lambda error: None) -> DitEngine:
    """The engine of this stage, not warmed up. Blocks until it is loaded.

    Raises:
        ValueError: no such checkpoint, or settings that do not fit it.
    """
    keep_freed_memory()
    # In a thread that ends. libgomp keeps workers for every thread that has computed, and when all workers together
    # are more than the cores, they no longer spin between operations: each then costs a wake-up, on two cores more
    # than the steps of a small model themselves. So only the engine's thread may have workers.
    with ThreadPoolExecutor(1, "dit-load") as loading:
        models = loading.submit(_load_models, settings).result()
    return DitEngine(models, settings, on_fatal)


def _load_models(settings: DitSettings) -> Models:
    if settings.parallel_devices == 1:
        return Models(settings)
    from services.dit.context_parallel.group import ParallelModels

    return ParallelModels(settings)


def warm_up(engine: DitEngine) -> None:
    """Makes one small output, unless prompts come encoded; of a pipeline that no row is about two, alone and in turns.
    Blocks.

    Raises:
        StageError: it failed.
        ValueError: that of a pipeline without a row failed, or the pipeline cannot be served.
        TimeoutError: it took too long.
    """
    info = engine.models.info
    log.info("loaded", pipeline=info.pipeline, tasks=[dit_pb2.DitTask.Name(task) for task in info.tasks])
    if info.needs_source:
        return
    if not engine.models.family.listed:
        found = MessageToDict(info, preserving_proto_field_name=True)
        found["arguments"] = [each.name for each in info.arguments]
        log.info("served by what the pipeline says of itself: no row is about its class", **found)
        reason = _check_turns(engine)
        log.info("checked two outputs alone and in turns", equal=not reason, one_at_a_time=reason)
        return
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(warm_up_output(engine.models, info), events.put)
    try:
        while not isinstance(event := events.get(timeout=WARM_UP_TIMEOUT_S), Done):
            if isinstance(event, Failed):
                raise event.error
    except queue.Empty:
        raise TimeoutError(f"the warm-up took more than {WARM_UP_TIMEOUT_S:g} s") from None


def _check_turns(engine: DitEngine) -> str:
    """As `DitEngine.check_turns`, of small outputs; of larger ones if they fail, as a class may have a kernel that is
    larger than they are. Raises ValueError."""
    models, info = engine.models, engine.models.info
    failed: StageError | None = None
    for times in (1,) if info.sample_rate_hz else SIDES_TO_TRY:
        try:
            one, other, like = (warm_up_output(models, info, number, times) for number in range(3))
            return engine.check_turns([one, other], like)
        except StageError as error:
            failed = failed or error
    raise ValueError(f"{info.pipeline} is not served: no small output of it can be made: {failed}") from failed


if __name__ == "__main__":
    loaded = DitSettings.load()
    silence_libraries()
    main(loaded, "dit", SERVICE, serve, streams=False)
