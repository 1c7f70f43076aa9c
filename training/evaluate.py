"""Scores the checkpoints on held-out data, by the reference implementations."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from training import tools
from training.conversations import MOST_QUESTIONS, draw_conversation
from training.dialogue import Dialogue
from training.espeak import say
from training.export import MODELS, OMNI, PAINTER
from training.functions import HELD_OUT_NAMES
from training.hearing import draw_voice, sound_of
from training.judges import Listener, find_shape, held_out_answers, mel_cepstral_distance, plain
from training.paintings import Painter
from training.prompts import ImagePrompt, draw_edit, draw_image_prompt, draw_seen
from training.scene_questions import about, seeing
from training.scenes import SIDE
from training.units import RATE_HZ as SPEECH_HZ
from training.units import VOICES
from training.world import KINDS, draw_dialogue, nonsense, weather

COUNT = 300
SAMPLES = 5
_BATCH = 20


class ReferenceOmni:
    """The reference's model and processor."""

    def __init__(self, folder: Path = MODELS / OMNI) -> None:
        import transformers

        model: Any = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self.model: Any = model.eval()
        self.processor: Any = transformers.Qwen3OmniMoeProcessor.from_pretrained(folder)

    def answers(self, dialogues: Sequence[Dialogue], aloud: bool, sounds: list[np.ndarray]) -> list[str]:
        """Greedy answers to dialogues, in one batch; `aloud`: users' turns are `sounds`."""
        texts = [
            self.processor.apply_chat_template(
                conversation(each, aloud), tools=list(each.tools) or None, add_generation_prompt=True, tokenize=False
            )
            for each in dialogues
        ]
        images = [image for each in dialogues for image in _images(each)]
        inputs = self.processor(
            text=texts,
            images=images or None,
            audio=sounds or None,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        eos = self.processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
        with torch.inference_mode():
            ids = self.model.thinker.generate(**inputs, do_sample=False, max_new_tokens=96, eos_token_id=eos)
        said = ids[:, inputs["input_ids"].shape[1] :]
        return [text.strip() for text in self.processor.batch_decode(said, skip_special_tokens=True)]

    def speech(self, answer: str, voice: str) -> np.ndarray:
        """Synthesizes `answer` greedily: (samples,) float32."""
        tokens = self.processor.tokenizer
        template = self.processor.apply_chat_template(
            [{"role": "user", "content": "Well?"}], add_generation_prompt=True, tokenize=False
        )
        prompt = tokens(template, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            _, wave = ForcedThinker(self.model, tokens.encode(f"{answer}<|im_end|>")).generate(
                input_ids=prompt, speaker=voice, talker_do_sample=False, talker_repetition_penalty=1.0
            )
        return wave.flatten().numpy()


class ForcedThinker:
    """The reference's model with a thinker that generates given token ids."""

    def __init__(self, model: Any, ids: list[int]) -> None:
        self._model, self._ids = model, ids

    def generate(self, **settings: Any) -> Any:
        from transformers import LogitsProcessor

        ids, length = self._ids, settings["input_ids"].shape[1]

        class ForcedTokens(LogitsProcessor):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                forced = torch.full_like(scores, -torch.inf)
                forced[:, ids[input_ids.shape[1] - length]] = 0
                return forced

        return self._model.generate(
            **settings,
            thinker_max_new_tokens=len(ids),
            thinker_eos_token_id=ids[-1],
            thinker_logits_processor=[ForcedTokens()],
            thinker_do_sample=False,
        )


def conversation(dialogue: Dialogue, aloud: bool) -> list[dict[str, Any]]:
    """Messages up to the last question; `aloud`: users' turns are sounds."""
    messages: list[dict[str, Any]] = []
    for i, turn in enumerate(dialogue.turns):
        content: list[dict[str, str]] = [{"type": "audio"} if aloud else {"type": "text", "text": turn.question}]
        if turn.shown is not None:
            content.insert(len(content) if turn.by_tool else 0, {"type": "image"})
        if i == 0 and dialogue.scene is not None:
            content.insert(0, {"type": "image"})
        role = "tool" if turn.by_tool else "user"
        messages += [{"role": role, "content": content}, {"role": "assistant", "content": turn.answer}]
    return messages[:-1]


def _images(dialogue: Dialogue) -> list[Image.Image]:
    first = [] if dialogue.scene is None else [dialogue.scene.render()]
    return [*first, *(turn.shown.render() for turn in dialogue.turns if turn.shown is not None)]


def exact(
    omni: ReferenceOmni,
    title: str,
    ask: Callable[[random.Random], Dialogue],
    noise_db: float | None,
    aloud: bool,
    count: int,
) -> None:
    """Prints how many questions that `ask` draws are answered word for word."""
    draw, right, total = random.Random(f"evaluation {title}"), Counter[str](), Counter[str]()
    wrong: list[str] = []
    for begin in range(0, count, _BATCH):
        dialogues = [ask(draw) for _ in range(min(_BATCH, count - begin))]
        voices = [draw_voice(draw, held_out=True) for _ in dialogues]
        sounds = [
            sound_of(turn.question, voice, draw, noise_db)[0]
            for dialogue, voice in zip(dialogues, voices, strict=True)
            for turn in dialogue.turns
            if aloud
        ]
        answers = omni.answers(dialogues, aloud, sounds)
        for dialogue, answer in zip(dialogues, answers, strict=True):
            total[dialogue.kind] += 1
            right[dialogue.kind] += answer == dialogue.turns[-1].answer
            if answer != dialogue.turns[-1].answer:
                wrong.append(f"    {dialogue.turns[-1].question!r} -> {answer!r}, right: {dialogue.turns[-1].answer!r}")
    kinds_text = ", ".join(f"{kind} {right[kind]}/{total[kind]}" for kind in sorted(total))
    print(f"{title}: {right.total()} of {count} right ({right.total() / count:.1%}): {kinds_text}", flush=True)
    print("\n".join(wrong[:12]), flush=True)


def answers(count: int = COUNT, folder: Path = MODELS / OMNI) -> None:
    """Prints exact answers to held-out questions: typed, spoken, with noise, about images, with tools."""
    omni = ReferenceOmni(folder)
    typed = {kind: share for kind, share in KINDS.items() if kind not in (seeing, weather)}
    said = {kind: share for kind, share in typed.items() if kind is not nonsense}
    exact(omni, "text", partial(draw_dialogue, held_out=True, kinds=typed), None, False, count)
    exact(omni, "voice", partial(draw_dialogue, held_out=True, kinds=said), None, True, count)
    exact(omni, "voice, noise at 10 dB", partial(draw_dialogue, held_out=True, kinds=said), 10.0, True, count)
    exact(omni, "pictures", partial(draw_dialogue, held_out=True, kinds={seeing: 1.0}), None, False, count)
    exact(omni, "weather by get_weather", partial(tools.weather, names=("get_weather",)), None, False, count)
    exact(omni, "weather by a new name", partial(tools.weather, names=HELD_OUT_NAMES), None, False, count)
    exact(omni, "drawing by a tool", partial(tools.drawing, held_out=True), None, False, count)
    exact(omni, "tools left alone", partial(tools.left_alone, held_out=True), None, False, count)
    exact(omni, "large shapes on a ground", large, None, False, count)
    exact(omni, "the painter's images", partial(large, painter=Painter()), None, False, count)
    for number in range(1, MOST_QUESTIONS + 1):
        ask = partial(draw_conversation, held_out=True, questions=number)
        exact(omni, f"conversations, question {number}", ask, None, False, count)


def large(draw: random.Random, painter: Painter | None = None) -> Dialogue:
    """Draws a question about a large shape on a ground, in an image that a program draws, or `painter`."""
    prompt = draw_seen(draw, held_out=True)
    if painter is not None:
        (prompt,) = painter.paint([prompt], [draw.getrandbits(32)])
    return Dialogue("large", (replace(about(draw, prompt), shown=prompt),))


def speech(count: int = 40, folder: Path = MODELS / OMNI, samples: Path | None = None) -> None:
    """Prints in how many held-out answers pocketsphinx finds the right one of 300, and the mel-cepstral distance to
    espeak-ng's own recording; writes the first SAMPLES sounds, in one voice and the other, to the folder `samples`."""
    import soundfile

    omni, sentences = ReferenceOmni(folder), held_out_answers(300)
    listener = Listener(sentences)
    for number, (voice, settings) in enumerate(VOICES.items()):
        ours = theirs = 0
        distances: list[float] = []
        for i, sentence in enumerate(sentences[:count]):
            spoken = omni.speech(sentence, voice)
            settings = type(settings)(settings.name, 160, settings.pitch, 50)
            recording = say(sentence.replace("-", ". "), settings, SPEECH_HZ).samples
            transcript = listener.recognize(spoken, SPEECH_HZ)
            ours += transcript == plain(sentence)
            theirs += listener.recognize(recording, SPEECH_HZ) == plain(sentence)
            if transcript != plain(sentence):
                print(
                    f"    {voice}: {sentence!r} understood as {transcript!r}, {len(spoken) / SPEECH_HZ:.1f} s",
                    flush=True,
                )
            if i < 20:
                distances.append(mel_cepstral_distance(spoken, recording, SPEECH_HZ))
            if samples is not None and i < SAMPLES and i % len(VOICES) == number:
                samples.mkdir(parents=True, exist_ok=True)
                soundfile.write(samples / f"{i + 1}-{voice}.flac", spoken, SPEECH_HZ)
        print(
            f"{voice}: understood {ours} of {count}; espeak-ng's own {theirs}; "
            f"mel-cepstral distance {np.mean(distances):.1f} dB",
            flush=True,
        )


def images(count: int = 100, folder: Path = MODELS / PAINTER, steps: int = 8) -> None:
    """Prints how many images of held-out prompts have the right colour, shape and ground, and how many edits."""
    import diffusers

    pipeline: Any = diffusers.ZImagePipeline.from_pretrained(folder, torch_dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
    pipeline.set_progress_bar_config(disable=True)
    draw, right = random.Random("paintings"), 0
    for seed in range(count):
        wanted = draw_image_prompt(draw, held_out=True)
        generator = torch.Generator().manual_seed(seed)
        image = pipeline(wanted.prompt, height=SIDE, width=SIDE, num_inference_steps=steps, generator=generator).images[
            0
        ]
        right += _matches(image, wanted)
    print(f"images: {right} of {count} right", flush=True)
    changes: Any = diffusers.ZImageImg2ImgPipeline(**pipeline.components)  # pyright: ignore[reportPrivateImportUsage]
    changes.set_progress_bar_config(disable=True)
    right = 0
    for seed in range(count // 2):
        given, wanted = draw_edit(draw)
        generator = torch.Generator().manual_seed(seed)
        image = changes(wanted.prompt, image=given.render(), num_inference_steps=steps, generator=generator).images[0]
        right += _matches(image, wanted)
    print(f"edits: {right} of {count // 2} right", flush=True)


def _matches(image: Image.Image, prompt: ImagePrompt) -> bool:
    found = find_shape(image)
    if found == (prompt.colour, prompt.shape, prompt.ground):
        return True
    print(f"    {prompt.prompt!r}: {found}", flush=True)
    return False
