"""Adapters that do not begin at nothing: initialisations, and adapters that exist, ours or peft's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tiny import write_all
from tunesmith.config.load import from_mapping
from tunesmith.errors import UserError
from tunesmith.run.folder import read_summary
from tunesmith.run.open import open_run
from tunesmith.train import events

peft = pytest.importorskip("peft")
TOKENS = torch.arange(3, 40)[None]
LORA = {"rank": 3, "alpha": 6}


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS, use_cache=False).logits.float()


def plain(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in events.read(run) if record["event"] == "step"]


def train(runs, folder: Path, model: Path, **changes) -> Path:
    write_all(folder, model, **{"epochs": 1, **changes})
    ended = runs(folder, "train", "run.yaml", "--plan", "plan.json")
    assert ended.code == 0, ended.err
    return folder / "run"


@pytest.fixture(scope="module")
def drawn(runs, tiny_model, tmp_path_factory) -> Path:
    return train(runs, tmp_path_factory.mktemp("drawn") / "run", tiny_model, lora=LORA)


@pytest.mark.parametrize(
    ("init", "more"),
    [
        ("pissa", {"dora": True}),
        ("lora-ga", {}),
        pytest.param("pissa", {}, marks=pytest.mark.slow),
        pytest.param("olora", {"rank_stabilised": True}, marks=pytest.mark.slow),
        pytest.param("eva", {}, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_begins_elsewhere_begins_as_the_base_and_saves_for_the_unchanged_base(
    runs, tiny_model, drawn, tmp_path, init, more
):
    run = train(runs, tmp_path / init, tiny_model, lora={**LORA, "init": init, **more})
    assert losses(run)[0] == pytest.approx(losses(drawn)[0], abs=2e-5)
    assert losses(run)[1] != losses(drawn)[1]
    theirs = peft.PeftModel.from_pretrained(plain(tiny_model), run / "adapter").eval()
    ours = open_run(run).model
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-4, atol=1e-4)
    found = load_file(run / "start" / "adapter_model.safetensors")
    assert all(value.isfinite().all() and value.any() for key, value in found.items() if "lora_A" in key)
    (run / "adapter").rename(run / "elsewhere")
    torch.testing.assert_close(logits(open_run(run).model), logits(ours), rtol=1e-4, atol=1e-4)  # the checkpoint's


def test_an_adapter_is_trained_on_from_where_it_was(runs, tiny_model, drawn, tmp_path):
    run = train(runs, tmp_path / "on", tiny_model, adapter=str(drawn / "adapter"), lora={})
    assert read_summary(run)["held_out_before"] == pytest.approx(read_summary(drawn)["held_out_after"], abs=1e-6)
    again = open_run(run).model
    assert (logits(again) - logits(open_run(drawn).model)).abs().max() > 1e-3


def test_what_an_adapter_says_of_itself_becomes_the_settings_and_may_not_be_contradicted(tiny_model, drawn, tmp_path):
    given = {"model": str(tiny_model), "data": "x", "adapter": str(drawn / "adapter")}
    run = from_mapping(given)
    assert (run.lora.rank, run.lora.alpha, run.lora.dora) == (3, 6.0, False)
    assert "q_proj" in run.lora.targets
    with pytest.raises(UserError, match=r"lora.rank is 8, but the adapter in .* has 3; leave it out"):
        from_mapping({**given, "lora": {"rank": 8}})
    with pytest.raises(UserError, match="holds no adapter"):
        from_mapping({**given, "adapter": str(tmp_path)})
    with pytest.raises(UserError, match=r"holds no adapter; give .*/adapter\.$"):
        from_mapping({**given, "adapter": str(drawn)})
    with pytest.raises(UserError, match="qlora holds no adapter; the way of training is the setting `method: qlora`"):
        from_mapping({**given, "adapter": "qlora"})
    with pytest.raises(UserError, match="loftq"):
        from_mapping({"model": "m", "data": "x", "lora": {"init": "loftq"}})
    config = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    peft.get_peft_model(plain(tiny_model), config).save_pretrained(tmp_path / "ia3")
    with pytest.raises(UserError, match="is of type IA3; use method: peft for it"):
        from_mapping({**given, "adapter": str(tmp_path / "ia3")})


def of_peft(model: Path, folder: Path, **settings) -> dict:
    made = peft.get_peft_model(plain(model), peft.LoraConfig(target_modules=["q_proj"], r=2, **settings))
    made.save_pretrained(folder)
    return {"model": str(model), "data": "x", "adapter": str(folder)}


def test_an_adapter_on_some_layers_stays_on_these(tiny_model, tmp_path):
    run = from_mapping(of_peft(tiny_model, tmp_path / "adapter", layers_to_transform=[1]))
    assert run.lora.targets == ["model.layers.1.self_attn.q_proj"]


@pytest.mark.parametrize("method", ["lora", "peft"])
def test_an_adapter_over_a_base_that_was_changed_for_it_is_refused(tiny_model, tmp_path, method):
    given = of_peft(tiny_model, tmp_path / "adapter", init_lora_weights="pissa")
    with pytest.raises(UserError, match="belongs to a base that `init_lora_weights: pissa` has changed"):
        from_mapping({**given, "method": method})


def test_an_adapter_for_another_model_is_refused_in_a_sentence(runs, drawn, tmp_path):
    from tiny_model import make_tiny_model

    other = make_tiny_model(tmp_path / "other", hidden_size=64)
    write_all(tmp_path / "x", other, adapter=str(drawn / "adapter"), lora={}, epochs=1)
    ended = runs(tmp_path / "x", "train", "run.yaml", "--plan", "plan.json")
    assert ended.code != 0
    assert "does not fit this model" in ended.err
