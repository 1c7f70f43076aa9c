"""Limits of sampling parameters, for gateway and stages alike."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, without `least` itself if it `excludes_least`."""

    least: float
    most: float
    excludes_least: bool = False

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.excludes_least and value == self.least)

    def __str__(self) -> str:
        least, most = f"{self.least:g}", f"{self.most:g}"
        if self.most >= 2**31 - 1:  # no limit but the field's type
            return f"{least} or more"
        return f"above {least} and at most {most}" if self.excludes_least else f"{least} to {most}"


# OpenAI's ranges. A repetition penalty has none there: 10 leaves nothing that was seen to be drawn again.
TEMPERATURE = Range(0, 2)
TOP_P = Range(0, 1, excludes_least=True)
MIN_P = Range(0, 1)
PENALTY = Range(-2, 2)  # presence and frequency
REPETITION_PENALTY = Range(0, 10, excludes_least=True)
TOP_LOGPROBS = Range(0, 20)
WHOLE_VOCABULARY = -1  # in their place
MAX_LOGPROBS = 500_000  # of a request: each takes 500 bytes, until all are sent
MAX_LOGPROB_TOKEN_IDS = 128
BEAMS = Range(1, 10)  # each takes twice as many alternatives
LENGTH_PENALTY = Range(-10, 10)
BACKGROUND_PRIORITY = 2**31 - 1  # the lowest: once it runs, too, it lets others go first
