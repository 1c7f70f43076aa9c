"""A user's program with an Omni: `python -m tests.support.systems.omni_program CHECKPOINT RUN_DIRECTORY`.

It says what it has done, one line of JSON each: "ready"; a list of what each of its prompts came to; "asking";
"interrupted", once somebody has pressed ctrl-C; the text of one more answer. Then it hangs, until somebody ends it.
"""

import json
import os
import sys
import time

from quartet import Answer, Omni
from quartet.messages import PromptOptions

# Prompt i is that of i modulo THINGS. 1,000 take some three minutes on 2 cores.
PROMPTS, THINGS = int(os.environ.get("QUARTET_TEST_PROMPTS", "64")), 4
BRIEF: PromptOptions = {
    "max_tokens": 6,
    "temperature": 0.0,
    "speech": True,
    "quartet": {"talker": {"max_frames": 12, "seed": 1}},
}
ENDLESS: PromptOptions = {
    "max_tokens": 100_000,
    "ignore_eos": True,
    "speech": True,
    "quartet": {"talker": {"max_frames": 100_000}},
}


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


def outcome(answer: Answer) -> dict[str, object]:
    samples = len(answer.audio.samples) if answer.audio else 0
    return {"text": answer.text, "samples": samples, "error": answer.error and str(answer.error)}


def main(model: str, run_directory: str) -> None:
    omni = Omni(model, run_directory=run_directory, concurrency=16, stages={"thinker": {"block_size": 32}})
    say("ready")
    answers = omni.generate([f"Say {i % THINGS}." for i in range(PROMPTS)], **BRIEF)
    say([outcome(answer) for answer in answers])
    say("asking")
    try:
        omni.generate(["Say all."] * 4, **ENDLESS)
    except KeyboardInterrupt:
        say("interrupted")
    say(omni.generate("Say 0.", **BRIEF).text)
    time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
