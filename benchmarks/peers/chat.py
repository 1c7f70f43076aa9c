"""transformers' `generate` on the same weights and requests; the named peer of speech.py.

A process of its own, so that neither side's threads or memory touch the other's: prompts in as lines of JSON on stdin,
one line of JSON for each answer on stdout. `ask` is the other end. transformers has no server and speaks one request
at a time, so concurrent requests wait in line, as behind any lock, and its audio comes as a whole.
"""

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.traffic.answer import Answer
from benchmarks.traffic.load import line_arrivals
from services.families.qwen2_5_omni.thinker import SYSTEM_PROMPT


@dataclass(frozen=True)
class Family:
    """How one family's model is called.

    Attributes:
        model: its class in transformers.
        arguments: of `generate`, for so many tokens and codec frames.
        samples_per_frame: of a codec frame.
        mend: works around faults that change its output.
        system: what a conversation begins with here; "": nothing.
    """

    model: str
    arguments: Callable[[Any, int, int], dict[str, Any]]
    samples_per_frame: Callable[[Any], int]
    mend: Callable[[Any], object] = lambda model: None
    system: str = ""


def _qwen3_omni(model: Any, tokens: int, frames: int) -> dict[str, Any]:
    voices = model.config.talker_config.speaker_id
    return {
        "speaker": "ethan" if "ethan" in voices else min(voices),
        "thinker_max_new_tokens": tokens + 1,  # it never speaks its last token
        "talker_max_new_tokens": frames + 1,  # it makes one frame less than that
    }


def _qwen2_5_omni(model: Any, tokens: int, frames: int) -> dict[str, Any]:
    talker = model.config.talker_config
    return {
        "thinker_max_new_tokens": tokens,
        "talker_max_new_tokens": frames,
        "talker_eos_token_id": [talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id],  # constants otherwise
    }


def keep_mask(model: Any) -> None:
    """`generate` drops a mask of ones, without which the talker leaves out a part of its prompt."""
    forward = model.talker.forward
    model.talker.forward = lambda **arguments: forward(**arguments)  # takes no mask by name: then it is kept
    model.talker._validate_model_kwargs = lambda kwargs: None  # looks for what it is given in that signature


FAMILIES = {
    "qwen3_omni_moe": Family(
        "Qwen3OmniMoeForConditionalGeneration", _qwen3_omni, lambda model: int(model.code2wav.total_upsample)
    ),
    "qwen2_5_omni": Family(
        "Qwen2_5OmniForConditionalGeneration", _qwen2_5_omni, lambda model: 480, keep_mask, SYSTEM_PROMPT
    ),
}


def ask(
    model: Path, prompts: Sequence[str], tokens: int, frames: int, threads: int
) -> tuple[list[Answer], dict[str, float]]:
    """Has a peer answer `prompts` greedily, one after another, on `threads` threads.

    Returns:
        The answers, each sent when the one before it was complete; and the CPU seconds of one, under the name of the
        only process.

    Raises:
        subprocess.CalledProcessError: it failed; its output says why.
    """
    command = [sys.executable, "-m", __name__, str(model)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    lines = "\n".join(json.dumps({"prompt": prompt, "tokens": tokens, "frames": frames}) for prompt in prompts)
    peer = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found = [json.loads(line) for line in peer.stdout.splitlines() if line.startswith("{")]
    answers = [
        Answer(
            prompt=prompt,
            sent_s=each["sent_s"],
            done_s=each["done_s"],
            text=each["text"],
            text_s=each["token_s"],
            audio=[(each["done_s"], each["samples"])] if each["samples"] else [],
            tokens=len(each["token_s"]),
            frames=each["frames"],
        )
        for prompt, each in zip(prompts, found, strict=True)
    ]
    return answers, {"transformers": sum(each["cpu_s"] for each in found) / len(found)}


def in_line(answers: Sequence[Answer], concurrency: int) -> list[Answer]:
    """What `concurrency` workers of a closed loop would have seen: the same answers, one after another, each sent when
    the worker's last was complete. The first of every worker are left out, as they waited in a shorter line."""
    sent_s = line_arrivals([answer.done_s for answer in answers], concurrency, answers[0].sent_s)
    return [replace(answer, sent_s=at_s) for answer, at_s in zip(answers, sent_s, strict=True)][concurrency:]


def main() -> None:
    import torch
    import transformers
    from transformers.generation.streamers import BaseStreamer
    from transformers.utils import logging

    class TokenTimes(BaseStreamer):
        """When each generated token came. The first `put` is the prompt."""

        def __init__(self) -> None:
            self.times_s: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times_s.append(time.perf_counter())

        def end(self) -> None:
            pass

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    directory = sys.argv[1]
    processor: Any = transformers.AutoProcessor.from_pretrained(directory)
    config = json.loads((Path(directory) / "config.json").read_text())
    family = FAMILIES[config["model_type"]]
    model: Any = getattr(transformers, family.model).from_pretrained(directory, dtype="auto").eval()
    family.mend(model)

    def speak(prompt: str, tokens: int, frames: int) -> dict:
        sent_s, cpu_before_s = time.perf_counter(), time.process_time()
        said = [("system", family.system)] if family.system else []
        turns = [*said, ("user", prompt)]
        conversation = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
        text = processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        inputs = processor(text=text, return_tensors="pt")
        streamer = TokenTimes()
        sequences, wav = model.generate(
            **inputs,
            thinker_streamer=streamer,
            thinker_do_sample=False,
            thinker_eos_token_id=processor.tokenizer.eos_token_id,
            talker_do_sample=False,
            **family.arguments(model, tokens, frames),
        )
        done_s = time.perf_counter()
        sequences = getattr(sequences, "sequences", sequences)
        new = sequences[0, inputs["input_ids"].shape[1] :][:tokens]
        samples = 0 if wav is None else wav.numel()
        return {
            "sent_s": sent_s,
            "token_s": streamer.times_s[1 : tokens + 1],
            "done_s": done_s,
            "cpu_s": time.process_time() - cpu_before_s,
            "text": processor.tokenizer.decode(new, skip_special_tokens=True),
            "samples": samples,
            "frames": -(-samples // family.samples_per_frame(model)),  # the first frame of an answer is trimmed
        }

    with torch.inference_mode():
        speak("Warm up.", 4, 4)
        for line in sys.stdin:
            wish = json.loads(line)
            print(json.dumps(speak(wish["prompt"], wish["tokens"], wish["frames"])), flush=True)


if __name__ == "__main__":
    main()
