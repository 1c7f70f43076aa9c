"""Small random checkpoints that make embeddings or score pairs, as sentence-transformers writes them, and plain
references of both."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn.functional import normalize

from services.families.qwen3_omni.tiny.processor import CORPUS, make_tokenizer
from services.families.tiny_parts import randomize
from tests.support.kept import kept_folder

BERT_MEAN = "bert_mean"
BERT_PAIRS = "bert_pairs"
MOST_TOKENS = 64
_MODULES = "sentence_transformers.models"
_POOLING = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}


def word_pieces() -> Any:
    """Of BERT: lower case, [CLS] and [SEP] around a text, segments 0 and 1 of a pair."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    backend.train_from_iterator([CORPUS.lower()] * 20, trainer)
    ids = [(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    pair = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=ids)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=MOST_TOKENS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **names,
    )


def pieces() -> Any:
    """Of XLM-RoBERTa: a unigram model, <s> and </s> around a text, two </s> between the texts of a pair."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator([CORPUS] * 20, trainer)
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ids
    )
    names = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
    names |= {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=MOST_TOKENS, **names)


def ended_bytes() -> Any:
    """Of Qwen3-Embedding: a token after a text, whose state becomes the embedding."""
    tokenizer = make_tokenizer(200)
    end = "<|endoftext|>"
    after = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, tokenizer.convert_tokens_to_ids(end))]
    )
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), after])
    return tokenizer


def _encoder_sizes(tokenizer: Any, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return sizes | {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id} | more


def _bert(**more: Any) -> tuple[Any, Any]:
    tokenizer = word_pieces()
    return tokenizer, transformers.BertConfig(**_encoder_sizes(tokenizer, max_position_embeddings=MOST_TOKENS, **more))


def _xlm_roberta(**more: Any) -> tuple[Any, Any]:
    tokenizer = pieces()
    sizes = _encoder_sizes(tokenizer, max_position_embeddings=MOST_TOKENS + 2, type_vocab_size=1, **more)
    sizes["position_embedding_type"] = "absolute"  # in published files; vLLM asks for it
    return tokenizer, transformers.XLMRobertaConfig(**sizes)


def bert_mean() -> tuple[Any, Any]:
    return _bert()


def xlm_roberta_cls() -> tuple[Any, Any]:
    return _xlm_roberta()


def modernbert_mean() -> tuple[Any, Any]:
    """Windows and whole attention in turns."""
    tokenizer = word_pieces()
    sizes = _encoder_sizes(tokenizer, max_position_embeddings=256, local_attention=16, global_attn_every_n_layers=2)
    ids: dict[str, Any] = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    return tokenizer, transformers.ModernBertConfig(**sizes, **ids)


def qwen3_last() -> tuple[Any, Any]:
    """A decoder, whose embeddings may be shorter."""
    tokenizer = ended_bytes()
    sizes = _encoder_sizes(tokenizer, num_key_value_heads=1, head_dim=32, max_position_embeddings=256)
    sizes["matryoshka_dimensions"] = [16, 32, 64]
    return tokenizer, transformers.Qwen3Config(**sizes)


def bert_pairs() -> tuple[Any, Any]:
    return _bert(num_labels=1)


def xlm_roberta_pairs() -> tuple[Any, Any]:
    return _xlm_roberta(num_labels=1)


def bert_classes() -> tuple[Any, Any]:
    """Sorts texts into three classes."""
    return _bert(num_labels=3)


Make = Callable[[], tuple[Any, Any]]
EMBEDDING: Mapping[str, Make] = {
    each.__name__: each for each in (bert_mean, xlm_roberta_cls, modernbert_mean, qwen3_last)
}
SCORING: Mapping[str, Make] = {each.__name__: each for each in (bert_pairs, xlm_roberta_pairs)}
OTHERS: Mapping[str, Make] = {"bert_classes": bert_classes}


def embedding_checkpoint(name: str) -> Path:
    """One of `EMBEDDING`, `SCORING` or `OTHERS`."""

    def make(out: Path) -> None:
        tokenizer, config = {**EMBEDDING, **SCORING, **OTHERS}[name]()
        torch.manual_seed(0)
        kind = transformers.AutoModel if name in EMBEDDING else transformers.AutoModelForSequenceClassification
        model: Any = kind.from_config(config)
        randomize(model)
        model.float().save_pretrained(out)
        if name == "qwen3_last":  # as published: the class that writes, the weights without its head
            written = json.loads((out / "config.json").read_text())
            (out / "config.json").write_text(json.dumps(written | {"architectures": ["Qwen3ForCausalLM"]}))
        tokenizer.save_pretrained(out)
        if name in EMBEDDING:
            _write_modules(out, name)

    return kept_folder(make, "embedding", name, Path(__file__))


def _write_modules(out: Path, name: str) -> None:
    """The files that say how embeddings are made of the model's states."""
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"{_MODULES}.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    pooling = {key: mode == name.rpartition("_")[2] for mode, key in _POOLING.items()}
    (out / "modules.json").write_text(json.dumps(modules))
    (out / "1_Pooling").mkdir()
    (out / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 64, **pooling}))
    limits = {"max_seq_length": MOST_TOKENS, "do_lower_case": False}
    (out / "sentence_bert_config.json").write_text(json.dumps(limits))


class Reference:
    """What transformers computes, a text at a time, in float32."""

    def __init__(self, name: str) -> None:
        folder = embedding_checkpoint(name)
        kind = transformers.AutoModel if name in EMBEDDING else transformers.AutoModelForSequenceClassification
        model: Any = kind.from_pretrained(folder, dtype=torch.float32)
        self.model = model.eval()
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self.pooling = name.rpartition("_")[2]

    @torch.inference_mode()
    def embedding(self, text: str | Sequence[int]) -> list[float]:
        """Of a text, or of token ids."""
        ids = self.tokenizer(text)["input_ids"] if isinstance(text, str) else list(text)
        states = self.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        pooled = {"cls": states[0], "last": states[-1], "mean": states.mean(0)}[self.pooling]
        return normalize(pooled, dim=-1).tolist()

    @torch.inference_mode()
    def score(self, query: str, document: str, **cut: Any) -> float:
        inputs = self.tokenizer(query, document, return_tensors="pt", **cut)
        return float(torch.sigmoid(self.model(**inputs).logits[0, 0]))
