"""The talker's input from a text without a thinker."""

import torch

from services.families.qwen3_omni.talker_prompt import PromptSpec, ThinkerPrompt, talker_prompt
from services.talker.inputs import Delivery, Prompt
from services.talker.text import GrowingText, TextTokenizer

# Default of the user's turn, as the talker was trained with a user's turn before the answer.
DEFAULT_INSTRUCTIONS = "Read this text aloud."


class TextTurn(GrowingText):
    """A `services.talker.inputs.TextInput`: the assistant's turn after the user's instructions."""

    def __init__(self, spec: PromptSpec, tokenizer: TextTokenizer, delivery: Delivery) -> None:
        super().__init__(tokenizer)
        self._spec, self._delivery = spec, delivery
        newline = tokenizer.encode("\n")
        instructions = tokenizer.encode(delivery.instructions.strip() or DEFAULT_INSTRUCTIONS)
        user = [spec.im_start_id, spec.user_id, *newline, *instructions, spec.im_end_id, *newline]
        self._prompt = [*user, spec.im_start_id, spec.assistant_id, *newline]

    @property
    def ready(self) -> bool:
        """Whether the needed ids are known: the first, or all of them."""
        return bool(self.ids) and (self.finished or not self._delivery.whole_text_first)

    def take_prompt(self) -> Prompt:
        prompt = ThinkerPrompt(torch.tensor(self._prompt), (), None)
        return talker_prompt(prompt, self.ids[0], self._delivery.speaker, self._spec)
