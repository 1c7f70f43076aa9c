"""How a text is to be said: the request, checked against what the talker can do."""

import torch

from quartet.v1 import talker_pb2
from services.common.errors import InvalidInput, require
from services.common.stream.tensors import to_torch
from services.common.text import match_case
from services.talker.family import TalkerFamily
from services.talker.inputs import Delivery, Voice
from services.talker.sampling import Sampling, resolve
from services.talker.voices import Voices

SHORTEST_SAMPLE_S, LONGEST_SAMPLE_S = 1, 30
MOST_CHARACTERS = 16_384  # of instructions, and of what is said in a sample: they are tokenized at once


def sampling_of(family: TalkerFamily, start: talker_pb2.SpeakStart) -> Sampling:
    """How to sample codec frames. Raises InvalidInput: a value out of range, or for a missing code predictor."""
    requested = {field.name: value for field, value in start.sampling.ListFields()}
    for name in requested if family.spec.predictor is None else ():
        if name.startswith("predictor_"):
            raise InvalidInput(f"sampling.{name}", "must be unset: this talker has no code predictor")
    return resolve(family.spec.defaults, **requested)


def speaker_of(family: TalkerFamily, start: talker_pb2.SpeakStart) -> str:
    """The voice in the checkpoint's spelling; "": a sample or instructions give it. Raises InvalidInput."""
    name, speakers = start.speaker, family.spec.speakers
    if start.text.HasField("voice_sample"):
        require(not name, "speaker", "must be unset beside text.voice_sample, whose voice it is")
        return ""
    if not speakers:
        require(not name, "speaker", "must be unset: this talker has no voices of its own")
        require(not family.sample_reader, "text.voice_sample", "is required: this talker has no voices of its own")
        return ""
    found = match_case(name, speakers) if name else speakers[0]
    if found is None:
        raise InvalidInput("speaker", f"there is no voice '{name}'; the voices are {', '.join(speakers)}")
    return found


async def delivery_of(
    family: TalkerFamily, voices: Voices | None, speaker: str, text: talker_pb2.SpokenText
) -> Delivery:
    """How `text` is to be said.

    Args:
        voices: hears voice samples; None: the talker imitates none.
        speaker: from `speaker_of`.
        text: the start of it.

    Raises:
        InvalidInput: the talker cannot do so.
    """
    for field, said in (("instructions", text.instructions), ("voice_sample.text", text.voice_sample.text)):
        reason = f"has {len(said)} characters; at most {MOST_CHARACTERS} are read"
        require(len(said) <= MOST_CHARACTERS, f"text.{field}", reason)
    if text.instructions and not family.takes_instructions:
        raise InvalidInput("text.instructions", "must be unset: this talker takes none")
    language = match_case(text.language, family.languages) or ""
    if text.language and not language:
        known = f"the languages are {', '.join(family.languages)}" if family.languages else "this talker has no choice"
        raise InvalidInput("text.language", f"'{text.language}' is not known; {known}")
    return Delivery(
        speaker=speaker,
        instructions=text.instructions,
        language=language,
        whole_text_first=text.whole_text_first if text.HasField("whole_text_first") else None,
        voice=await _voice_of(family, voices, text) if text.HasField("voice_sample") else None,
        sample_text=text.voice_sample.text.strip(),
    )


async def _voice_of(family: TalkerFamily, voices: Voices | None, text: talker_pb2.SpokenText) -> Voice:
    field = "text.voice_sample"
    if voices is None:
        raise InvalidInput(field, "must be unset: this talker imitates no voices")
    samples = to_torch(text.voice_sample.samples, f"{field}.samples")
    if samples.dtype != torch.float32 or samples.dim() != 1:
        raise InvalidInput(f"{field}.samples", "must be float32 of shape (samples,)")
    seconds = len(samples) / voices.sample_rate_hz
    if not SHORTEST_SAMPLE_S <= seconds <= LONGEST_SAMPLE_S:
        limits = f"{SHORTEST_SAMPLE_S} to {LONGEST_SAMPLE_S} s at {voices.sample_rate_hz} Hz"
        raise InvalidInput(f"{field}.samples", f"has {seconds:.2f} s, must have {limits}")
    require(samples.isfinite().all() and samples.abs().max() <= 1, f"{field}.samples", "must be numbers of -1 to 1")
    voice = await voices.voice(samples)
    if not voice.vector.isfinite().all():  # in a slot's cache, such numbers would spoil its next requests
        raise InvalidInput(f"{field}.samples", "no voice is heard in them")
    return voice
