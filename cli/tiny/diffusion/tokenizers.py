"""Tokenizers of the prompt encoders: the published classes and special tokens, small vocabularies."""

import json
import math
from collections import Counter

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

from services.families.qwen3_omni.tiny.processor import CORPUS, make_tokenizer

# Generation prompt and thinking switch as in Qwen3's template, which does much more.
QWEN3_TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def clip_tokenizer(merges: int, pad_token: str = "<|endoftext|>") -> CLIPTokenizer:
    """Lower-case BPE whose words end in `</w>`; at most 77 tokens, start and end included."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trained.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=100 + merges, end_of_word_suffix="</w>", show_progress=False)
    trained.train_from_iterator([CORPUS.lower()], trainer)
    pairs = _merges(trained)[:merges]
    tokens = [*alphabet, *(f"{symbol}</w>" for symbol in alphabet), *("".join(pair) for pair in pairs)]
    # The end has the highest id, where pooling of the first CLIP models looks for it.
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=pairs, pad_token=pad_token, model_max_length=77)  # type: ignore[arg-type]


def t5_tokenizer(words: int, max_length: int) -> T5Tokenizer:
    """Unigram model of ASCII characters and the corpus' `words` most frequent words, with T5's 100 extra ids."""
    frequent = Counter(CORPUS.lower().split()).most_common(words)
    characters = ["\u2581", *(chr(code) for code in range(33, 127))]
    pieces = [(word, -5 - math.log(1 + rank)) for rank, (word, _) in enumerate(frequent) if len(word) > 1]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocabulary += [(f"\u2581{word}", score) for word, score in pieces] + [(symbol, -12.0) for symbol in characters]
    return T5Tokenizer(vocab=vocabulary, model_max_length=max_length)


def qwen_tokenizer(merges: int, template: str = QWEN3_TEMPLATE, words: tuple[str, ...] = ()) -> Qwen2Tokenizer:
    """Byte-level BPE with a chat template. Each text of `words` gets a token of its own, in front of the merges."""
    tokenizer = make_tokenizer(merges, words)
    tokenizer.chat_template = template
    return tokenizer


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
