"""What layers keep with adapters of a run's own kind is counted as autograd keeps it, and the plan goes by it."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tunesmith.config.schema import Lora, Run
from tunesmith.model import adapters, attention, lora
from tunesmith.model.forward import Inputs, packed_hidden_states
from tunesmith.model.fuse import fuse
from tunesmith.model.kept import _grown, count_kept, count_own
from tunesmith.model.probe import probe
from tunesmith.model.structure import decoder_layers
from tunesmith.plan import activations
from tunesmith.plan.choice import Task
from tunesmith.plan.facts import KEPT_RANK
from tunesmith.plan.families import from_config
from tunesmith.plan.hardware import named
from tunesmith.run.choose import new_plan

TOKENS = 300
VERA = {"peft_type": "VERA", "r": 16, "target_modules": ["q_proj", "v_proj"]}
OWN = {
    "vera": {"method": "peft", "peft": VERA},
    "ia3": {"method": "peft", "peft": {"peft_type": "IA3"}},
    "oft": {"method": "peft", "peft": {"peft_type": "OFT", "oft_block_size": 8, "target_modules": "all-linear"}},
    "loha": {"method": "peft", "peft": {"peft_type": "LOHA", "r": 4, "target_modules": ["down_proj"]}},
    "hra": {"method": "peft", "peft": {"peft_type": "HRA", "r": 2, "target_modules": "all-linear"}},
    "boft": {"method": "peft", "peft": {"peft_type": "BOFT", "boft_block_size": 2, "target_modules": ["q_proj"]}},
    "shira": {"method": "peft", "peft": {"peft_type": "SHIRA", "r": 1, "target_modules": ["q_proj", "up_proj"]}},
    "waveft": {"method": "peft", "peft": {"peft_type": "WAVEFT", "n_frequency": 12, "target_modules": ["down_proj"]}},
    "vblora": {"method": "peft", "peft": {"peft_type": "VBLORA", "r": 4, "num_vectors": 8, "vector_length": 2}},
    "unilora": {"method": "peft", "peft": {"peft_type": "UNILORA", "r": 4, "target_modules": "all-linear"}},
    "frod": {"method": "peft", "peft": {"peft_type": "FROD", "target_modules": ["q_proj", "o_proj"]}},
    "dora": {"method": "lora", "lora": {"rank": 8, "dora": True}},
    "dropout": {"method": "lora", "lora": {"rank": 8, "dropout": 0.1}},
}


def a_run(folder, data, **settings) -> Run:
    return Run(model=str(folder), data=str(data), sequence_length=64, **settings)


def really_kept(run: Run) -> int:
    """By a layer: a model with one more against one without."""
    attention.register()
    config, sizes = AutoConfig.from_pretrained(run.model), []
    for layers in (2, 3):
        config.num_hidden_layers = layers
        model = AutoModelForCausalLM.from_config(config).train()
        model.set_attn_implementation(attention.NAME)
        model.requires_grad_(False)
        if run.method == "peft":
            model = adapters.put_on(model, run).model
        else:
            lora.attach(model, run.lora, seed=0)
        model.get_input_embeddings().requires_grad_(True)
        for layer in decoder_layers(model):
            fuse(layer, fp8=False, fuse_mlps=False)
        sizes.append(_saved(model))
    return sizes[1] - sizes[0]


def _saved(model: torch.nn.Module) -> int:
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        for one in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
            if one.untyped_storage().data_ptr() not in own:
                kept[one.untyped_storage().data_ptr()] = one
        return tensor

    places = torch.arange(TOKENS)
    inputs = Inputs(places % 40, places, torch.tensor([0, TOKENS]).int(), TOKENS, places, places, places.float())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        packed_hidden_states(model, inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("kind", OWN)
def test_the_count_is_what_autograd_keeps(kind, llama, tmp_path):
    run = a_run(llama, tmp_path / "none.jsonl", **OWN[kind])
    counted = count_own(run, on_gpu=False, kernels=())
    assert counted is not None
    assert TOKENS * counted[0].bytes + counted[0].fixed == pytest.approx(really_kept(run), rel=0.03)
    if kind in ("hra", "loha"):  # they make weights anew
        assert counted[0].fixed > 30_000


@pytest.mark.parametrize(
    "kind", ["vera", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("oft", "loha", "hra"))]
)
def test_narrow_layers_tell_what_wide_ones_keep(kind, llama, tmp_path):
    """By real layers of a few widths, as by the model's own without weights."""
    run = a_run(llama, tmp_path / "none.jsonl", **OWN[kind])
    for on_gpu in (False, True):
        counted = count_own(run, on_gpu=on_gpu, kernels=("rope",) if on_gpu else ())
        assert counted is not None
        found = _grown(run, (8, 4, 2), on_gpu=on_gpu, kernels=("rope",) if on_gpu else ())
        assert found == [(one.bytes, one.fixed) for one in counted]


def test_what_has_a_formula_is_not_counted(llama, tmp_path):
    for settings in (
        {"method": "lora"},
        {"method": "full"},
        {"method": "peft", "peft": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4}},
    ):
        assert count_own(a_run(llama, tmp_path / "none.jsonl", **settings), on_gpu=True, kernels=()) is None


def test_the_plan_goes_by_the_count(llama, tmp_path):
    """IA3 keeps less than adapters on every linear layer."""
    attention.register()
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"text": f"a record, number {number}"}) + "\n" for number in range(50)))
    sizes = {}
    for kind in ("ia3", "dora"):
        run = a_run(llama, data, **OWN[kind])
        found = new_plan(run, named("H200"), probed=probe(run))
        sizes[kind] = found.memory.activations
    assert sizes["ia3"] < sizes["dora"]


SIZES = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8, "vocab_size": 512, "pad_token_id": 0}
HEADS = {"num_key_value_heads": 2, "head_dim": 32}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
FORMULAS = {
    "llama": (HEADS, ("rope", "swiglu")),
    "qwen3": (HEADS, ("rope", "swiglu")),
    "glm": (HEADS, ("swiglu",)),
    "olmo2": (HEADS, ("swiglu",)),
    "cohere2": (HEADS, ("swiglu",)),
    "starcoder2": (HEADS, ("rope",)),
    "phi": ({}, ()),
    "phi3": (HEADS, ("swiglu",)),
    "gpt_neox": ({}, ()),
    "gpt2": ({"n_embd": 256, "n_head": 8, "n_inner": 640, "n_layer": 2, "pad_token_id": None}, ()),
    "gemma": (HEADS, ("rope", "geglu")),
    "gemma2": (HEADS, ("rope", "geglu")),
    "gemma3_text": (HEADS, ("rope", "geglu")),
    "mixtral": (HEADS | EXPERTS, ("rope", "experts")),
    "qwen2_moe": (HEADS | EXPERTS | {"shared_expert_intermediate_size": 192}, ("rope", "swiglu", "experts")),
    "qwen3_moe": (HEADS | EXPERTS, ("rope", "experts")),
}
"""Families with a formula, with the kernels that the probe finds for them on a GPU."""
QUICK = ("gemma3_text", "gpt2", "qwen2_moe")


@pytest.mark.parametrize(
    ("family", "has_kernels"),
    [
        pytest.param(family, has_kernels, marks=() if family in QUICK and has_kernels else pytest.mark.slow)
        for family in FORMULAS
        for has_kernels in (True, False)
    ],
)
def test_a_compiled_layer_keeps_what_the_formulas_say(family, has_kernels):
    """By the compiler's own partition of both passes, with and without kernels of ours."""
    more, found = FORMULAS[family]
    found = found if has_kernels else ()
    config = AutoConfig.for_model(family, **{"num_hidden_layers": 2} | SIZES | more)
    facts = from_config(config.to_dict()).with_findings(found, None)
    counted = count_kept(config, compiles=True, fuses=True, kernels=found)
    assert counted is not None
    for method in ("full", "lora"):
        task = Task(facts, named("H200"), "cuda", "bf16", method, Lora(rank=KEPT_RANK), "adamw", 1024, 1, 900)
        said = activations.layer_bytes(task, facts.kinds[facts.pattern[0]], is_compiled=True)
        kept = counted[0].full if method == "full" else counted[0].adapters
        assert said == pytest.approx(kept, rel=0.006), method
