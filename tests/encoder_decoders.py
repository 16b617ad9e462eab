"""Encoder-decoders so small that a run takes a second: T5's, gated T5's and BART's kinds, each with its own head."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = ["red", "blue", "seven", "ten", "cat", "tree", "yes", "no", "sun"]
SPECIAL = ["<pad>", "</s>", "<s>"]
SIZES = {"d_model": 32, "vocab_size": 260, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
T5 = {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0}
BART = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 128,
    "dropout": 0.0,
    "init_std": 0.2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 1,
}
FAMILIES = {
    "t5": ("T5", T5),
    "flan": ("T5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("Bart", BART),
    "mbart": ("MBart", {**BART, "forced_eos_token_id": None}),
    "pegasus": ("Pegasus", BART),
    "marian": ("Marian", {**BART, "decoder_start_token_id": 0}),
}


def make_encoder_decoder(folder: Path, family: str, **changes: object) -> Path:
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    name, settings = FAMILIES[family]
    backend = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", bos_token="<s>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | settings | changes)
    kind = "MarianMTModel" if name == "Marian" else f"{name}ForConditionalGeneration"
    model = getattr(transformers, kind)(config)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    model.save_pretrained(folder)
    return folder


def write_pairs(path: Path, count: int, seed: int = 0) -> Path:
    """Records of several shapes, with sources and targets of varied length."""
    chance, made = random.Random(seed), []
    for n in range(count):
        source = " ".join(chance.choices(WORDS, k=chance.randint(1, 5)))
        made.append({"prompt": f"{n} {source}", "completion": " ".join(chance.choices(WORDS, k=chance.randint(1, 3)))})
    path.write_text("".join(json.dumps(one) + "\n" for one in made))
    return path
