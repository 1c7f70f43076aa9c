"""Small tokenizers, encoders and processors in the place of those that diffusers' tests fetch."""

import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import torch
import transformers
from sentencepiece import SentencePieceTrainer
from transformers import feature_extraction_utils, image_processing_base

from cli.tiny import parts
from services.families.qwen3_omni.tiny.processor import CORPUS, SPECIAL_TOKENS, make_tokenizer

_WORDS = 200
_SEEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>")
_LIMIT = 512  # tokens
_MODEL = transformers.PreTrainedModel
_T5 = {
    "vocab_size": 1000,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 37,
    "num_layers": 2,
    "num_heads": 4,
}
_WIDTHS = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = _WIDTHS | {"hidden_size": 16, "vocab_size": 1000, "num_key_value_heads": 4}
_CONFIGS: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "umt5": _T5,
    "llama": _LLAMA,
    "bert": _WIDTHS | {"vocab_size": 1124},
    "gemma3": {
        "text_config": _LLAMA | {"hidden_size": 32, "head_dim": 8},
        "vision_config": _WIDTHS | {"image_size": 28, "patch_size": 14},
    },
    "siglip_vision_model": _WIDTHS | {"image_size": 30, "patch_size": 2},
}
"""Type of a model -> its sizes."""


def _t5() -> Any:
    tokenizer = parts.t5_tokenizer(_WORDS, _LIMIT)
    tokenizer.chat_template = SEEING_TEMPLATE
    return tokenizer


def _bytes() -> Any:
    tokenizer = make_tokenizer(_WORDS, special_tokens=list(dict.fromkeys((*SPECIAL_TOKENS, *_SEEN))))
    tokenizer.chat_template = SEEING_TEMPLATE
    tokenizer.model_max_length = _LIMIT
    return tokenizer


def _bert() -> Any:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(97, 123))]
    words += [f"##{chr(code)}" for code in range(97, 123)]
    return transformers.BertTokenizer(
        vocab={word: index for index, word in enumerate(words)},
        model_max_length=_LIMIT,  # type: ignore[arg-type]
    )


def _roberta() -> Any:
    byte_level = parts.qwen_tokenizer(_WORDS)
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *byte_level.get_vocab()]
    ids = {token: index for index, token in enumerate(dict.fromkeys(vocabulary))}
    return transformers.RobertaTokenizer(vocab=ids, merges=[], model_max_length=77)  # type: ignore[arg-type]


def _xlm_roberta() -> Any:
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(symbol, -5.0) for symbol in ("\u2581", *map(chr, range(33, 127)))] + [("<mask>", 0.0)]
    return transformers.XLMRobertaTokenizer(vocab=pieces, model_max_length=_LIMIT)  # type: ignore[arg-type]


_TOKENIZERS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("clip", lambda: parts.clip_tokenizer(_WORDS)),
    ("xlm", _xlm_roberta),
    ("mclip", _xlm_roberta),
    ("roberta", _roberta),
    ("bert", _bert),
    ("t5", _t5),
    ("glm", _t5),  # an empty text is a token
    ("gemma", _t5),  # tests count its special tokens among `vocab_size`
    ("", _bytes),
)
"""Part of a class's or a repository's name -> its tokenizer."""


def _pieces(cls: Any) -> Any:
    """Of a class of diffusers, which reads SentencePiece's file."""
    folder = Path(tempfile.mkdtemp(prefix="quartet-standin-"))  # `save_pretrained` copies the file from there
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.split("\n")),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=_WORDS,
        pad_id=3,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return cls(str(folder / "tokenizer.model"))


def _tokenizer(cls: Any, repository: str, **options: Any) -> Any:
    if cls.__module__.startswith("diffusers."):
        return _pieces(cls)
    name = cls.__name__.lower()
    name = repository.rpartition("/")[2].lower() if name.startswith("auto") else name
    made = next(make() for kind, make in _TOKENIZERS if kind in name)
    if "model_max_length" in options:
        made.model_max_length = options["model_max_length"]
    return made


def _config(kind: str) -> Any:
    return transformers.AutoConfig.for_model(kind, **_CONFIGS[kind])


def _auto_config(cls: Any, repository: str, **options: Any) -> Any:
    kinds = sorted(_CONFIGS, key=len, reverse=True)
    return _config(next(kind for kind in kinds if kind.partition("_")[0] in repository.lower()))


def _model(cls: Any, repository: str, **options: Any) -> Any:
    kind = cls.config_class.model_type
    return cls(_config(kind)).eval()


def _processor(cls: Any, repository: str, **options: Any) -> Any:
    """A processor of pictures, with a tokenizer; `Auto` is Qwen2-VL's."""
    if cls.__name__.startswith("Auto"):
        cls = transformers.Qwen2_5_VLProcessor
    patches: Any = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    images = transformers.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56, **patches)
    given = {"image_processor": images, "tokenizer": _bytes(), "chat_template": SEEING_TEMPLATE}
    if "video_processor" in inspect.signature(cls.__init__).parameters:
        given["video_processor"] = transformers.Qwen2VLVideoProcessor(**patches)
    return cls(**given)


SEEING_TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{%- endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Turns of texts and pictures."""


def _plain(cls: Any, repository: str, **options: Any) -> Any:
    """With its class's defaults."""
    options.pop("subfolder", None)
    return cls(**options)


_PLACES: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (transformers.PreTrainedTokenizerBase, _tokenizer),
    (transformers.AutoTokenizer, _tokenizer),
    (transformers.PreTrainedConfig, _auto_config),
    (transformers.AutoConfig, _auto_config),
    (transformers.PreTrainedModel, _model),
    (transformers.ProcessorMixin, _processor),
    (transformers.AutoProcessor, _processor),
    (image_processing_base.ImageProcessingMixin, _plain),
    (feature_extraction_utils.FeatureExtractionMixin, _plain),
)


@contextmanager
def nothing_is_fetched() -> Iterator[None]:
    """Within it `from_pretrained` of transformers makes a stand-in, whatever it is asked for."""
    patches = [
        patch.object(
            cls, "from_pretrained", classmethod(lambda cls, name, *_, _make=make, **more: _make(cls, str(name), **more))
        )
        for cls, make in _PLACES
    ]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def rouse(pipeline: Any) -> None:
    """Gives matrices that are all zero, as models begin their training with, small values: else an output may be the
    same of any input."""
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            for weights in part.parameters():
                if weights.dim() > 1 and not weights.any():
                    torch.nn.init.normal_(weights, std=0.02)


def publish(pipeline: Any) -> None:
    """Has diffusers find models that its tests define: their classes, among those of the pipeline, and their files."""
    for part in pipeline.components.values():
        cls = type(part)
        _, is_of_tests, inner = cls.__module__.partition("tests.pipelines.")
        if isinstance(part, torch.nn.Module) and not part.state_dict():
            part._non_persistent_buffers_set.clear()  # else no file of weights is written, and none is found
        if is_of_tests and (folder := getattr(diffusers.pipelines, inner.partition(".")[0], None)):
            setattr(folder, cls.__name__, cls)


def agree(pipeline: Any) -> None:
    """Gives models the ids that the stand-ins' tokenizers have for pictures, and embeddings for all of their ids."""
    for name, tokenizer in pipeline.components.items():
        encoder: Any = pipeline.components.get(name.replace("tokenizer", "text_encoder"))
        if isinstance(tokenizer, transformers.PreTrainedTokenizerBase) and isinstance(encoder, _MODEL):
            embeddings = encoder.get_input_embeddings()
            if isinstance(embeddings, torch.nn.Embedding) and embeddings.num_embeddings < len(tokenizer):
                encoder.resize_token_embeddings(len(tokenizer))
                if own := getattr(encoder.config, "encoder", None):  # of T5Gemma
                    own.vocab_size = len(tokenizer)
    tokenizers = [getattr(part, "tokenizer", part) for part in pipeline.components.values()]
    for tokenizer in (part for part in tokenizers if isinstance(part, transformers.PreTrainedTokenizerBase)):
        vocabulary: Any = tokenizer
        ids = vocabulary.get_added_vocab()
        names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
        names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
        for model in pipeline.components.values():
            config = getattr(model, "config", None)
            if isinstance(config, transformers.PreTrainedConfig):
                for name, token in names.items():
                    if token in ids and hasattr(config, name):
                        setattr(config, name, ids[token])
