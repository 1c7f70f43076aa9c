"""Every tensor of the published checkpoints has its place in our models, with the right shape, and none is missing; the
budget counts their bytes.

The names and shapes are those of the references at published sizes.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from services.families.qwen3_tts.budget import CODEC_BYTES
from services.families.qwen3_tts.voice_sample import SPEAKER_PREFIX, new_codec_encoder, new_speaker_encoder
from services.registry import Family, family_of
from services.talker.family import TEXT_EMBEDDINGS
from services.talker.model import TalkerModel, published_parameters
from tests.rehearsal.published import NAMES, SIZES, TTS_WIDTHS, codec_config, config
from tests.rehearsal.support.models import talker_spec
from tests.rehearsal.support.published_tensors import Shapes, codec_tensors, sizes_in_bytes, tensors
from tests.support.weights.published_sizes import PUBLISHED

pytestmark = pytest.mark.long
OMNI = tuple(name for name in NAMES if name not in TTS_WIDTHS)

# What others have counted in the published files, and the sizes of files with a header of some hundred bytes a tensor.
PARAMETERS = {"qwen3-omni-30b": 35_259_818_545, "qwen2.5-omni-7b": 10_732_225_408}
TENSORS = {"qwen3-omni-30b": 28_010, "qwen3-tts-0.6b": 478}
FILES = {"qwen3-tts-1.7b": 3_857_413_744, "qwen3-tts-0.6b": 1_829_344_272}
CODEC_PARAMETERS, CODEC_FILE = 170_557_441, 682_293_092


def family(name: str) -> Family:
    return family_of(config(name))


def differences(found: Shapes, wanted: Shapes) -> dict[str, Any]:
    """(found, wanted) shapes by name, where they differ."""
    names = {*found, *wanted}
    return {name: (found.get(name), wanted.get(name)) for name in names if found.get(name) != wanted.get(name)}


def shapes(of: Mapping[str, torch.Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in of.items()}


def elements(of: Shapes) -> int:
    return sum(map(math.prod, of.values()))


def header_bytes(file_bytes: int, of: Shapes, element_bytes: int) -> float:
    """Bytes a tensor of what is not values."""
    return (file_bytes - element_bytes * elements(of)) / len(of)


@pytest.mark.parametrize("name", NAMES)
def test_the_references_have_what_the_published_files_have(name: str):
    """Of Qwen2.5-Omni-3B nothing is known."""
    found = tensors(name)
    assert elements(found) == PARAMETERS.get(name, elements(found))
    assert len(found) == TENSORS.get(name, len(found))
    if name in FILES:
        assert 100 < header_bytes(FILES[name], found, 2) < 150


def test_the_reference_codec_has_what_the_published_file_has():
    assert elements(codec_tensors()) == CODEC_PARAMETERS
    assert 100 < header_bytes(CODEC_FILE, codec_tensors(), 4) < 150


@pytest.mark.parametrize("name", NAMES)
def test_the_talker_reads_every_tensor_of_its_own(name: str):
    spec, names = talker_spec(name), family(name).part("talker").WEIGHTS
    assert spec.text_projection is not None
    with torch.device("meta"):
        wanted = dict(shapes(published_parameters(TalkerModel(spec))))
    wanted[TEXT_EMBEDDINGS] = spec.text_vocab, spec.text_projection.inputs
    found = {own: shape for tensor, shape in tensors(name).items() if (own := names.parameter_of(tensor))}
    assert differences(found, wanted) == {}
    assert names.stored_dtype_of in tensors(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_decoder_reads_every_tensor_of_its_own(name: str):
    part = family(name).part("code2wav")
    stated, stored = (codec_config(), codec_tensors()) if name in TTS_WIDTHS else (config(name), tensors(name))
    with torch.device("meta"):
        decoder: nn.Module = part.new_decoder(stated)
    found = {own: shape for tensor, shape in stored.items() if (own := part.parameter_of(tensor))}
    assert differences(found, shapes(decoder.state_dict())) == {}


@pytest.mark.parametrize("name", TTS_WIDTHS)
def test_the_encoders_of_voice_samples_read_every_tensor_of_their_own(name: str):
    with torch.device("meta"):
        speaker = new_speaker_encoder(config(name)["speaker_encoder_config"])
        codec = new_codec_encoder(codec_config()["encoder_config"])
    for module, prefix, stored in ((speaker, SPEAKER_PREFIX, tensors(name)), (codec, "encoder.", codec_tensors())):
        own = {tensor.removeprefix(prefix): shape for tensor, shape in stored.items() if tensor.startswith(prefix)}
        assert differences(own, shapes(module.state_dict())) == {}


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_has_a_stage(name: str):
    spoken = family(name).part("talker").WEIGHTS.parameter_of
    decoded = (lambda tensor: None) if name in TTS_WIDTHS else family(name).part("code2wav").parameter_of
    others = ("thinker.",) if name in OMNI else (SPEAKER_PREFIX,)
    left = [each for each in tensors(name) if not (spoken(each) or decoded(each) or each.startswith(others))]
    assert left == []


@pytest.mark.parametrize("name", NAMES)
def test_the_budget_counts_every_byte(name: str):
    """As sizes of the published models are stated. Those of Qwen2.5-Omni leave out what tensor parallelism does not
    split, and the codec's is rounded up."""
    spec, stated = talker_spec(name), PUBLISHED[SIZES[name]]
    counted = family(name).part("budget").sizes(config(name), sizes_in_bytes(name))
    if name in TTS_WIDTHS:
        codec = counted.weights["code2wav"]
        assert codec <= CODEC_BYTES == stated.weights["code2wav"] <= 1.02 * codec
        stated = dataclasses.replace(stated, weights={**stated.weights, "code2wav": codec})
    elif name != "qwen3-omni-30b":
        stated = dataclasses.replace(stated, unsplit=counted.unsplit)
    assert asdict(counted) == asdict(stated)
    layers = spec.talker
    assert counted.text_table == 2 * spec.text_vocab * layers.hidden
    assert counted.talker_kv_per_position == 2 * 2 * layers.layers * layers.kv_heads * layers.head_dim
