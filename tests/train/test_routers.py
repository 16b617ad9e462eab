"""The load-balancing loss of routers is transformers' own, however documents are laid out, and what routers do is
recorded."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from families import causal_families, tiny_model
from tiny import SETTINGS, write_data
from tiny_model import make_tiny_model
from tunesmith.config.load import from_mapping
from tunesmith.config.schema import Lora, Run
from tunesmith.data.loader import PackedDocument, idle, micro_batch_of
from tunesmith.data.types import StepBatch
from tunesmith.errors import UserError
from tunesmith.model import attention, lora
from tunesmith.model.forward import Shape, own_attention
from tunesmith.model.routers import Routing, balance_of, find_routers, router_loss_of
from tunesmith.optim.build import Optimizer
from tunesmith.parallel.activation import checkpointed
from tunesmith.parallel.compile import compiled, news
from tunesmith.plan.plan import ForwardSpec
from tunesmith.run.assemble import assemble
from tunesmith.run.choose import new_plan
from tunesmith.run.start import prepare_run
from tunesmith.train import events
from tunesmith.train.alerts import Alerts
from tunesmith.train.loop import train
from tunesmith.train.step import TrainStep

LENGTHS = (5, 9, 3, 14, 7, 11)
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SMALL |= {"vocab_size": 100, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MANY = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 64}
FEW = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
WEIGHT = 0.05
ONE = [[0, 1, 2, 3, 4, 5]]
SLOW = pytest.mark.slow


def make(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    attention.register()
    if kind == "qwen":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **MANY, router_aux_loss_coef=WEIGHT))
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SMALL, **FEW, router_aux_loss_coef=WEIGHT))
    window = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    return GptOssForCausalLM(GptOssConfig(**SMALL, **FEW, **window, router_aux_loss_coef=WEIGHT))


def documents() -> list[PackedDocument]:
    random = np.random.Generator(np.random.PCG64(0))
    made = []
    for index, length in enumerate(LENGTHS):
        weights = np.ones(length, dtype=np.float32)
        weights[: length // 2] = 0
        made.append(PackedDocument(random.integers(3, 100, length), weights, 0, f"d, line {index}"))
    return made


def step_of(groups: list[list[int]]) -> StepBatch:
    docs = documents()
    parts = [[docs[i] for i in group] if group else [idle(docs[0])] for group in groups]
    return StepBatch(
        step=15,
        epoch=1.0,
        micro_batches=tuple(map(micro_batch_of, parts)),
        target_weight=float(sum(document.weights[1:].sum() for document in docs)),
        tokens=sum(LENGTHS),
    )


def ours(model, groups, *, layout="packed", weight=WEIGHT, wrap=None, shape=None):
    """Result and gradients of one step."""
    model.train().set_attn_implementation(attention.NAME if layout == "packed" else own_attention(model))
    routing = Routing(model, weight)
    routing.every = 16
    for name in routing.routers:
        routing.watch(name)
    for layer in model.model.layers if wrap else ():
        layer.forward = wrap(layer.forward)
    optimizer = Optimizer(model.named_parameters(), Run(model="x", data="x"), master_weights=False)
    found = {}

    def keep(_rate: float) -> None:
        found.update({name: one.grad.clone() for name, one in optimizer.masters.items() if one.grad is not None})

    optimizer.step = keep
    options = {"device": torch.device("cpu"), "max_grad_norm": None, "seed": 0, "shape": shape, "routing": routing}
    return TrainStep(model, ForwardSpec(layout), optimizer, **options)(step_of(groups), 1.0), found


def plain(model, groups, weight=WEIGHT):
    """The definition: transformers' own loss of each micro-batch, padded, and its gradient."""
    model.train().set_attn_implementation(own_attention(model))
    docs, targets, losses, balance = documents(), 0.0, 0.0, 0.0
    targets = sum(document.weights[1:].sum() for document in docs)
    for group in groups:
        longest = max(LENGTHS[i] for i in group)
        ids, labels, mask = torch.zeros(3, len(group), longest, dtype=torch.int64)
        for row, i in enumerate(group):
            length, weights = LENGTHS[i], torch.from_numpy(docs[i].weights)
            ids[row, :length] = torch.from_numpy(docs[i].ids)
            mask[row, :length] = 1
            labels[row, :length] = torch.where(weights > 0, ids[row, :length], -100)
            labels[row, length:] = -100
        out = model(input_ids=ids, attention_mask=mask, labels=labels, output_router_logits=True)
        own = out.loss - WEIGHT * out.aux_loss
        here = (labels[:, 1:] != -100).sum()
        share = sum(LENGTHS[i] for i in group) / sum(LENGTHS)
        (own * here / targets + weight * share * out.aux_loss).backward()
        losses, balance = losses + (own * here / targets).item(), balance + share * out.aux_loss.item()
    return losses, balance, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def assert_equal(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(1e-3, gradient.abs().max().item())
        assert (found[name] - gradient).abs().max().item() <= tolerance * scale, name


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("kind", ["qwen", "mixtral", "gpt_oss"])
def test_loss_and_gradients_are_those_of_transformers(kind, layout):
    result, found = ours(make(kind), ONE, layout=layout)
    losses, balance, expected = plain(make(kind), ONE)
    assert result.loss == pytest.approx(losses, rel=1e-5)
    assert result.figures["router_loss"] == pytest.approx(balance, rel=1e-5)
    assert_equal(found, expected)
    router = next(name for name in expected if "gate.weight" in name or "router.weight" in name)
    without = plain(make(kind), ONE, weight=0.0)[2]
    assert (expected[router] - without[router]).abs().max() > 1e-3 * expected[router].abs().max()  # it has an effect


@pytest.mark.parametrize("groups", [[[0, 1, 2], [3, 4, 5]], [[3], [], [0, 1], [2, 4, 5]]])
def test_micro_batches_count_by_their_tokens(groups):
    result, found = ours(make("qwen"), groups)
    losses, balance, expected = plain(make("qwen"), [group for group in groups if group])
    assert result.loss == pytest.approx(losses, rel=1e-5)
    assert result.figures["router_loss"] == pytest.approx(balance, rel=1e-5)
    assert_equal(found, expected)


def test_padding_that_fills_up_a_shape_does_not_count():
    result, found = ours(make("qwen"), ONE, shape=Shape(64, 16))
    expected, gradients = ours(make("qwen"), ONE)
    assert result.figures["router_loss"] == pytest.approx(expected.figures["router_loss"], rel=1e-6)
    assert [one.shares for one in result.routers] == [one.shares for one in expected.routers]
    assert_equal(found, gradients)


def test_adapters_get_the_gradient_that_peft_gives_them():
    model, other = make("qwen"), make("qwen")
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "lora_dropout": 0.0}
    peer = get_peft_model(other, LoraConfig(**settings))
    lora.attach(model, Lora(rank=4, alpha=8, targets=["q_proj", "o_proj"]), seed=0)
    theirs = dict(peer.named_parameters())
    with torch.no_grad():
        for name, adapter in lora.adapters(model).items():
            adapter.lora_b.add_(0.05)
            theirs[f"base_model.model.{name}.lora_A.default.weight"].copy_(adapter.lora_a)
            theirs[f"base_model.model.{name}.lora_B.default.weight"].copy_(adapter.lora_b)
    result, found = ours(model, ONE)
    losses, balance, expected = plain(peer.base_model.model, ONE)
    assert result.loss == pytest.approx(losses, rel=1e-5)
    assert result.figures["router_loss"] == pytest.approx(balance, rel=1e-5)
    kinds = {"lora_A.default.weight": "lora_a", "lora_B.default.weight": "lora_b"}
    renamed = {name.replace(*pair): one for name, one in expected.items() for pair in kinds.items() if pair[0] in name}
    assert_equal(found, renamed)


@pytest.mark.parametrize("way", ["checkpointed", *(pytest.param(one, marks=SLOW) for one in ("compiled", "both"))])
def test_layers_that_are_computed_again_or_compiled_give_the_same(way):
    ways = {
        "checkpointed": checkpointed,
        "compiled": lambda forward: compiled(forward, "layer"),
        "both": lambda forward: compiled(checkpointed(forward), "layer", fullgraph=True),
    }
    model = make("mixtral")
    model.set_experts_implementation("batched_mm")  # the grouped matmuls of a CPU have no backward for the compiler
    news()
    result, found = ours(model, [[0, 1, 2], [3, 4, 5]], wrap=ways[way], layout="padded")  # all in one graph
    told = news()
    assert (told is None) == (way == "checkpointed")
    assert told is None or not told.notes
    expected, gradients = ours(make("mixtral"), [[0, 1, 2], [3, 4, 5]])
    assert result.loss == pytest.approx(expected.loss, rel=1e-5)
    assert result.figures["router_loss"] == pytest.approx(expected.figures["router_loss"], rel=1e-5)
    assert [one.shares for one in result.routers] == [one.shares for one in expected.routers]
    assert_equal(found, gradients, 2e-5)


def test_without_the_loss_nothing_is_added_and_routers_are_counted_all_the_same():
    result, found = ours(make("qwen"), ONE, weight=0.0)
    _, _, expected = plain(make("qwen"), ONE, weight=0.0)
    assert "router_loss" not in result.figures
    assert_equal(found, expected)
    model, choices = make("qwen").eval(), {}
    for name, (router, _) in find_routers(model).items():
        router.register_forward_hook(lambda _, __, out, name=name: choices.setdefault(name, []).append(out[2]))
    with torch.no_grad():
        for document in documents():
            model(input_ids=torch.from_numpy(document.ids)[None])
    assert len(result.routers) == len(choices) == 2
    for one, every in zip(result.routers, choices.values(), strict=True):
        counts = torch.bincount(torch.cat(every).view(-1), minlength=8)
        assert one.shares == pytest.approx((counts / counts.sum()).tolist(), abs=1e-5)
        assert one.idle == (counts == 0).sum()


def test_balance_goes_from_even_to_one_expert():
    even, single = balance_of([5, 5, 5, 5]), balance_of([20, 0, 0, 0])
    assert (even.busiest, even.entropy, even.idle) == (1.0, pytest.approx(1.0), 0)
    assert (single.busiest, single.entropy, single.idle) == (4.0, 0.0, 3)
    assert single.shares == [1, 0, 0, 0]


def test_families_that_are_balanced_by_a_bias_have_no_loss():
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    config = DeepseekV3Config(**SMALL | {"head_dim": 4}, **sizes, **ranks, moe_intermediate_size=16)
    model = DeepseekV3ForCausalLM(config)
    assert router_loss_of(model) is None
    assert list(find_routers(model)) == ["model.layers.1.mlp.gate"]


def test_a_run_records_its_routers_and_their_loss(tmp_path):
    folder = write_mixture(tmp_path / "model", output_router_logits=True)
    outcome, logged = trained(tmp_path, folder, steps=17, eval=[])
    assert outcome.is_finished
    found = [one for one in logged if one["event"] == "routers"]
    assert [one["step"] for one in found] == [1, 16]
    for one in found:
        assert one["layers"] == [0, 1]
        assert len(one["busiest"]) == len(one["entropy"]) == len(one["idle"]) == 2
        assert all(len(shares) == 8 and math.isclose(sum(shares), 1, abs_tol=1e-3) for shares in one["shares"])
    steps = [one for one in logged if one["event"] == "step"]
    assert all(one["figures"]["router_loss"] >= 1.9 for one in steps)  # 2 experts of a token: 2 where all is even
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["router_loss"] == WEIGHT
    assert any("output_router_logits" in reason["why"] for reason in plan["reasons"])


def test_the_setting_goes_before_the_models_config(tmp_path):
    asked = write_mixture(tmp_path / "model", output_router_logits=True)
    _, logged = trained(tmp_path, asked, steps=1, eval=[], router_aux_loss_coef=0)
    assert not any("router_loss" in one.get("figures", {}) for one in logged)
    assert any(one["event"] == "routers" for one in logged)
    silent = write_mixture(tmp_path / "silent")
    assert prepared(tmp_path, silent, output=str(tmp_path / "a")).plan.router_loss == 0
    given = prepared(tmp_path, silent, output=str(tmp_path / "b"), router_aux_loss_coef=0.02)
    assert given.plan.router_loss == 0.02


def test_a_model_without_the_loss_refuses_the_setting_in_a_sentence(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    with pytest.raises(UserError, match="router_aux_loss_coef: LlamaForCausalLM has no load-balancing loss"):
        prepared(tmp_path, folder, router_aux_loss_coef=0.01)


def test_a_plan_that_cuts_up_micro_batches_refuses_the_loss(tmp_path):
    folder = write_mixture(tmp_path / "model")
    run = run_of(tmp_path, folder, router_aux_loss_coef=0.01)
    plan = new_plan(run).changed(mesh={"pipeline": 2})
    with pytest.raises(UserError, match="load-balancing loss of routers is over all layers"):
        prepare_run(run, plan=plan, warn=print)


def collapse(*shares: list[float]) -> list[events.Alert]:
    alerts, found = Alerts(), []
    for step, one in enumerate(shares):
        even = [1 / len(one)] * len(one)
        found += alerts.see(events.Routers.of(16 * step + 1, [0, 3], [balance_of(even), balance_of(one)]))
    return found


def test_routers_that_collapse_raise_an_alert_when_they_stay_so():
    even, some = [1 / 8] * 8, [0.97, 0.01, 0.01, 0.01, 0, 0, 0, 0]
    assert not collapse(even, some)
    assert not collapse(even, some, even, some, even)
    assert not collapse(some, some, some)  # that is how the base came
    (alert,) = collapse(even, some, some)
    assert alert.name == "collapsed routers"
    assert "1 of 2 layers" in alert.evidence
    assert "in layer 3 to about 1.2, and 8.0 then" in alert.evidence


@pytest.mark.slow
def test_every_family_with_the_loss_gives_that_of_transformers():
    tried = []
    for family in causal_families():
        try:
            model = tiny_model(family)
        except Exception:
            continue  # test_families says what is wrong with it
        if router_loss_of(model) is None:
            continue
        tried.append(family)
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        out = model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False)
        (0.05 * out.aux_loss).backward()
        expected = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        model.zero_grad()
        routing = Routing(model, 0.05)
        for name in routing.routers:
            routing.watch(name)
        routing.record.open(mask.view(-1).float(), counts=True)
        hidden = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        found, counts = routing.record.close(0.05)
        assert found.item() == pytest.approx(out.aux_loss.item(), rel=1e-5), family
        assert all(one.sum() % mask.sum() == 0 for one in counts.values()), family
        (hidden.sum() * 0).backward()
        for name, gradient in expected.items():
            made = dict(model.named_parameters())[name].grad
            assert (made - gradient).abs().max() <= 1e-5 * max(1e-4, gradient.abs().max().item()), (family, name)
    assert {"qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "olmoe", "qwen3_next", "jamba"} <= set(tried)


def write_mixture(folder: Path, **changes: object) -> Path:
    make_tiny_model(folder)  # for its tokenizer
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SMALL | {"vocab_size": vocabulary}, **MANY, router_aux_loss_coef=WEIGHT, **changes)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def run_of(folder: Path, model: Path, **changes: object) -> Run:
    write_data(folder / "train.jsonl", 60)
    given = {"model": str(model), "data": str(folder / "train.jsonl"), "eval": [], "output": str(folder / "run")}
    return from_mapping(SETTINGS | given | changes)


def prepared(folder: Path, model: Path, **changes: object):
    run = run_of(folder, model, **changes)
    Path(run.output).mkdir(parents=True, exist_ok=True)
    return prepare_run(run, warn=print)


def trained(folder: Path, model: Path, **changes: object):
    job = assemble(prepared(folder, model, **changes))
    log = events.EventLog(job.folder)
    outcome = train(job, log.write)
    log.close()
    return outcome, events.read(job.folder)
