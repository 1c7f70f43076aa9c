"""The prompts and outputs of a response as token ids and texts, as vLLM's server has them."""

from collections.abc import Sequence
from typing import Any

from gateway.answers.answer import WholeAnswer
from gateway.answers.completion import detokenize
from gateway.answers.gateway import Gateway


async def raw_messages(gateway: Gateway, answers: Sequence[WholeAnswer]) -> dict[str, list[dict[str, Any]]]:
    """`input_messages`: the first prompt; `output_messages`: the output, then prompt and output of each further turn.

    Raises:
        ApiError: the thinker gives no text.
    """
    messages = []
    for answer in answers:
        for token_ids in (answer.prompt.token_ids, answer.token_ids):
            message = await detokenize(gateway, token_ids, "enable_response_messages")
            messages.append({"message": message, "tokens": list(token_ids), "type": "raw_message_tokens"})
    return {"input_messages": messages[:1], "output_messages": messages[1:]}
