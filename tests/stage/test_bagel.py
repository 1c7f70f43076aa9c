"""BAGEL makes what our plain reference makes: in the dit, alone and among others, and with an encoder beside it."""

import io
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from prometheus_client import REGISTRY

from cli.tiny import make_checkpoint
from quartet.v1 import dit_pb2, media_pb2
from services.common.errors import InvalidInput
from services.dit.output import Done, Encoded, Failed, Preview, Progress, Thoughts
from services.encoder.config import EncoderSettings
from services.encoder.engine import EncoderEngine
from tests.stage.test_dit_encoder import handed_over, joined, serving, shared_memory
from tests.support.references.bagel import Bagel, Settings
from tests.support.stage.dit_engine import Bench, Watched, bench
from tests.support.stage.streaming import reading
from tests.support.weights.checkpoints import diffusion_checkpoint

ALONE, SHARED = 1e-5, 1e-4
GUARD_S = 300.0
THINKS = Settings(points=2, max_tokens=6)
EDIT: dict[str, Any] = {"image_scale": 2.0, "interval": (0.0, 1.0), "renorm": "text_channel"}


def picture(seed: int, size: tuple[int, int]) -> Image.Image:
    """Larger or smaller than the model reads it."""
    coarse = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


WIDE, HIGH = picture(1, (250, 100)), picture(2, (70, 90))


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return diffusion_checkpoint("bagel")


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Bagel:
    return Bagel(checkpoint)


@pytest.fixture(scope="module")
def dit(checkpoint: Path) -> Iterator[Bench]:
    with bench(checkpoint, default_size=None) as started:
        yield started


def order(dit: Bench, prompt: str, images: Sequence[Image.Image] = (), further: Any = None, **fields: Any) -> Any:
    arguments = json.dumps(further or {})
    (made,) = dit.orders(dit_pb2.DitStart(prompt=prompt, arguments=arguments, **fields), images)
    return made


def wanted(plain: Bagel, given: Any, seed: int, steps: int, size: Any = (64, 64), think: bool = False, **s: Any) -> Any:
    """`size`: (height, width)."""
    return plain.make(given, think=think, size=size, seed=seed, settings=Settings(points=steps + 1, **s))[1]


def test_alone_and_among_others(dit: Bench, plain: Bagel) -> None:
    small: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 4}
    thinks = {"think": True, "max_think_tokens": 8}
    orders = [
        order(dit, "a red fox", seed=1, **small),
        order(dit, "the quiet train leaves at seven, and a longer text", seed=2, guidance_scale=6.0, **small),
        order(dit, "a red fox", seed=3, width=128, height=32, num_inference_steps=6),
        order(dit, "make it blue", [WIDE], seed=4, **small),
        order(dit, "join them", [HIGH, WIDE], seed=5, **small),
        order(dit, "a red fox", further=thinks, seed=1, **small),
        order(dit, "make it blue", [WIDE], thinks, seed=4, **small),
    ]
    theirs = [
        wanted(plain, ["a red fox"], 1, 4),
        wanted(plain, ["the quiet train leaves at seven, and a longer text"], 2, 4, text_scale=6.0),
        wanted(plain, ["a red fox"], 3, 6, (32, 128)),
        edit(plain, [WIDE, "make it blue"], 4),
        edit(plain, [HIGH, WIDE, "join them"], 5),
        wanted(plain, ["a red fox"], 1, 4, think=True, max_tokens=8),
        edit(plain, [WIDE, "make it blue"], 4, think=True, max_tokens=8),
    ]
    shown = [(theirs[i] - theirs[j]).abs().max() for i, j in ((0, 1), (0, 5), (3, 6))]
    assert min(shown) > 100 * SHARED  # prompts and thoughts
    for mine, their in zip((dit.make([each])[0] for each in orders), theirs, strict=True):
        torch.testing.assert_close(mine, their, atol=ALONE, rtol=0)
    thoughts = plain.make(["a red fox"], think=True, settings=Settings(points=2, max_tokens=8), size=(64, 64))[0]
    watched = dit.submit_together(orders)
    for mine, their in zip(dit.finish(watched), theirs, strict=True):
        torch.testing.assert_close(mine, their, atol=SHARED, rtol=0)
    assert all(max(each.batches) == len(orders) for each in watched)
    assert thoughts
    assert [thoughts_of(each) == thoughts for each in watched] == [i == 5 for i in range(len(orders))]
    assert [bool(thoughts_of(each)) for each in watched] == [i >= 5 for i in range(len(orders))]


def thoughts_of(watched: Watched) -> str:
    """All of them, of pieces that each begin with the one before."""
    pieces = [event.text for event in watched.events if isinstance(event, Thoughts)]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(pieces))
    return pieces[-1] if pieces else ""


def edit(plain: Bagel, given: Any, seed: int, think: bool = False, **s: Any) -> torch.Tensor:
    """At 64 x 64, where the published program takes the picture's size."""
    whole = Settings(points=5, **EDIT, **s)
    made = AtSize(plain).make(given, think=think, seed=seed, settings=whole)[1]
    assert made is not None
    return made


class AtSize(Bagel):
    """Draws at 64 x 64, whatever is given."""

    def __init__(self, other: Bagel) -> None:
        vars(self).update(vars(other))

    def draw(self, whole: Any, no_text: Any, no_image: Any, size: Any, generator: Any, s: Settings) -> torch.Tensor:
        return super().draw(whole, no_text, no_image, (64, 64), generator, s)


@pytest.mark.parametrize(
    ("further", "settings"),
    [
        ({"guidance_renorm": "text_channel"}, {"renorm": "text_channel"}),
        ({"guidance_renorm": "channel", "guidance_renorm_min": 0.9}, {"renorm": "channel", "renorm_min": 0.9}),
        ({"image_guidance_scale": 1.0}, {"image_scale": 1.0}),
        ({"guidance_interval": [0.5, 0.8], "timestep_shift": 1.0}, {"interval": (0.5, 0.8), "shift": 1.0}),
    ],
)
def test_further_arguments(dit: Bench, plain: Bagel, further: Any, settings: Any) -> None:
    strong = 20.0  # so that guided velocities are longer than others
    small: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 4, "seed": 7, "guidance_scale": strong}
    (mine,) = dit.make([order(dit, "a red fox", further=further, **small)])
    theirs = wanted(plain, ["a red fox"], 7, 4, text_scale=strong, **settings)
    torch.testing.assert_close(mine, theirs, atol=ALONE, rtol=0)
    (other,) = dit.make([order(dit, "a red fox", **small)])
    assert (mine - other).abs().max() > 10 * ALONE


def test_an_edit_has_the_pictures_size_and_text_alone_the_largest(dit: Bench, plain: Bagel) -> None:
    (mine,) = dit.make([order(dit, "make it blue", [WIDE], num_inference_steps=2, seed=3)])
    theirs = wanted(plain, [WIDE, "make it blue"], 3, 2, **EDIT)
    assert mine.shape == (80, 192, 3)
    torch.testing.assert_close(mine, theirs, atol=ALONE, rtol=0)
    assert (dit.info.default_width, dit.info.default_height, dit.info.default_inference_steps) == (192, 192, 49)


def test_no_dimension_of_the_other_checkpoint_is_taken_for_granted(tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path, 3, "small", "bagel")
    plain = Bagel(other)
    with bench(other, default_size=None) as dit:
        small: dict[str, Any] = {"width": 48, "height": 32, "num_inference_steps": 2, "seed": 1}
        mine = dit.make([order(dit, "a red fox", **small), order(dit, "blue", [HIGH], num_inference_steps=2, seed=2)])
        (spoken,) = dit.make(dit.orders(*talk(TALK, num_inference_steps=2, seed=3)))
    torch.testing.assert_close(mine[0], wanted(plain, ["a red fox"], 1, 2, (32, 48)), atol=SHARED, rtol=0)
    torch.testing.assert_close(mine[1], wanted(plain, [HIGH, "blue"], 2, 2, **EDIT), atol=SHARED, rtol=0)
    torch.testing.assert_close(spoken, wanted(plain, TALK, 3, 2, **EDIT), atol=ALONE, rtol=0)


TALK = ["a red fox", WIDE, "make it blue", HIGH, "join them"]  # the last is the prompt


def talk(given: Sequence[Any], **fields: Any) -> tuple[dit_pb2.DitStart, list[Image.Image]]:
    """A request whose context is `given`, but for the prompt, its last."""
    pictures = [each for each in given if not isinstance(each, str)]
    start = dit_pb2.DitStart(prompt=given[-1], **fields)
    for each in given[:-1]:
        start.context.add(**({"text": each} if isinstance(each, str) else {"image": pictures.index(each)}))
    return start, pictures


def test_a_conversation_before_the_prompt(dit: Bench, plain: Bagel) -> None:
    small: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 4, "seed": 3}
    thinks = json.dumps({"think": True, "max_think_tokens": 8})
    cases = [(TALK, ""), (TALK, thinks), (["a boat", "at sea"], ""), ([WIDE, "a hill", "blue"], ""), (TALK[2:], "")]
    orders = [dit.orders(*talk(given, arguments=further, **small))[0] for given, further in cases]
    more = [order(dit, "a red fox", **small), order(dit, "make it blue", [WIDE], **small)]
    theirs: list[Any] = [
        edit(plain, given, 3, think=bool(further), max_tokens=8) if any(map(is_picture, given)) else None
        for given, further in cases
    ]
    theirs[2] = wanted(plain, ["a boat", "at sea"], 3, 4)
    theirs += [wanted(plain, ["a red fox"], 3, 4), edit(plain, [WIDE, "make it blue"], 3)]
    for mine, their in zip((dit.make([each])[0] for each in orders), theirs, strict=False):
        torch.testing.assert_close(mine, their, atol=ALONE, rtol=0)
    watched = dit.submit_together([*orders, *more])
    for mine, their in zip(dit.finish(watched), theirs, strict=True):
        torch.testing.assert_close(mine, their, atol=SHARED, rtol=0)
    assert max(watched[0].batches) > 1
    assert (theirs[0] - edit(plain, [WIDE, HIGH, "join them"], 3)).abs().max() > 100 * SHARED  # its texts


def is_picture(part: Any) -> bool:
    return not isinstance(part, str)


def test_pictures_that_no_part_is_are_read_before_the_prompt(dit: Bench, plain: Bagel) -> None:
    start = dit_pb2.DitStart(prompt="join them", seed=3, num_inference_steps=2)
    start.context.add(image=1)
    start.context.add(text="a red fox")
    (mine,) = dit.make(dit.orders(start, [WIDE, HIGH]))
    theirs = wanted(plain, [HIGH, "a red fox", WIDE, "join them"], 3, 2, **EDIT)
    torch.testing.assert_close(mine, theirs, atol=ALONE, rtol=0)


def test_the_next_turn_reads_only_what_is_new_and_makes_the_same_bits(checkpoint: Path) -> None:
    small: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 2, "seed": 3}
    turns = [TALK[:1], TALK[:3], TALK]
    with bench(checkpoint) as dit:
        anew = [dit.make(dit.orders(*talk(each, **small)))[0] for each in turns]
        dit.engine.models.keep_encodings("dit", 64)
        reader, calls, counts = dit.engine.models.pipeline.text_encoder, list[Any](), list[int]()
        reader.register_forward_pre_hook(lambda module, args: calls.append(args))
        for each, theirs in zip(turns, anew, strict=True):
            calls.clear()
            assert torch.equal(dit.make(dit.orders(*talk(each, **small)))[0], theirs)
            counts.append(len(calls))
    # text; picture (latents, patches), text, and that text without the picture; the same of the second
    assert counts == [1, 4, 4]


BAD_CONTEXTS: list[tuple[list[dict[str, Any]], str, str]] = [
    ([{"text": "a"}] * 257, "context", "has 257 parts; at most 256"),
    ([{"text": "a"}, {"text": ""}], "context[1].text", "is empty"),
    ([{"image": 2}], "context[0].image", "is 2; images has 2"),
    ([{"image": 0}, {"text": "a"}, {"image": 0}], "context[2].image", "earlier part"),
    ([{"text": "a"}, {}], "context[1]", "no text and no image"),
    ([{"text": "fox " * 1000}] * 3, "context", "tokens with the prompt; at most 2048"),
    ([{"text": "x" * 65_530}], "context", "characters with the prompt; at most 65536"),
]


@pytest.mark.parametrize(("parts", "field", "words"), BAD_CONTEXTS)
def test_a_bad_context_is_refused_by_its_part(dit: Bench, parts: list[dict[str, Any]], field: str, words: str) -> None:
    start = dit_pb2.DitStart(prompt="a red fox", context=[dit_pb2.ContextPart(**part) for part in parts])
    with pytest.raises(InvalidInput, match=words) as caught:
        dit.orders(start, [WIDE, HIGH])
    assert caught.value.field == field


def test_a_context_is_a_field_and_no_further_argument(dit: Bench) -> None:
    assert dit.info.reads_context
    assert "context" not in [each.name for each in dit.info.arguments]
    with pytest.raises(InvalidInput) as caught:
        order(dit, "a", further={"context": ["a"]})
    assert caught.value.field == "arguments.context"


def test_thoughts_come_as_they_are_written_without_half_a_character(dit: Bench, plain: Bagel) -> None:
    further = {"think": True, "max_think_tokens": 40}
    watched = dit.submit(order(dit, "a red fox", further=further, num_inference_steps=2, width=64, height=64))
    dit.finish([watched])
    whole = plain.make(["a red fox"], think=True, size=(64, 64), settings=Settings(points=2, max_tokens=40))[0]
    *pieces, last = [event.text for event in watched.events if isinstance(event, Thoughts)]
    assert last == whole
    assert len(set(pieces)) > 5
    assert all(whole.startswith(piece) and not piece.endswith("\ufffd") for piece in pieces)
    kinds = [type(event) for event in watched.events]
    assert kinds.index(Progress) > max(i for i, kind in enumerate(kinds) if kind is Thoughts)


def test_previews(dit: Bench) -> None:
    small: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 5, "seed": 1, "previews": 2}
    watched = dit.submit(order(dit, "a red fox", **small))
    dit.finish([watched])
    shapes = [event.pixels.shape for event in watched.events if isinstance(event, Preview)]
    assert shapes == [(64, 64, 3)] * 2


def test_others_go_on_while_one_thinks_and_it_thinks_once_for_all_its_outputs(dit: Bench) -> None:
    small: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 2}
    further = json.dumps({"think": True, "max_think_tokens": 60})
    thinker = dit_pb2.DitStart(prompt="a red fox", seed=1, count=2, arguments=further, **small)
    orders = [*dit.orders(thinker), order(dit, "a boat", seed=2, **small)]
    reader, calls = dit.engine.models.pipeline.text_encoder, list[Any]()
    hook = reader.register_forward_pre_hook(lambda module, args: calls.append(args))
    watched = dit.submit_together(orders)
    dit.finish(watched)
    hook.remove()
    assert thoughts_of(watched[0]) == thoughts_of(watched[1])
    assert 60 < len(calls) < 70  # once: instructions, prompt, 60 tokens, the thoughts; and the other's prompt
    order_of = [(each, type(event)) for each, event in dit.log]
    assert order_of.index((watched[2], Done)) < min(order_of.index((each, Encoded)) for each in watched[:2])


def test_a_thought_is_cut_off_when_nobody_wants_it(dit: Bench) -> None:
    small: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 2}
    further = json.dumps({"think": True, "max_think_tokens": 900})
    thinker = dit_pb2.DitStart(prompt="a red fox", seed=1, count=2, arguments=further, **small)
    first, second = (dit.submit(each) for each in dit.orders(thinker))
    reader, calls = dit.engine.models.pipeline.text_encoder, list[Any]()

    def count(module: Any, args: Any) -> None:
        calls.append(args)
        if len(calls) == 20:
            dit.engine.cancel(first.output)
            dit.engine.cancel(second.output)

    hook = reader.register_forward_pre_hook(count)
    end = time.monotonic() + GUARD_S
    while len(calls) < 20 or dit.engine._running:
        assert time.monotonic() < end
        time.sleep(0.001)
    hook.remove()
    assert len(calls) == 20


@pytest.mark.parametrize("given", [[], [HIGH, WIDE]])
async def test_two_processes_make_what_one_makes(
    checkpoint: Path, dit: Bench, plain: Bagel, given: list[Image.Image]
) -> None:
    start = dit_pb2.DitStart(
        request_id="r", prompt="a red fox", seed=5, num_inference_steps=3, count=2, width=64, height=64
    )
    with_thoughts(start, given)
    whole = dit.make(dit.orders(start, given))
    with bench(checkpoint, encoders="stream") as streamed:
        assert streamed.info.needs_source
        assert {each.device.type for each in streamed.engine.models.pipeline.text_encoder.parameters()} == {"meta"}
        async with serving(checkpoint, streamed) as pair:
            responses = await handed_over(pair, start)
    made = joined(responses)
    assert len(made) == 2
    thoughts = [i for i, each in enumerate(responses) if each.HasField("thoughts")]
    assert max(thoughts) < min(i for i, each in enumerate(responses) if each.HasField("progress"))
    assert (
        "".join(responses[i].thoughts.text for i in thoughts)
        == plain.make([*given, "a red fox"], think=True, size=(64, 64), settings=THINKS)[0]
    )
    for mine, theirs in zip(made, whole, strict=True):
        torch.testing.assert_close(mine, theirs, atol=SHARED, rtol=0)


def edit_of_a_conversation() -> dit_pb2.DitStart:
    """With thoughts, two outputs, and its pictures in it."""
    start, pictures = talk(TALK, request_id="r", seed=5, num_inference_steps=3, count=2, width=64, height=64)
    with_thoughts(start, pictures)
    return start


def with_thoughts(start: dit_pb2.DitStart, pictures: Sequence[Image.Image]) -> None:
    """Adds the files of its pictures, and what makes floats of thoughts."""
    start.arguments = json.dumps({"think": True, "max_think_tokens": 6})
    start.pixel_format = dit_pb2.PIXEL_FORMAT_FLOAT32
    for each in pictures:
        file = io.BytesIO()
        each.save(file, "PNG")
        start.images.add(kind=media_pb2.MEDIA_KIND_IMAGE, data=file.getvalue())


async def test_a_conversation_goes_from_process_to_process_by_each_transport(checkpoint: Path, dit: Bench) -> None:
    start, pictures = edit_of_a_conversation(), talk(TALK)[1]
    whole = dit.make(dit.orders(start, pictures))
    made = []
    with bench(checkpoint, encoders="stream") as streamed, shared_memory() as arena:
        for transport in (None, arena):
            async with serving(checkpoint, streamed, transport) as pair:
                made.append(joined(await handed_over(pair, start)))
    inline, shared = made
    assert len(inline) == len(shared) == len(whole) == 2
    for mine, other, theirs in zip(inline, shared, whole, strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, theirs, atol=SHARED, rtol=0)


@pytest.mark.skipif(not find_spec("ucxx"), reason="needs ucxx: pip install 'quartet[ucx]'")
async def test_a_conversation_goes_from_process_to_process_by_ucx(checkpoint: Path) -> None:
    from services.common.stream.ucx import UcxTransport
    from tests.support.stage.ucx import ARENAS, connected, working

    start = edit_of_a_conversation()
    with bench(checkpoint, encoders="stream") as streamed:
        async with serving(checkpoint, streamed) as pair:
            inline = joined(await handed_over(pair, start))
        before = sent_bytes("ucx")
        with working() as producer, working() as consumer, reading(ARENAS, "inline", ucx=consumer):
            producer.peer(consumer.address)
            await connected(producer)
            async with serving(checkpoint, streamed, UcxTransport(producer, 1)) as pair:
                made = joined(await handed_over(pair, start))
        assert sent_bytes("ucx") > before
    assert len(made) == len(inline) == 2
    for mine, other in zip(made, inline, strict=True):
        assert torch.equal(mine, other)


def sent_bytes(transport: str) -> float:
    """All that producers in this process have sent by it."""
    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    wanted = (s.value for s in samples if s.name.endswith("stream_bytes_total") and s.labels["transport"] == transport)
    return sum(wanted)


def test_the_encoder_has_no_denoiser(checkpoint: Path) -> None:
    engine = EncoderEngine(EncoderSettings(model=str(checkpoint)))
    parts = engine.models.pipeline.components
    assert {name: next(parts[name].parameters()).device.type for name in ("text_encoder", "transformer", "vae")} == {
        "text_encoder": "cpu",
        "transformer": "meta",
        "vae": "meta",
    }
    assert not engine.draws_prior_tokens


BAD: list[tuple[dict[str, Any], Any, str, str]] = [
    ({"width": 40, "height": 64}, None, "width", "a multiple of 16 pixels"),
    ({"width": 208, "height": 64}, None, "width", "at most 192 pixels"),
    ({"images": 9}, None, "images", "there are 9; at most 8"),
    ({"negative_prompt": "fog"}, None, "negative_prompt", "takes none"),
    ({"prompt": "fox " * 3000}, None, "prompt", "at most 2048"),
    ({}, {"guidance_renorm": "local"}, "arguments.guidance_renorm", "one of global, channel, text_channel"),
    ({}, {"guidance_interval": [0.9, 0.4]}, "arguments.guidance_interval", "two times from 0 to 1"),
    ({}, {"guidance_interval": [0.4]}, "arguments.guidance_interval", "tuple"),
    ({}, {"guidance_renorm_min": 2.0}, "arguments.guidance_renorm_min", "0 to 1"),
    ({}, {"timestep_shift": 0.0}, "arguments.timestep_shift", "over 0"),
    ({}, {"max_think_tokens": 0}, "arguments.max_think_tokens", "at least 1"),
    ({}, {"think": "yes"}, "arguments.think", "bool"),
]


@pytest.mark.parametrize(("fields", "further", "field", "words"), BAD)
def test_a_request_that_cannot_be_made_is_refused_by_its_field(
    dit: Bench, fields: dict[str, Any], further: Any, field: str, words: str
) -> None:
    given = [WIDE] * fields.get("images", 0)
    asked = {"prompt": "a", "num_inference_steps": 2} | {key: fields[key] for key in fields if key != "images"}
    with pytest.raises(InvalidInput, match=words) as caught:
        make_or_fail(dit, given, further, asked)
    assert caught.value.field == field


def make_or_fail(dit: Bench, given: Sequence[Image.Image], further: Any, asked: dict[str, Any]) -> None:
    """Raises what refuses the request, before it is in the engine or there."""
    watched = dit.submit(order(dit, images=given, further=further, **asked))
    dit.wait(lambda: bool(watched.events) and isinstance(watched.events[-1], Failed))
    last = watched.events[-1]
    assert isinstance(last, Failed)
    raise last.error
