"""A model's own library says the same texts on the same weights; the named peer of speak.py.

A process of its own, by an interpreter of its own if need be: lists of texts in as lines of JSON on stdin, one line of
JSON for each list on stdout. `ask` is the other end. A list is one call, so several texts are a static batch. No peer
has a server: calls wait in line, and audio comes as a whole. `PEERS` has one function for each family.
"""

import base64
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Says texts in one call, greedily, at most so many codec frames each: float samples of each.
Speak = Callable[[Sequence[str], int], list[np.ndarray]]
ASKED = "Read this text aloud."  # the user's turn that Quartet's talker reads where a request has no instructions


@dataclass
class Call:
    """One call of the peer. Moments are seconds of `time.perf_counter`, which processes of one machine share.

    Attributes:
        texts: that it spoke.
        sent_s, done_s: its begin and end.
        cpu_s: seconds of CPU time.
        sounds: of each text, (samples,) int16.
    """

    texts: Sequence[str]
    sent_s: float
    done_s: float
    cpu_s: float
    sounds: list[np.ndarray]


def family(model: Path) -> str:
    """`model_type` of a checkpoint's config.json."""
    return json.loads((model / "config.json").read_text())["model_type"]


def ask(python: str, model: Path, voice: str, calls: Sequence[Sequence[str]], frames: int, threads: int) -> list[Call]:
    """Has the peer make `calls` with `voice`, one after another, on `threads` threads, by the interpreter `python`.

    Raises:
        subprocess.CalledProcessError: it failed; its output says why.
    """
    command = [python, "-m", __name__, str(model), voice, str(frames)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    lines = "\n".join(json.dumps(texts) for texts in calls)
    peer = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    made = []
    for texts, line in zip(calls, (line for line in peer.stdout.splitlines() if line.startswith("{")), strict=True):
        told = json.loads(line)
        sounds = [np.frombuffer(base64.b64decode(sound), "<i2") for sound in told.pop("sounds")]
        made.append(Call(texts=texts, sounds=sounds, **told))
    return made


def transformers_qwen3_omni(directory: str, voice: str) -> Speak:
    """Qwen3-Omni's own `generate`, whose thinker is replaced by a look-up.

    `generate` has no way to speak a given text. What its talker reads of an answer in text are the thinker's embeddings
    of the ids, so a given answer needs no pass of the thinker: what runs is talker and code2wav, by transformers' code.
    """
    import torch
    from transformers import Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeProcessor
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    processor: Any = Qwen3OmniMoeProcessor.from_pretrained(directory)
    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(directory, dtype="auto").eval()
    end_id, layers = model.config.im_end_token_id, model.config.talker_config.accept_hidden_layer + 1
    turn = [{"role": "user", "content": [{"type": "text", "text": ASKED}]}]
    asked = processor.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    prompt = processor(text=asked, return_tensors="pt")["input_ids"]
    answers: list[list[int]] = []

    def given(input_ids: torch.Tensor, **_: Any) -> GenerateDecoderOnlyOutput:
        longest = max(map(len, answers))
        ids = torch.tensor([answer + [end_id] * (longest + 1 - len(answer)) for answer in answers])
        embedded = model.thinker.get_input_embeddings()(torch.cat((input_ids, ids[:, :-1]), dim=1))
        # The ids say only where texts end. `generate` would have the shorter texts of a batch speak the end's id too,
        # so it is told of one that stands a place earlier.
        for row, answer in zip(ids, answers, strict=True):
            row[len(answer) - 1] = end_id
        sequences: Any = torch.cat((input_ids, ids), dim=1)
        # States of other layers are read at media positions only, of which there are none.
        return GenerateDecoderOnlyOutput(sequences=sequences, hidden_states=((embedded,) * layers,))

    model.thinker.generate = given

    def speak(texts: Sequence[str], frames: int) -> list[np.ndarray]:
        answers[:] = [processor.tokenizer(text)["input_ids"] for text in texts]
        _, waves = model.generate(
            input_ids=prompt.expand(len(texts), -1),
            speaker=voice,
            thinker_eos_token_id=end_id,
            talker_do_sample=False,
            talker_max_new_tokens=frames + 1,  # it makes one frame less than that
        )
        return [wave.reshape(-1).numpy() for wave in waves]

    return speak


def qwen_tts(directory: str, voice: str) -> Speak:
    """Qwen3-TTS's own package, qwen-tts, on this environment's transformers: its `generate_custom_voice`."""
    from tests.support.references.qwen_tts import load_tts

    model = load_tts(Path(directory))

    def speak(texts: Sequence[str], frames: int) -> list[np.ndarray]:
        greedy = {"do_sample": False, "subtalker_dosample": False}
        new_tokens = frames + 1  # it makes one frame less than that
        return model.generate_custom_voice(list(texts), voice, max_new_tokens=new_tokens, **greedy)[0]

    return speak


# By `model_type`: the peer's name, and what loads a checkpoint to speak with a voice.
PEERS: dict[str, tuple[str, Callable[[str, str], Speak]]] = {
    "qwen3_omni_moe": ("transformers", transformers_qwen3_omni),
    "qwen3_tts": ("qwen-tts", qwen_tts),
}


def main() -> None:
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    directory, voice, frames = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with torch.inference_mode():
        speak = PEERS[family(Path(directory))][1](directory, voice)
        speak(["Warm up."], 4)
        for line in sys.stdin:
            sent_s, cpu_before_s = time.perf_counter(), time.process_time()
            waves = speak(json.loads(line), frames)
            told: dict[str, Any] = {"sent_s": sent_s, "done_s": time.perf_counter()}
            told["cpu_s"] = time.process_time() - cpu_before_s
            pcm16 = [np.rint(np.clip(wave, -1, 1) * 32767).astype("<i2").tobytes() for wave in waves]
            told["sounds"] = [base64.b64encode(sound).decode() for sound in pcm16]
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
