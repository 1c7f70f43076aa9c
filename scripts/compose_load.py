"""Sends spoken requests to a running system and checks the answers, for scripts/test_compose.py."""

import array
import base64
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

QUESTIONS = {
    "What is seven plus five?": "Seven plus five is twelve.",
    "What is nine minus three?": "Nine minus three is six.",
    "What is the capital of Italy?": "The capital of Italy is Rome.",
    "What is the capital of France?": "The capital of France is Paris.",
    "Which day comes after Monday?": "Tuesday comes after Monday.",
    "What month comes before March?": "February comes before March.",
    "How many days are in a week?": "A week has seven days.",
    "How do you spell cat?": "Cat is spelled C-A-T.",
}
ALOUD = Path(__file__).parent.parent / "cli/assets/sum.wav"  # the first of them
MAX_SAMPLE_DIFFERENCE = 4  # of 32768: the waveform is exact to 1e-4


@dataclass(frozen=True)
class Answer:
    """A whole answer; `pcm` are mono samples of 16 bits at 24 kHz."""

    text: str
    pcm: bytes

    @property
    def audio_s(self) -> float:
        return len(self.pcm) / 2 / 24000

    def check(self, expected: "Answer") -> None:
        """Raises AssertionError unless it is `expected`."""
        assert self.text == expected.text, f"text {self.text!r}, alone {expected.text!r}"
        assert len(self.pcm) == len(expected.pcm), f"{self.audio_s:.2f} s of speech, alone {expected.audio_s:.2f} s"
        pairs = zip(array.array("h", self.pcm), array.array("h", expected.pcm), strict=True)
        difference = max(abs(ours - theirs) for ours, theirs in pairs)
        assert difference <= MAX_SAMPLE_DIFFERENCE, f"samples differ by {difference} from those alone"


def speak(
    client: openai.OpenAI,
    question: str | Path,
    length: int | None = None,
    on_audio: Callable[[], object] = lambda: None,
) -> Answer:
    """Streams the answer to `question`, sampled greedily: the same each time.

    Args:
        question: in words, or a recording.
        length: tokens of the text and codec frames of the speech, past the answer's end; None: the answer's own.
        on_audio: called at each piece of speech.

    Raises:
        openai.APIError: the server refused or broke off.
        AssertionError: the stream ended without a reason, or without text or speech.
    """
    content: Any = question
    if isinstance(question, Path):
        data = base64.b64encode(question.read_bytes()).decode()
        content = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": content}],
        modalities=["text", "audio"],
        audio={"voice": "ada", "format": "pcm16"},
        temperature=0,
        max_tokens=length or 64,
        stream=True,
        extra_body={"ignore_eos": length is not None, "quartet": {"talker": {"temperature": 0, "max_frames": length}}},
    )
    text, pcm, reason = "", b"", None
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            audio = getattr(choice.delta, "audio", None)
            if data := getattr(audio, "data", None):
                pcm += base64.b64decode(data)
                on_audio()
    assert reason, f"the stream ended after {len(text)} characters and {len(pcm)} bytes of speech"
    assert text, "an answer without text"
    assert pcm, "an answer without speech"
    return Answer(text, pcm)


@dataclass
class Load:
    """Spoken requests, `clients` at a time, while the block runs: `with Load(...) as load`.

    Attributes:
        expected: the questions, and their answers of that `length`.
        answered: requests with the expected answer.
        failures: (start, end, error) of the others; times by time.monotonic().
    """

    client: Callable[[], openai.OpenAI]
    expected: dict[str, Answer]
    clients: int = 8
    length: int | None = None
    answered: int = 0
    failures: list[tuple[float, float, Exception]] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        """Raises AssertionError if a request failed, or there was none."""
        requests = self.answered + len(self.failures)
        assert not self.failures, f"{len(self.failures)} of {requests} failed: {self.failures[0][2]!r}"
        assert self.answered, "no request was made"

    def wait_for(self, answered: int) -> None:
        """Waits for `answered` more answers. Raises AssertionError at a failure."""
        aim = self.answered + answered
        while self.answered < aim:
            assert not self.failures, repr(self.failures[0][2])
            time.sleep(0.05)

    def _ask(self, index: int) -> None:
        client, count = self.client(), index
        questions = list(self.expected)
        while not self._ended.is_set():
            count += 1
            question = questions[count % len(questions)]
            begin = time.monotonic()
            try:
                speak(client, question, self.length).check(self.expected[question])
                with self._lock:
                    self.answered += 1
            except Exception as error:
                with self._lock:
                    self.failures.append((begin, time.monotonic(), error))
                self._ended.wait(0.2)
