"""Videos in, and classes instead of prompts: what the dit makes of them is bit for bit what diffusers makes."""

# diffusers exports its classes lazily, which pyright does not take for an export:
# pyright: reportPrivateImportUsage=false

import io
from collections.abc import Sequence
from typing import Any

import av
import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from quartet.v1 import dit_pb2, media_pb2, server_info_pb2
from services.common.errors import InvalidInput, InvalidMedia
from services.diffusion.families import family_of
from services.diffusion.images import File, decode_files
from services.dit.__main__ import warm_up
from services.dit.config import DitSettings
from services.dit.models import load_pipeline
from tests.support.stage.dit_engine import bench, check_shared_steps, fresh
from tests.support.weights import unlisted
from tests.support.weights.checkpoints import diffusion_checkpoint
from tests.support.weights.unlisted import unlisted_checkpoint

VIDEO_TO_VIDEO = dit_pb2.DIT_TASK_VIDEO_TO_VIDEO
ASKED = ({"prompt": "a red fox", "seed": 1, "num_inference_steps": 4}, {"prompt": "x", "seed": 2})


def frames(count: int, width: int = 64, height: int = 48, first: int = 0) -> list[Image.Image]:
    grey = Image.radial_gradient("L").resize((width, height))
    turned = ([(each + 16 * i) % 256 for each in range(256)] for i in range(first, first + count))
    return [grey.point(table).convert("RGB") for table in turned]


def start_of(asked: dict[str, Any]) -> dit_pb2.DitStart:
    fields: dict[str, Any] = {"num_inference_steps": 3} | asked
    return dit_pb2.DitStart(**fields)


def diffusers_own(pipeline: Any, asked: dict[str, Any], **call: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": 3} | {name: value for name, value in asked.items() if name != "seed"} | call
    generator = torch.Generator("cpu").manual_seed(asked["seed"])
    return torch.as_tensor(pipeline(**call, generator=generator, output_type="np")[0][0])


def test_a_text_to_video_checkpoint_changes_videos_too() -> None:
    folder = diffusion_checkpoint("wan")
    clips = [frames(5), frames(9, first=3)]
    with bench(folder, default_size=None, max_batch=1) as dit:
        assert list(dit.info.tasks) == [dit_pb2.DIT_TASK_TEXT_TO_VIDEO, VIDEO_TO_VIDEO]
        assert (dit.info.continues_video, dit.info.control_video, dit.info.max_images) == (False, False, 0)
        orders = [dit.orders(start_of(asked), video=clip)[0] for asked, clip in zip(ASKED, clips, strict=True)]
        made = dit.finish(dit.submit_together(orders))
    for asked, clip, mine in zip(ASKED, clips, made, strict=True):
        pipeline = diffusers.WanVideoToVideoPipeline.from_pipe(fresh(folder))
        theirs = diffusers_own(pipeline, asked, video=clip, width=64, height=48)
        assert mine.shape == (len(clip), 48, 64, 3)
        assert torch.equal(mine, theirs)


def test_a_video_is_continued() -> None:
    folder, clip = unlisted_checkpoint(unlisted.ltx_condition), frames(9, 64, 64)
    with bench(folder, default_size=None, max_batch=1) as dit:
        assert VIDEO_TO_VIDEO in dit.info.tasks
        assert dit.info.continues_video
        asked = ASKED[0] | {"num_frames": 17}
        (order,) = dit.orders(start_of(asked), video=clip)
        (mine,) = dit.make([order])
    assert torch.equal(mine, diffusers_own(fresh(folder), asked, video=clip, width=64, height=64))
    assert len(mine) == 17


def test_a_control_net_reads_a_control_video() -> None:
    folder, net = unlisted_checkpoint(unlisted.animate_diff), str(unlisted_checkpoint(unlisted.control_net))
    clips = [frames(2), frames(2, first=5)]
    with bench(folder, controlnet=[net], default_size=None, max_batch=1) as dit:
        warm_up(dit.engine)
        assert (dit.info.pipeline, dit.info.control_video) == ("AnimateDiffControlNetPipeline", True)
        assert (dit.info.control_images, dit.info.one_at_a_time) == (0, "")
        with pytest.raises(InvalidInput, match="control_video: AnimateDiffControlNetPipeline needs one"):
            dit.orders(start_of(ASKED[0]))
        orders = [dit.orders(start_of(asked), control_video=clip)[0] for asked, clip in zip(ASKED, clips, strict=True)]
        made = dit.finish(dit.submit_together(orders))
    cls: Any = diffusers.AnimateDiffControlNetPipeline
    for asked, clip, mine in zip(ASKED, clips, made, strict=True):
        pipeline = cls.from_pretrained(folder, controlnet=diffusers.ControlNetModel.from_pretrained(net))
        theirs = diffusers_own(pipeline, asked, conditioning_frames=clip, num_frames=2, width=64, height=48)
        assert torch.equal(mine, theirs)


def test_several_control_nets_of_videos_are_refused() -> None:
    nets = [str(unlisted_checkpoint(unlisted.control_net)), str(unlisted_checkpoint(unlisted.further_control_net))]
    folder = unlisted_checkpoint(unlisted.animate_diff)
    with pytest.raises(ValueError, match=r"^controlnet: .*one control video.*give one net"):
        load_pipeline(DitSettings(model=str(folder), controlnet=nets), only_denoisers=False)


def test_pictures_of_a_class() -> None:
    folder = unlisted_checkpoint(unlisted.class_images)
    with bench(folder, default_size=None, max_batch=1) as dit:
        warm_up(dit.engine)
        assert (dit.info.classes, dit.info.one_at_a_time) == (1000, "")
        assert "class_labels" not in {each.name for each in dit.info.arguments}
        prompts = {"7": 7, " Cock": 7, "tench": 0, "999": 999}
        orders = [dit.orders(start_of({"prompt": prompt, "seed": 3}))[0] for prompt in prompts]
        made = dit.finish(dit.submit_together(orders))
        refusal = "prompt: must be the number of a class, 0 to 999, or its name, such as "
        for prompt in ("1000", "-1", "7 8", "kock"):
            with pytest.raises(InvalidInput, match=refusal):
                dit.orders(start_of({"prompt": prompt}))
    for number, mine in zip(prompts.values(), made, strict=True):
        assert torch.equal(mine, diffusers_own(fresh(folder), {"seed": 3}, class_labels=[number]))
    assert not torch.equal(made[0], made[2])
    with bench(folder, default_size=None) as dit:
        asked = [{"prompt": prompt, "seed": seed} for seed, prompt in enumerate(("7", "tench"))]
        check_shared_steps(dit, [dit.orders(start_of(each))[0] for each in asked])


def mp4(count: int, rate: int = 24, size: tuple[int, int] = (96, 64)) -> bytes:
    """Whose frame i is of the grey 10 * i."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": "1"})
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for i in range(count):
            grey = np.full((size[1], size[0], 3), 10 * i, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


INFO = server_info_pb2.DitInfo(
    tasks=[VIDEO_TO_VIDEO],
    frames_per_second=16,
    frames_multiple=4,
    max_frames=13,
    default_width=64,
    default_height=64,
    size_multiple=16,
    max_pixels=128 * 128,
)


def read(data: bytes, info: server_info_pb2.DitInfo = INFO, pixels: int = 10**6, **asked: Any) -> Sequence[Image.Image]:
    start = dit_pb2.DitStart(video=media_pb2.Media(), **asked)
    limits = DitSettings(model="x", max_request_video_pixels=pixels)
    return decode_files([File("video", "video", data)], start, info, limits).video


def greys(video: Sequence[Image.Image]) -> list[int]:
    return [round(np.asarray(frame).mean() / 10) for frame in video]


def test_frames_are_read_at_the_models_rate_in_the_videos_shape() -> None:
    video = read(mp4(18, rate=24))  # 0.75 s: 12 frames at 16 a second, of which 9 can be made
    assert greys(video) == [0, 1, 3, 4, 6, 7, 9, 10, 12]
    assert {frame.size for frame in video} == {(64, 48)}  # multiples of 16, of at most 64 x 64 pixels
    assert greys(read(mp4(6, rate=8))) == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    asked = read(mp4(18, rate=24), num_frames=5, width=32, height=96)
    assert (greys(asked), asked[0].size) == ([0, 1, 3, 4, 6], (32, 96))
    longer = server_info_pb2.DitInfo()
    longer.CopyFrom(INFO)
    longer.continues_video = True
    assert len(read(mp4(6, rate=16), longer, num_frames=13)) == 5


@pytest.mark.parametrize(
    ("data", "asked", "message"),
    [
        (mp4(18, rate=16), {}, "video: it has 18 frames at 16 a second; at most 13 are made: make it shorter, or say"),
        (
            mp4(18, rate=24),
            {"num_frames": 13},
            "video: it has 12 frames at 16 a second, fewer than the 13 of num_frames",
        ),
        (mp4(2, rate=16), {}, "video: it has 2 frames at 16 a second; at least 5 are needed"),
        (mp4(5, rate=16), {"pixels": 15_000}, "video: 5 frames of 64 x 48 are 15360 pixels; at most 15000 are taken"),
        (b"no video", {}, "video: "),
    ],
)
def test_videos_that_do_not_fit_are_refused(data: bytes, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidMedia) as refused:
        read(data, **asked)
    assert str(refused.value).startswith(message)


def test_two_videos_have_one_length() -> None:
    files = [File("video", "video", mp4(9, 16)), File("control_video", "quartet.dit.control_video", mp4(5, 16))]
    with pytest.raises(InvalidMedia, match=r"quartet\.dit\.control_video: has 5 frames, the video 9"):
        decode_files(files, dit_pb2.DitStart(video=media_pb2.Media()), INFO, DitSettings(model="x"))


def test_what_a_model_takes_no_video_for() -> None:
    with bench(unlisted_checkpoint(unlisted.animate_diff), default_size=None) as dit:
        start = dit_pb2.DitStart(prompt="x", control_video=media_pb2.Media())
        with pytest.raises(InvalidInput, match="control_video: AnimateDiffPipeline takes none"):
            dit.orders(start)
        with pytest.raises(InvalidInput, match="images: there are 1; AnimateDiffPipeline takes none"):
            dit.orders(dit_pb2.DitStart(prompt="x"), images=frames(1), video=frames(2))
        with pytest.raises(InvalidInput, match="video: is not taken by this task"):
            dit.orders(dit_pb2.DitStart(prompt="x", task=dit_pb2.DIT_TASK_TEXT_TO_VIDEO), video=frames(2))
        large = dit_pb2.DitStart(prompt="x", count=3)
        dit.info.max_video_pixels = 64 * 48 * 2 * 2
        with pytest.raises(InvalidInput, match="all frames together have 18432 pixels; at most 12288 are made"):
            dit.orders(large, video=frames(2))


def test_a_tensor_of_a_video_is_no_video() -> None:
    """Such classes take a form of their own, which nothing says."""
    with pytest.raises(ValueError, match="EasyAnimateControlPipeline needs something for its control_video"):
        family_of(diffusers.EasyAnimateControlPipeline)
