"""What a diffusion model's processes, dit and encoder, take of a GPU."""

from dataclasses import replace
from typing import Any

from cli.budget import CONTEXT_BYTES, GIB, MIB, Demand, Need, scaled
from cli.check import stage_settings
from cli.pipeline_sizes import read_pipeline
from services.sizes import PipelineSizes

DIT_STEP_BYTES = 3 * GIB  # activations of an image of 1024 x 1024 pixels, and of its decoding
ENCODER_STEP_BYTES = GIB
DIFFUSION_LARGE_BYTES = 2 * GIB  # pipelines with less take less for a step, down to a tenth
FEWER_OUTPUTS = (4, 2, 1)  # that a dit denoises at a time, where the default's contexts find no room


def dit_need(sizes: PipelineSizes, settings: Any, outputs: int | None = None) -> Need:
    """Of each GPU of a dit with these `DitSettings`.

    Args:
        outputs: that are denoised at a time; None: as it is set.
    """
    share = {"none": 1.0, "bitsandbytes-4bit": 0.3}.get(settings.quantization, 0.55)  # of the transformer's
    here = {
        name: int(size * share) if name.startswith("transformer") else size
        for name, size in sizes.weights.items()
        if settings.encoders == "own" or name in sizes.beside_encoder
    }
    resident = {"none": sum(here.values()), "model": max(here.values(), default=0)}.get(settings.offload, 0)
    if sizes.context is not None and resident:  # its parts share weights, and are moved together
        resident = sum(here.values())
    step = scaled(DIT_STEP_BYTES, sum(here.values()), DIFFUSION_LARGE_BYTES)
    kept, note = settings.encoding_cache_mib * MIB, f"encodings that are kept, {settings.encoding_cache_mib} MiB"
    if (context := sizes.context) is not None:
        count: int = outputs or settings.max_running_outputs
        step += context.of_step(min(count, settings.max_batch))
        kept += count * context.of_output
        note = (
            f"contexts of {count} outputs at a time (--max-running-outputs), {context.of_output / GIB:.1f} GiB each: "
            f"{context.what}, {context.tokens} tokens in {context.branches} branches; {note}"
        )
    return Need(resident, CONTEXT_BYTES + step, kept, note)


def encoder_need(sizes: PipelineSizes, settings: Any) -> Need:
    """Of the GPU of an encoder with these `EncoderSettings`. It encodes one prompt at a time."""
    resident = sum(size for name, size in sizes.weights.items() if name in sizes.of_encoder)
    step = scaled(ENCODER_STEP_BYTES, resident, DIFFUSION_LARGE_BYTES)
    kept, note = settings.encoding_cache_mib * MIB, f"encodings that are kept, {settings.encoding_cache_mib} MiB"
    if (context := sizes.context) is not None:
        size = 2 * context.tokens * context.per_token  # what is read goes behind it into a new tensor
        kept, note = kept + size, f"a context of {context.tokens} tokens, and the one that becomes it; {note}"
    return Need(resident, CONTEXT_BYTES + step, kept, note)


def with_outputs(demand: Demand, sizes: PipelineSizes, dit: Any, outputs: int | None) -> Demand:
    """With a dit of these settings that denoises so many outputs at a time; None: as many as are set."""
    counted = (outputs or dit.max_running_outputs) if sizes.context is not None else None
    return replace(demand, fixed={**demand.fixed, "dit": dit_need(sizes, dit, outputs)}, dit_outputs=counted)


def dit_loads(demand: Demand, model: str, outputs: int | None) -> list[Demand]:
    """With a dit of default settings, the load to be preferred first. Raises BudgetError.

    Args:
        outputs: that it denoises at a time; None: up to the default.
    """
    sizes, settings = read_pipeline(model), stage_settings("dit", model, ())
    if outputs is not None:
        return [with_outputs(demand, sizes, settings, outputs)]
    return fewer_outputs(with_outputs(demand, sizes, settings, None), sizes, settings)


def fewer_outputs(demand: Demand, sizes: PipelineSizes, dit: Any) -> list[Demand]:
    """`demand`, and those with fewer outputs at a time, if these take less."""
    fewer = FEWER_OUTPUTS if demand.dit_outputs is not None else ()
    return [demand, *(with_outputs(demand, sizes, dit, count) for count in fewer)]
