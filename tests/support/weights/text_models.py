"""Small random checkpoints of language models that no family's row is about, with tokenizers of the published kinds."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from cli.tiny import make_checkpoint
from services.families.qwen3_omni.tiny.processor import CORPUS, PATCH, make_tokenizer
from services.families.tiny_parts import edit_json, prefer_text, randomize, token_ids, vision_config
from tests.support.kept import kept_folder
from tests.support.weights.checkpoints import SOURCE

ENDS = "Where does it end?"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHATML = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    '<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call><|im_end|>\n{% endif %}'
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
INST = (
    "{{ bos_token }}{%- for message in messages %}{%- if message.role == 'user' %} [INST] {{ message.content }} [/INST]"
    "{%- elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}"
    "{%- else %}{{ raise_exception('only users and assistants speak') }}{%- endif %}{%- endfor %}"
)
TURNS = (
    "{{ bos_token }}{%- for message in messages %}<start_of_turn>{{ message.role.replace('assistant', 'model') }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{%- if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
VISION_CHATML = CHATML.replace(
    "{{ message.content }}",
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}",
)
HEARING_CHATML = VISION_CHATML.replace(
    "{% if part.type == 'image' %}",
    "{% if part.type == 'audio' %}Audio {{ loop.index }}: <|audio_start|><|audio_pad|><|audio_end|>\n"
    "{% elif part.type == 'image' %}",
)
VISION_TURNS = TURNS.replace(
    "{{ message.content | trim }}",
    "{% if message.content is string %}{{ message.content | trim }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}",
)
PICTURES = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
BARS = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def _words(special: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a BPE of words with blanks before them, and bytes for all other signs."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    trained.train_from_iterator([CORPUS], trainers.BpeTrainer(vocab_size=400, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = [*special, *BYTES, *model["vocab"]]
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}, [tuple(pair) for pair in model["merges"]]


def byte_level(template: str | None = CHATML) -> Any:
    tokenizer = make_tokenizer(200)
    tokenizer.chat_template = template
    return tokenizer


def llama_words() -> Any:
    """A blank is before the first word of a text alone, and a token before the text."""
    vocabulary, merges = _words(["<unk>", "<s>", "</s>"])
    kind: Any = transformers.LlamaTokenizer
    return kind(vocab=vocabulary, merges=merges, chat_template=INST, add_bos_token=True)


def gemma_words(pictures: Mapping[str, str] = {}) -> Any:
    """Without a blank before the first word; runs of blanks are added tokens."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    vocabulary, merges = _words(special)
    named: Any = {"extra_special_tokens": dict(pictures)} if pictures else {}
    kind: Any = transformers.GemmaTokenizer
    tokenizer = kind(vocab=vocabulary, merges=merges, chat_template=TURNS, **named)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]})
    words = [*("\n" * count for count in (2, 3, 4)), "\u2581\u2581", "<table>"]
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in words])
    return tokenizer


def prepended_words() -> Any:
    """A blank is before each word that follows an added token, some of which take the blanks behind them."""
    vocabulary, merges = _words(["<unk>", "<s>", "<|endoftext|>"])
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|endoftext|>", unk_token="<unk>", chat_template=BARS
    )
    bars = [AddedToken(f"<|{name}|>", rstrip=True, normalized=False) for name in ("user", "assistant", "system", "end")]
    tokenizer.add_special_tokens({"additional_special_tokens": bars})
    return tokenizer


def sizes(tokenizer: Any, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
        **more,
    }


def qwen3() -> tuple[Any, Any]:
    tokenizer = byte_level()
    return tokenizer, transformers.Qwen3Config(**sizes(tokenizer, head_dim=32))


def llama() -> tuple[Any, Any]:
    tokenizer = llama_words()
    return tokenizer, transformers.LlamaConfig(**sizes(tokenizer))


def gemma3() -> tuple[Any, Any]:
    """Windows and whole attention in turns."""
    tokenizer = gemma_words()
    layers = ["sliding_attention", "full_attention"]
    return tokenizer, transformers.Gemma3TextConfig(
        **sizes(tokenizer, head_dim=32, sliding_window=16, layer_types=layers, query_pre_attn_scalar=32)
    )


def mistral() -> tuple[Any, Any]:
    tokenizer = byte_level()
    return tokenizer, transformers.MistralConfig(**sizes(tokenizer, sliding_window=None, head_dim=32))


def phi3() -> tuple[Any, Any]:
    tokenizer = prepended_words()
    return tokenizer, transformers.Phi3Config(**sizes(tokenizer, num_key_value_heads=2))


def qwen3_moe() -> tuple[Any, Any]:
    tokenizer = byte_level()
    return tokenizer, transformers.Qwen3MoeConfig(
        **sizes(tokenizer, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    )


def deepseek_v2() -> tuple[Any, Any]:
    """Latent attention and shared experts. vLLM has a kernel for CPUs for this width alone."""
    tokenizer = byte_level()
    return tokenizer, transformers.DeepseekV2Config(
        **sizes(
            tokenizer,
            num_key_value_heads=2,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_rope_head_dim=64,
            qk_nope_head_dim=32,
            v_head_dim=32,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            topk_method="greedy",
            n_group=1,
            topk_group=1,
        )
    )


def glm4_moe() -> tuple[Any, Any]:
    """As DeepSeek's: a dense layer, then groups of experts, of which a biased sigmoid chooses, beside a shared one."""
    tokenizer = byte_level()
    return tokenizer, transformers.Glm4MoeConfig(
        **sizes(
            tokenizer,
            head_dim=32,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=1.5,
            num_hidden_layers=3,
        )
    )


def granite_hybrid() -> tuple[Any, Any]:
    """Mamba-2 and attention in turns."""
    tokenizer = byte_level()
    return tokenizer, transformers.GraniteMoeHybridConfig(
        **sizes(
            tokenizer,
            layer_types=["mamba", "attention"],
            num_local_experts=0,
            shared_intermediate_size=128,
            mamba_n_heads=4,
            mamba_d_head=32,
            mamba_d_state=16,
            mamba_n_groups=1,
            mamba_expand=2,
            mamba_chunk_size=16,
        )
    )


def qwen3_vl() -> tuple[Any, Any]:
    """Pictures of any size; three axes of positions; states of the vision model go into several layers."""
    tokenizer = byte_level(VISION_CHATML)
    processor = transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(
            size={"shortest_edge": 3_136, "longest_edge": 65_536}, **PATCH
        ),
        video_processor=transformers.Qwen3VLVideoProcessor(**PATCH),
        tokenizer=tokenizer,
        chat_template=VISION_CHATML,
    )
    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 10_000.0}
    text = sizes(tokenizer, num_hidden_layers=3, head_dim=32, rope_parameters=rope)
    vision = vision_config(32, 64) | {
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [1, 2],
        "patch_size": 16,
    }
    ids = token_ids(
        tokenizer,
        {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
    )
    return processor, transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)


def gemma3_images() -> tuple[Any, Any]:
    """The token of the template is not the one of its embeddings; these see each other in both directions."""
    tokenizer = gemma_words(PICTURES)
    processor = transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56}),
        tokenizer=tokenizer,
        chat_template=VISION_TURNS,
        image_seq_length=4,
    )
    layers = ["sliding_attention", "full_attention"]
    more = {"sliding_window": 64, "layer_types": layers, "query_pre_attn_scalar": 32, "head_dim": 32}
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return processor, transformers.Gemma3Config(
        text_config=sizes(tokenizer, **more),
        vision_config=vision | {"image_size": 56, "patch_size": 14},
        mm_tokens_per_image=4,
        **token_ids(
            tokenizer,
            {
                "image_token_index": PICTURES["image_token"],
                "image_token_id": PICTURES["image_token"],
                "boi_token_index": PICTURES["boi_token"],
                "eoi_token_index": PICTURES["eoi_token"],
            },
        ),
    )


def llava() -> tuple[Any, Any]:
    """Its chat template takes texts alone: a message has a token for each picture."""
    tokenizer = llama_words()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=INST,
    )
    vision: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
    vision |= {"num_attention_heads": 2}
    return processor, transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**sizes(tokenizer)),
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=56, patch_size=14, projection_dim=64),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )


def qwen2_audio() -> tuple[Any, Any]:
    """Sounds of up to 30 s, each with its number in the prompt."""
    tokenizer = byte_level(HEARING_CHATML)
    sounds = {"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
    processor = transformers.Qwen2AudioProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=128),
        tokenizer=tokenizer,
        chat_template=HEARING_CHATML,
        **sounds,
    )
    return processor, transformers.Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **sizes(tokenizer)},
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|audio_pad|>"),
    )


def whisper() -> tuple[Any, Any]:
    """Writes down sounds of up to 30 s."""
    languages = [f"<|{code}|>" for code in LANGUAGES]
    control = ["<|endoftext|>", "<|startoftranscript|>", *languages, "<|translate|>", "<|transcribe|>"]
    control += ["<|startofprev|>", "<|notimestamps|>"]
    read = json.loads(byte_level(None).backend_tokenizer.to_str())["model"]
    words = transformers.WhisperTokenizer(vocab=read["vocab"], merges=[tuple(pair) for pair in read["merges"]])
    words.add_special_tokens({"additional_special_tokens": control})
    words.pad_token = "<|endoftext|>"
    sounds = transformers.WhisperFeatureExtractor(feature_size=80)
    processor = transformers.WhisperProcessor(feature_extractor=sounds, tokenizer=words)
    ids: Any = words.get_vocab()
    end, start = ids[control[0]], ids[control[1]]
    return processor, transformers.WhisperConfig(
        vocab_size=len(words),
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )


MODELS: Mapping[str, Callable[[], tuple[Any, Any]]] = {
    make.__name__: make
    for make in (qwen3, llama, gemma3, mistral, phi3, qwen3_moe, glm4_moe, deepseek_v2, granite_hybrid)
}
PICTURED: Mapping[str, Callable[[], tuple[Any, Any]]] = {
    make.__name__: make for make in (qwen3_vl, gemma3_images, llava)
}
UNIFIED = ("cosmos3",)
"""Architectures of `quartet tiny` whose checkpoints also make pictures; the side that writes takes pictures."""
HEARING: Mapping[str, Callable[[], tuple[Any, Any]]] = {"qwen2_audio": qwen2_audio}
TRANSCRIBING: Mapping[str, Callable[[], tuple[Any, Any]]] = {"whisper": whisper}


def load(checkpoint: Path) -> Any:
    """transformers' model, in float32."""
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    model: Any = _class_of(config).from_pretrained(checkpoint, dtype=torch.float32)
    return model.eval()


def _class_of(config: Any) -> Any:
    if config.model_type == "whisper":
        return transformers.WhisperForConditionalGeneration
    if hasattr(config, "audio_config"):
        return transformers.Qwen2AudioForConditionalGeneration
    pictured = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if pictured else transformers.AutoModelForCausalLM


def _fourth_token(model: Any, tokenizer: Any) -> int:
    """Of its answer to `ENDS`."""
    turns = [{"role": "user", "content": ENDS}]
    asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        ids = model.generate(**asked, max_new_tokens=4, do_sample=False, eos_token_id=None)
    return int(ids[0, -1])


def name_as_published(weights: Path) -> None:
    """transformers reads, but does not write, the names that vLLM knows."""
    tower, language = "vision_tower.", "language_model.model."
    names = {
        tower: f"{tower}vision_model.",
        f"{language}model.": language,
        f"{language}lm_head.": "language_model.lm_head.",
    }
    tensors = load_file(weights)
    for written, published in names.items():
        tensors = {name.replace(written, published): tensor for name, tensor in tensors.items()}
    save_file(tensors, weights, {"format": "pt"})


def text_checkpoint(name: str, *, template: bool = True) -> Path:
    """One of `MODELS`, `PICTURED`, `UNIFIED`, `HEARING` or `TRANSCRIBING`. Without its template it is a base model."""

    def make(out: Path) -> None:
        if name in UNIFIED:
            make_checkpoint(out, 0, "tiny", name)
            tokenizer = transformers.AutoTokenizer.from_pretrained(out)
            ends = [tokenizer.eos_token_id, _fourth_token(load(out), tokenizer)]
            edit_json(out / "generation_config.json", {"eos_token_id": ends})
            return
        processor, config = {**MODELS, **PICTURED, **HEARING, **TRANSCRIBING}[name]()
        tokenizer = getattr(processor, "tokenizer", processor)
        torch.manual_seed(0)
        kind = _class_of(config)
        model: Any = getattr(kind, "from_config", kind)(config).float()
        randomize(model)
        prefer_text(model.get_output_embeddings().weight, tokenizer, tokenizer.all_special_tokens)
        if name not in TRANSCRIBING:
            ends = [tokenizer.eos_token_id, _fourth_token(model.eval(), tokenizer)]
            model.generation_config.eos_token_id = ends
        if not template:
            tokenizer.chat_template = None
        model.save_pretrained(out)
        processor.save_pretrained(out)
        if name in ("llava", "gemma3_images", *HEARING):
            name_as_published(out / "model.safetensors")

    sources = SOURCE if name in UNIFIED else []
    return kept_folder(make, "text", name, template, Path(__file__), *sources)
