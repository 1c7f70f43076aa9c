"""Control images: what the dit makes with ControlNets and T2I adapters is bit for bit what diffusers makes."""

# diffusers exports its classes lazily, which pyright does not take for an export:
# pyright: reportPrivateImportUsage=false

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image

from quartet.v1 import dit_pb2
from services.common.errors import InvalidInput
from services.dit.__main__ import warm_up
from services.dit.config import DitSettings
from services.dit.models import load_pipeline
from services.dit.output import Done
from tests.support.stage.dit_engine import Bench, bench, check_shared_steps
from tests.support.weights import unlisted
from tests.support.weights.checkpoints import diffusion_checkpoint
from tests.support.weights.unlisted import unlisted_checkpoint

SMALL: dict[str, Any] = {"width": 64, "height": 48, "num_inference_steps": 2}
EDGES = Image.radial_gradient("L").resize((64, 48)).convert("RGB")
DEPTHS = Image.linear_gradient("L").resize((64, 48)).convert("RGB")
PICTURE = Image.linear_gradient("L").rotate(90).resize((64, 48)).convert("RGB")

NETS, ADAPTERS = [unlisted.control_net, unlisted.further_control_net], [unlisted.adapter] * 2


def net(build: Callable[[], Any]) -> str:
    return str(unlisted_checkpoint(build))


def stable_diffusion() -> Path:
    return unlisted_checkpoint(unlisted.stable_diffusion)


def diffusers_own(name: str, nets: Sequence[str], seed: int, **call: Any) -> torch.Tensor:
    cls: Any = getattr(diffusers, name)
    loaded = [diffusers.AutoModel.from_pretrained(each) for each in nets]
    part = {"adapter" if "Adapter" in name else "controlnet": loaded if len(loaded) > 1 else loaded[0]}
    pipeline = cls.from_pretrained(stable_diffusion(), **part)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.as_tensor(pipeline(**call, generator=generator, output_type="np")[0][0])


@pytest.fixture(scope="module")
def nets() -> list[str]:
    return [net(each) for each in NETS]


@pytest.fixture(scope="module")
def dit(nets: list[str]) -> Iterator[Bench]:
    with bench(stable_diffusion(), controlnet=nets, default_size=None, max_batch=1) as started:
        warm_up(started.engine)
        yield started


def test_two_nets_beside_a_checkpoint_alone_and_in_turns(dit: Bench, nets: list[str]) -> None:
    assert (dit.info.pipeline, dit.info.control_images) == ("StableDiffusionControlNetPipeline", 2)
    assert (list(dit.info.denoisers), dit.info.one_at_a_time) == (["unet", "controlnet"], "")
    assert (dit.info.max_images, dit.info.mask) == (1, True)  # by the classes for edits
    further = {"controlnet_conditioning_scale": [0.5, 1.5], "control_guidance_end": [0.5, 1.0]}
    cases = [
        ({"prompt": "a red fox", "seed": 1}, [EDGES, DEPTHS], {}),
        ({"prompt": "a house", "seed": 2}, [DEPTHS, EDGES], further),
    ]
    fields = [SMALL | asked | {"arguments": json.dumps(more)} for asked, _, more in cases]
    orders = [
        dit.orders(dit_pb2.DitStart(**each), controls=controls)[0]
        for each, (_, controls, _) in zip(fields, cases, strict=True)
    ]
    theirs = [
        diffusers_own("StableDiffusionControlNetPipeline", nets, **SMALL | asked, image=controls, **more)
        for asked, controls, more in cases
    ]
    for mine, their in zip(dit.finish(dit.submit_together(orders)), theirs, strict=True):
        assert torch.equal(mine, their)
    (swapped,) = dit.orders(dit_pb2.DitStart(**fields[0]), controls=[DEPTHS, EDGES])
    assert not torch.equal(dit.make([swapped])[0], theirs[0])  # which net reads which image


@pytest.mark.parametrize("builds", [NETS, ADAPTERS], ids=["ControlNets", "adapters"])
def test_requests_of_other_control_images_share_steps(builds: list[Callable[[], Any]]) -> None:
    with bench(stable_diffusion(), controlnet=[net(each) for each in builds], default_size=None) as dit:
        orders = [
            dit.orders(
                dit_pb2.DitStart(**SMALL | {"prompt": prompt, "seed": steps, "num_inference_steps": steps}),
                controls=[EDGES.rotate(90 * steps), DEPTHS.rotate(90 * steps)],
            )[0]
            for prompt, steps in (("a red fox", 2), ("a house by the sea", 4), ("x", 3))
        ]
        check_shared_steps(dit, orders)


def test_edits_have_control_images_too(dit: Bench, nets: list[str]) -> None:
    mask = Image.new("L", PICTURE.size, 0)
    mask.paste(255, (0, 0, 32, 48))
    size = {"width": 64, "height": 48}
    asked = {"prompt": "a fox", "seed": 3, "num_inference_steps": 4}
    cases: list[tuple[str, Any, dict[str, Any]]] = [("Img2Img", None, {}), ("Inpaint", mask, {"mask_image": mask})]
    for word, hole, given in cases:
        name = f"StableDiffusionControlNet{word}Pipeline"
        their = diffusers_own(name, nets, **asked, **size, image=PICTURE, control_image=[EDGES, DEPTHS], **given)
        (spec,) = dit.orders(dit_pb2.DitStart(**asked), [PICTURE], hole, [EDGES, DEPTHS])
        assert torch.equal(dit.make([spec])[0], their)


def test_without_a_size_it_is_that_of_the_control_image(dit: Bench) -> None:
    large = EDGES.resize((83, 50))
    (spec,) = dit.orders(dit_pb2.DitStart(prompt="x", num_inference_steps=2), controls=[large, large])
    assert dit.make([spec])[0].shape == (48, 80, 3)  # sizes are multiples of 8


@pytest.mark.parametrize("count", [0, 1, 3])
def test_there_are_as_many_as_nets(dit: Bench, count: int) -> None:
    with pytest.raises(InvalidInput, match="StableDiffusionControlNetPipeline needs 2") as caught:
        dit.orders(dit_pb2.DitStart(prompt="x"), controls=[EDGES] * count)
    assert caught.value.field == "control_images"


def test_a_class_without_a_net_takes_none() -> None:
    with bench(stable_diffusion()) as dit, pytest.raises(InvalidInput, match="takes none"):
        dit.orders(dit_pb2.DitStart(prompt="x"), controls=[EDGES])


def test_an_adapter() -> None:
    nets = [net(unlisted.adapter)]
    their = diffusers_own("StableDiffusionAdapterPipeline", nets, 1, prompt="a fox", **SMALL, image=EDGES)
    with bench(stable_diffusion(), controlnet=nets, default_size=None, max_batch=1) as dit:
        warm_up(dit.engine)
        (spec,) = dit.orders(dit_pb2.DitStart(prompt="a fox", seed=1, **SMALL), controls=[EDGES])
        assert torch.equal(dit.make([spec])[0], their)


def test_a_class_that_draws_from_torchs_global_state_keeps_to_its_seed() -> None:
    """Stable Diffusion 3 encodes a control image to a sample, whatever generator it is given."""
    base = diffusion_checkpoint("sd3")

    def sd3_control_net() -> Any:
        transformer = diffusers.SD3Transformer2DModel.from_pretrained(base, subfolder="transformer")
        return diffusers.SD3ControlNetModel.from_config(transformer.config, num_layers=1)

    nets = [net(sd3_control_net)]
    asked: list[dict[str, Any]] = [
        SMALL | {"prompt": "a fox", "seed": 1, "height": 64},
        SMALL | {"prompt": "a house", "seed": 2, "height": 64, "num_inference_steps": 4},
    ]
    loaded = diffusers.AutoModel.from_pretrained(nets[0])
    plain: Any = diffusers.StableDiffusion3ControlNetPipeline.from_pretrained(base, controlnet=loaded)
    plain.set_progress_bar_config(disable=True)
    theirs = []
    for each in asked:
        call = {name: value for name, value in each.items() if name != "seed"}
        torch.manual_seed(each["seed"])
        generator = torch.Generator("cpu").manual_seed(each["seed"])
        made = plain(**call, control_image=EDGES, generator=generator, output_type="np")
        theirs.append(torch.as_tensor(made[0][0]))
    with bench(base, controlnet=nets, default_size=None) as dit:
        orders = [dit.orders(dit_pb2.DitStart(**each), controls=[EDGES])[0] for each in asked]
        assert all(map(torch.equal, dit.finish(dit.submit_together(orders)), theirs))
        warm_up(dit.engine)
        assert dit.info.one_at_a_time == ""


def test_a_net_of_several_kinds_is_told_which() -> None:
    sdxl = unlisted_checkpoint(unlisted.stable_diffusion_xl)
    with bench(sdxl, controlnet=[net(unlisted.union_control_net)], default_size=None) as dit:
        warm_up(dit.engine)
        assert dit.info.pipeline == "StableDiffusionXLControlNetUnionPipeline"
        asked = dit_pb2.DitStart(prompt="x", **SMALL)
        with pytest.raises(InvalidInput, match="is required: the kind of control image") as caught:
            dit.orders(asked, controls=[EDGES])
        assert caught.value.field == "arguments.control_mode"
        made = []
        for mode in (0, 2):
            asked.arguments = json.dumps({"control_mode": mode})
            del asked.control_images[:]
            made += dit.make(dit.orders(asked, controls=[EDGES]))
        assert not torch.equal(*made)
        assert isinstance(dit.log[-1][1], Done)


def test_what_is_no_net_of_the_checkpoint_is_said_before_weights_are_read(tmp_path: Path, nets: list[str]) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "LuminaPipeline"}))  # there are no weights
    cases = [
        (str(tmp_path), nets, "diffusers has no LuminaControlNetPipeline, which would call a ControlNetModel"),
        (str(stable_diffusion()), [nets[0], net(unlisted.adapter)], "ControlNetModel and T2IAdapter cannot be in one"),
        (str(stable_diffusion()), [str(tmp_path / "none")], "none is neither a directory nor"),
        (str(stable_diffusion()), [str(stable_diffusion())], "is neither a directory nor"),
    ]
    for model, controlnet, reason in cases:
        with pytest.raises(ValueError, match=f"controlnet: .*{reason}"):
            load_pipeline(DitSettings(model=model, controlnet=controlnet), only_denoisers=False)
