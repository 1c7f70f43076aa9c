"""A stage of one's own: paints a gradient for each prompt, and takes the place of the diffusion stage in a pipeline.

    python examples/own_stage.py 50054
    python -m gateway --port 8000 --pipeline gateway/pipelines/dit.yaml
    quartet image "anything" --url http://127.0.0.1:8000

A stage is a gRPC server with three services: one of a kind that pipelines know (here `DitService`),
`ServerInfoService`, and gRPC's health service under the name of the first. It may be written in any language: the
contract is `protos/quartet/v1`.
"""

import asyncio
import sys
import zlib

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from quartet.v1 import dit_pb2, dit_pb2_grpc, server_info_pb2, server_info_pb2_grpc, tensor_pb2

SIDE = 256  # pixels
INFO = server_info_pb2.GetServerInfoResponse(stage="dit", model="gradients")
INFO.dit.CopyFrom(
    server_info_pb2.DitInfo(
        tasks=[dit_pb2.DIT_TASK_TEXT_TO_IMAGE],
        pipeline="Gradients",
        default_width=SIDE,
        default_height=SIDE,
        size_multiple=16,
        max_pixels=1024 * 1024,
        default_inference_steps=1,
        max_inference_steps=1,
        max_count=4,
    )
)


class Gradients(dit_pb2_grpc.DitServiceServicer):
    """Answers with `started`, the picture of each output, and `summary`, as DitService asks for."""

    async def Generate(self, request_iterator, context):
        start = (await anext(request_iterator)).start
        if not start.request_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "request_id is required")
        count, seed = start.count or 1, start.seed if start.HasField("seed") else zlib.crc32(start.prompt.encode())
        started = dit_pb2.DitStarted(seed=seed, count=count, num_inference_steps=1, task=INFO.dit.tasks[0])
        yield dit_pb2.DitServiceGenerateResponse(started=started)
        for i in range(count):
            pixels = gradient((seed + i) % 256, start.width or SIDE, start.height or SIDE)
            data = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_UINT8, shape=pixels.shape, inline=pixels.tobytes())
            piece = dit_pb2.DitPiece(output=i, first=0, total=len(pixels), data=data)  # up to 4 MiB in one message
            yield dit_pb2.DitServiceGenerateResponse(piece=piece)
        yield dit_pb2.DitServiceGenerateResponse(summary=dit_pb2.DitSummary(count=count, steps=count, mean_batch=1))


def gradient(blue: int, width: int, height: int) -> np.ndarray:
    """Red from left to right, green from top to bottom: (height, width, 3) uint8."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([255 * x // width, 255 * y // height, np.full_like(x, blue)], axis=-1).astype(np.uint8)


class Info(server_info_pb2_grpc.ServerInfoServiceServicer):
    """What the gateway asks before it sends requests."""

    async def GetServerInfo(self, request, context):
        return INFO

    async def GetLoad(self, request, context):
        return server_info_pb2.GetLoadResponse(serving=True)


async def start(port: int) -> tuple[grpc.aio.Server, int]:
    """The running server, and its port: a free one if `port` is 0."""
    server = grpc.aio.server(options=[("grpc.max_send_message_length", 16 << 20)])
    dit_pb2_grpc.add_DitServiceServicer_to_server(Gradients(), server)
    server_info_pb2_grpc.add_ServerInfoServiceServicer_to_server(Info(), server)
    readiness = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
    await readiness.set("quartet.v1.DitService", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(readiness, server)
    bound_port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, bound_port


async def main(port: int) -> None:
    """Serves until it is interrupted."""
    server, bound_port = await start(port)
    print(f"listening on 127.0.0.1:{bound_port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50054))
