"""A dit that makes pictures."""

import numpy as np

from quartet.v1 import dit_pb2, dit_pb2_grpc, server_info_pb2, tensor_pb2
from tests.support.scripted.script import TIMINGS, Script

DIT_STEPS = 4
DRAWN_SEED = 99
DIT_THOUGHTS = "a boat, seen from the shore"  # in two pieces, if `think` is among the further arguments
PICTURES = server_info_pb2.DitInfo(
    tasks=[dit_pb2.DIT_TASK_TEXT_TO_IMAGE, dit_pb2.DIT_TASK_IMAGE_EDIT],
    pipeline="ScriptedPipeline",
    default_width=64,
    default_height=48,
    size_multiple=16,
    max_pixels=256 * 256,
    default_inference_steps=DIT_STEPS,
    max_inference_steps=50,
    default_guidance_scale=4,
    negative_prompt=True,
    max_images=3,
    mask=True,
    max_count=4,
    loras=["ink", "oil"],
    batched=True,
)


def picture_of(seed: int, width: int = 64, height: int = 48) -> np.ndarray:
    """What the scripted dit makes of a seed, smooth colours: (height, width, 3) uint8."""
    y, x = np.mgrid[0:height, 0:width]
    red, green = 255 * x // width, 255 * y // height
    return np.stack([red, green, np.full_like(x, 37 * seed % 256)], axis=-1).astype(np.uint8)


class Dit(dit_pb2_grpc.DitServiceServicer):
    """Makes pictures. The last output is sent first, each in two pieces."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def Generate(self, request_iterator, context):
        start = (await anext(request_iterator)).start
        files = [*start.images, *([start.mask] if start.HasField("mask") else []), *start.control_images]
        assert not any(file.data for file in files)
        received = 0
        while received < sum(file.size_bytes for file in files):
            chunk = (await anext(request_iterator)).media.data
            received += len(chunk)
            self.script.media += chunk
        seed = start.seed if start.HasField("seed") else DRAWN_SEED
        steps, count = start.num_inference_steps or DIT_STEPS, start.count or 1
        started = dit_pb2.DitStarted(seed=seed, count=count, num_inference_steps=steps)
        outputs = [dit_pb2.DitServiceGenerateResponse(started=started)]
        for text in (DIT_THOUGHTS[:7], DIT_THOUGHTS[7:]) if "think" in start.arguments else ():
            outputs.append(dit_pb2.DitServiceGenerateResponse(thoughts=dit_pb2.DitThoughts(text=text)))
        for step in range(1, steps + 1):
            for output in range(count):
                progress = dit_pb2.DitProgress(output=output, step=step, num_inference_steps=steps)
                outputs.append(dit_pb2.DitServiceGenerateResponse(progress=progress))
                if step <= start.previews:
                    preview = dit_pb2.DitPreview(
                        output=output, index=step - 1, step=step, pixels=_pixels(picture_of(1000 + step, 16, 12))
                    )
                    outputs.append(dit_pb2.DitServiceGenerateResponse(preview=preview))
        for output in reversed(range(count)):
            picture = picture_of(seed + output, start.width or 64, start.height or 48)
            for rows in (slice(0, 10), slice(10, None)):
                piece = dit_pb2.DitPiece(
                    output=output, first=rows.start, total=len(picture), data=_pixels(picture[rows])
                )
                outputs.append(dit_pb2.DitServiceGenerateResponse(piece=piece))
        facts = {"count": count, "steps": steps * count, "mean_batch": count}
        summary = dit_pb2.DitSummary(**facts, timings=TIMINGS)
        outputs.append(dit_pb2.DitServiceGenerateResponse(summary=summary))
        async for output in self.script.play(start, outputs, context):
            yield output


def _pixels(pixels: np.ndarray) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_UINT8, shape=pixels.shape, inline=pixels.tobytes())
