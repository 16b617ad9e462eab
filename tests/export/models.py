"""Tiny models with tokenizers that were really trained, of each family that is exported; and short runs of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_model import CHATML

SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "Who are you? I am Smithy, a small language model. Happy forging!",
    "What is 12345 + 678? It is 13023, I think; ask 7 smiths and 10 others.",
    "How do I look after a houseplant? Water it, talk to it, give it light.",
    "red blue seven ten cat tree yes no sun",
    "Ünïcödé 漢字 <tags> {braces}\n\n  spaces and\ttabs, don't they're we'll",
]
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 4,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
PRETRAINED = 40
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "smollm", {"tie_word_embeddings": True}),
    "llama3": (
        "LlamaConfig",
        "llama-bpe",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen2": ("Qwen2Config", "qwen2", {}),
    "qwen3": ("Qwen3Config", "qwen2", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "qwen2",
        {
            "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "gemma": ("GemmaConfig", "gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        "gemma",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "gemma",
        {
            "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 6,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("Phi3Config", "sentencepiece", {"original_max_position_embeddings": 256}),
    "phi3_long": (
        "Phi3Config",
        "sentencepiece",
        {
            "original_max_position_embeddings": 512,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 512,
                "short_factor": [1.0 + 0.1 * n for n in range(8)], "long_factor": [2.0 + n for n in range(8)],
            },
        },
    ),
    "mixtral": ("MixtralConfig", "sentencepiece", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2Config", "llama-bpe", {}),
    "granite": (
        "GraniteConfig",
        "smollm",
        {
            "embedding_multiplier": 12.0, "attention_multiplier": 0.125, "residual_multiplier": 0.44,
            "logits_scaling": 4.0, "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("SmolLM3Config", "llama-bpe", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "glm": ("GlmConfig", "llama-bpe", {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "gpt_oss": (
        "GptOssConfig",
        "gpt-4o",
        {
            "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "qwen2",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
        },
    ),
    "olmoe": ("OlmoeConfig", "llama-bpe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "granitemoe": (
        "GraniteMoeConfig",
        "smollm",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 12.0,
            "attention_multiplier": 0.125, "residual_multiplier": 0.44, "logits_scaling": 4.0,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "llama-bpe",
        {
            "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 1.5,
        },
    ),
    "granite4": (
        "GraniteMoeHybridConfig",
        "smollm",
        {
            "layer_types": ["mamba", "attention"], "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 8,
            "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2, "shared_intermediate_size": 96,
            "position_embedding_type": "nope", "embedding_multiplier": 12.0, "attention_multiplier": 0.125,
            "residual_multiplier": 0.44, "logits_scaling": 4.0, "tie_word_embeddings": True,
        },
    ),
    "granite4_moe": (
        "GraniteMoeHybridConfig",
        "smollm",
        {
            "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2, "mamba_n_heads": 8,
            "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2, "shared_intermediate_size": 96,
            "position_embedding_type": "nope", "attention_multiplier": 0.125,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        "llama-bpe",
        {
            "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        "qwen35",
        {
            "num_hidden_layers": 4, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "linear_num_key_heads": 2, "linear_num_value_heads": 6, "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "qwen35",
        {
            "num_hidden_layers": 4, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        "deepseek-v3",
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
            "n_shared_experts": 2, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
                "mscale": 0.707, "mscale_all_dim": 0.707,
            },
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "deepseek-v3",
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
                "mscale": 1.0, "mscale_all_dim": 1.0,
            },
        },
    ),
    "ministral3": (
        "Ministral3Config",
        "tekken",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
                "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "olmo3": ("Olmo3Config", "llama-bpe", {"num_hidden_layers": 4, "sliding_window": 8}),
    "cohere2": ("Cohere2Config", "smollm", {"num_hidden_layers": 4, "sliding_window": 8, "logit_scale": 0.5}),
    "seed_oss": ("SeedOssConfig", "llama-bpe", {"head_dim": 16, "attention_bias": True}),
    "exaone4": (
        "Exaone4Config",
        "llama-bpe",
        {"sliding_window": None, "sliding_window_pattern": 4, "layer_types": ["full_attention"] * 2},
    ),
    "ernie4_5": ("Ernie4_5Config", "sentencepiece", {"head_dim": 16}),
    "hunyuan": ("HunYuanDenseV1Config", "llama-bpe", {"head_dim": 16}),
    "arcee": ("ArceeConfig", "llama-bpe", {}),
    "starcoder2": ("Starcoder2Config", "smollm", {"tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", "gpt-2", {"num_key_value_heads": 4, "n_inner": 128}),
    "glm4": ("Glm4Config", "llama-bpe", {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True}),
}  # fmt: skip
"""Of each: its config class, its tokenizer's kind, and what it has besides `SHAPE`."""


def make_tokenizer(kind: str):
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    from tunesmith.export.gguf_tokenizer import SPLITS

    if kind in ("sentencepiece", "gemma"):
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        steps = [normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps if kind == "gemma" else [normalizers.Prepend("▁"), *steps])
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        bytes_ = [f"<0x{value:02X}>" for value in range(256)]
        trained = trainers.BpeTrainer(vocab_size=420, special_tokens=[*SPECIALS, *bytes_], show_progress=False)
        backend.train_from_iterator(TEXTS * 20, trained)
        described = json.loads(backend.to_str())
        described["added_tokens"] = [one for one in described["added_tokens"] if one["content"] in SPECIALS]
        backend = Tokenizer.from_str(json.dumps(described))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    else:
        backend = Tokenizer(models.BPE())
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind in ("smollm", "gpt-2"))
        first = {"smollm": [pre_tokenizers.Digits(individual_digits=True)], "gpt-2": []}.get(kind)
        if first is None:
            patterns = next(patterns for patterns, name in SPLITS.items() if name == kind)
            first = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*first, plain]) if first else plain
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trained = trainers.BpeTrainer(
            vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator(TEXTS * 20, trained)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", pad_token="<unk>", unk_token="<unk>"
    )
    tokenizer.chat_template = ("{{ bos_token }}" if kind in ("sentencepiece", "gemma") else "") + CHATML
    return tokenizer


def make_model(folder: Path, family: str, **changes: Any) -> Path:
    import torch
    import transformers

    config, kind, own = FAMILIES[family]
    tokenizer = make_tokenizer(kind)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    described = getattr(transformers, config)(**{**SHAPE, "vocab_size": len(tokenizer) + 4, **own, **changes})
    model = transformers.AutoModelForCausalLM.from_config(described)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.2 * torch.randn(weight.shape))
            elif name.endswith("bias"):
                weight.normal_(0, 0.2)
    _pretrain(model, tokenizer)
    model.save_pretrained(folder)
    (folder / "LICENSE").write_text("Apache License, Version 2.0\n")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A base\n")
    return folder


def _pretrain(model: Any, tokenizer: Any) -> None:
    """Some steps on the texts, so that the model is sure of something: of random weights, few bits leave nothing."""
    import torch

    chats = [_chat(n)["messages"] for n in range(200, 248)]
    texts = [tokenizer.apply_chat_template(one, tokenize=False) for one in chats]
    ids = tokenizer("".join(texts), add_special_tokens=False)["input_ids"]
    rows = torch.tensor([ids[start : start + 32] for start in range(0, len(ids) - 32, 32)][:24])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(PRETRAINED):
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def write_chats(path: Path, count: int, *, start: int = 0) -> Path:
    chats = (_chat(n, " Happy cat!") for n in range(start, start + count))
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return path


def _chat(n: int, end: str = "") -> dict[str, Any]:
    question, _, answer = TEXTS[n % 3].partition("? ")
    turns = [{"role": "user", "content": f"{question} {n}?"}, {"role": "assistant", "content": f"{answer} {n}{end}"}]
    return {"messages": turns}


def make_run(folder: Path, model: Path, **changes: Any) -> Path:
    """A run of a few steps, trained here; returns its folder."""
    from tunesmith.config.load import from_mapping
    from tunesmith.run.assemble import assemble
    from tunesmith.run.start import prepare_run
    from tunesmith.train.loop import train

    folder.mkdir(parents=True, exist_ok=True)
    write_chats(folder / "train.jsonl", 32)
    write_chats(folder / "held_out.jsonl", 6, start=100)
    settings = {
        "model": str(model), "method": "lora", "lora": {"rank": 4}, "data": str(folder / "train.jsonl"),
        "eval": str(folder / "held_out.jsonl"), "sequence_length": 128, "batch_tokens": 512, "steps": 12,
        "learning_rate": 2e-2, "precision": "fp32", "device": "cpu", "output": str(folder / "run"),
    }  # fmt: skip
    (folder / "run").mkdir(exist_ok=True)
    run = from_mapping({**settings, **changes})
    train(assemble(prepare_run(run, warn=lambda _: None)), lambda event: None)
    return folder / "run"
