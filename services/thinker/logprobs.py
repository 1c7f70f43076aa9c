"""Requests for log-probabilities that cost more than a few alternatives do."""

from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput, TooManyLogprobs, require
from services.common.sampling_limits import MAX_LOGPROBS, TOP_LOGPROBS, WHOLE_VOCABULARY
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import check_token_ids
from services.thinker.plugin.prompt_scores import Chosen

_MOST_IDS = int(TOP_LOGPROBS.most)
_OF_PROMPT = "sampling.prompt_logprobs"
_ROWS = "sampling.prompt_logprob_token_ids"


def refuse(sampling: thinker_pb2.SamplingParameters, settings: ThinkerSettings) -> None:
    """Raises InvalidInput, which names the field: the request asks for what this thinker does not tell."""
    wanted = {_OF_PROMPT: sampling.HasField("prompt_logprobs"), _ROWS: bool(sampling.prompt_logprob_token_ids)}
    for field, is_wanted in wanted.items():
        reason = "is for thinkers that were started with --prompt-logprobs=true; leave it out"
        require(settings.prompt_logprobs or not is_wanted, field, reason)
    for name in ("prompt_logprobs", "top_logprobs"):
        if getattr(sampling, name) == WHOLE_VOCABULARY and not settings.vocabulary_logprobs:
            reason = "of -1 is for thinkers that were started with --vocabulary-logprobs=true; send 0 to 20"
            raise InvalidInput(f"sampling.{name}", reason)
    if sampling.top_logprobs == WHOLE_VOCABULARY:
        require(sampling.HasField("max_tokens"), "sampling.top_logprobs", "of -1 needs max_tokens; set it")


def refuse_many(sampling: thinker_pb2.SamplingParameters, prompt_tokens: int, vocab_size: int) -> None:
    """Raises InvalidInput, which names the field: so many tokens have too many log-probabilities."""
    of_prompt, of_answer = (each == WHOLE_VOCABULARY for each in (sampling.prompt_logprobs, sampling.top_logprobs))
    tokens = prompt_tokens * of_prompt + sampling.max_tokens * of_answer
    if tokens * vocab_size > MAX_LOGPROBS:
        name = _OF_PROMPT if of_prompt else "sampling.top_logprobs"
        reason = f"of -1 are {vocab_size} a token; at most {MAX_LOGPROBS} are told: of {MAX_LOGPROBS // vocab_size}"
        raise TooManyLogprobs(name, f"{reason} tokens, not {tokens}")


def chosen_of(sampling: thinker_pb2.SamplingParameters, prompt_tokens: int, vocab_size: int) -> Chosen | None:
    """Tokens to score at the prompt's positions, if any. Raises InvalidInput, which names the field."""
    rows = [list(row.ids) for row in sampling.prompt_logprob_token_ids]
    start, columns = sampling.prompt_logprob_start, max(map(len, rows), default=0)
    require(start >= 0 and (rows or not start), "sampling.prompt_logprob_start", f"0 or more, with rows; not {start}")
    if not rows:
        return None
    scored = max(0, prompt_tokens - 1 - start)
    reason = (
        f"has {len(rows)} rows, but the prompt has {scored} scored rows: its tokens from the start to the last but one"
    )
    require(len(rows) == scored, _ROWS, reason)
    require(0 < columns <= _MOST_IDS, _ROWS, f"must have 1 to {_MOST_IDS} ids in its longest row, not {columns}")
    if len(rows) * columns > MAX_LOGPROBS:
        raise TooManyLogprobs(_ROWS, f"has {len(rows)} rows of {columns}; at most {MAX_LOGPROBS} are told in all")
    for row in rows:
        check_token_ids(_ROWS, (token_id for token_id in row if token_id != -1), vocab_size)
    return Chosen(start, [row + [-1] * (columns - len(row)) for row in rows])
