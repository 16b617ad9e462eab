"""What TRL 1.16 says of the cases in `preference_cases.py`, written into tests/objectives/trl.json when this is run.

TRL's losses are called on tensors made here, so that its tokenizing and batching have no say.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import preference_cases as cases

FILE = Path(__file__).parent / "objectives" / "trl.json"


def padded(rows: list[np.ndarray], fill: int = 0) -> torch.Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row.tolist(), *[fill] * (longest - len(row))] for row in rows])


def batch_of(prompts: list[np.ndarray], answers: list[np.ndarray]) -> dict[str, torch.Tensor]:
    rows = [np.concatenate(both) for both in zip(prompts, answers, strict=True)]
    masks = [np.array([0] * len(p) + [1] * len(a)) for p, a in zip(prompts, answers, strict=True)]
    ones = [np.ones(len(row), dtype=np.int64) for row in rows]
    return {"input_ids": padded(rows), "attention_mask": padded(ones), "completion_mask": padded(masks)}


def trl_gradients(name: str, model_folder: Path, reference_folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one case."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    case = dict((cases.CASES | cases.ROLLOUTS)[name])
    objective = case.pop("objective")
    model, reference = (AutoModelForCausalLM.from_pretrained(str(one)) for one in (model_folder, reference_folder))
    tokenizer = AutoTokenizer.from_pretrained(str(model_folder))
    if name in cases.ROLLOUTS:
        return _rolled_out(objective, case, model, reference, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        make = {"dpo": _dpo, "kto": _kto, "orpo": _orpo, "simpo": _cpo, "cpo": _cpo}[objective]
        loss, trained = make(objective, case, model, reference, tokenizer, folder)
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in trained.named_parameters() if weight.grad is not None}


COMMON = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}


def _prompts_and_answers() -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    found = cases.pairs()
    return [one.prompt for one in found], [one.chosen for one in found], [one.rejected for one in found]


def _data(columns: dict[str, Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(columns)


def _dpo(objective, case, model, reference, tokenizer, folder) -> tuple[torch.Tensor, Any]:
    from trl import DPOConfig, DPOTrainer

    loss = "sigmoid_norm" if case.get("length_normalised") else case.get("loss", "sigmoid")
    losses, weights = ([loss], None) if "sft_weight" not in case else ([loss, "sft"], [1.0, case["sft_weight"]])
    options = {"loss_type": losses, "loss_weights": weights, "beta": case.get("beta", 0.1)}
    options |= {"label_smoothing": case.get("label_smoothing", 0.0)}
    data = _data({"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", "f"]})
    config = DPOConfig(output_dir=folder, **COMMON, **options)
    trainer = DPOTrainer(model, ref_model=reference, args=config, train_dataset=data, processing_class=tokenizer)
    prompts, chosen, rejected = _prompts_and_answers()
    return trainer._compute_loss(trainer.model, batch_of([*prompts, *prompts], [*chosen, *rejected]), False), model


def _kto(objective, case, model, reference, tokenizer, folder) -> tuple[torch.Tensor, Any]:
    from trl import KTOConfig, KTOTrainer

    data = _data({"prompt": ["a", "b"], "completion": ["c", "d"], "label": [True, False]})
    config = KTOConfig(output_dir=folder, per_device_train_batch_size=2, **COMMON, **case)
    trainer = KTOTrainer(model, ref_model=reference, args=config, train_dataset=data, processing_class=tokenizer)
    prompts, chosen, _ = _prompts_and_answers()
    others = batch_of(prompts, [cases.other_answer(i) for i in range(len(prompts))])
    batch = {**batch_of(prompts, chosen), **{f"KL_{key}": value for key, value in others.items()}}
    return trainer._compute_loss(trainer.model, {**batch, "label": torch.tensor(cases.LABELS)}, False), model


def _pair_batch() -> dict[str, torch.Tensor]:
    prompts, *answers = _prompts_and_answers()
    made = {}
    for name, some in zip(("chosen", "rejected"), answers, strict=True):
        batch = batch_of(prompts, some)
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
        of_name = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}
        made |= {f"{name}_{key}": value for key, value in of_name.items()}
    prompt = batch_of(prompts, [np.zeros(0, dtype=np.int64)] * len(prompts))
    return made | {"prompt_input_ids": prompt["input_ids"], "prompt_attention_mask": prompt["attention_mask"]}


def _orpo(objective, case, model, reference, tokenizer, folder) -> tuple[torch.Tensor, Any]:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    data = _data({"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", "f"]})
    config = ORPOConfig(output_dir=folder, **COMMON, **case)
    trainer = ORPOTrainer(model, args=config, train_dataset=data, processing_class=tokenizer)
    return trainer.get_batch_loss_metrics(trainer.model, _pair_batch())[0], model


def _cpo(objective, case, model, reference, tokenizer, folder) -> tuple[torch.Tensor, Any]:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    options = {"beta": case.get("beta", 0.1), "label_smoothing": case.get("label_smoothing", 0.0)}
    options |= {"loss_type": case.get("loss", "sigmoid"), "cpo_alpha": case.get("sft_weight", 1.0)}
    if objective == "simpo":
        options |= {"loss_type": "simpo", "simpo_gamma": case["margin"]}
        options |= {"beta": case.get("beta", 2.0), "cpo_alpha": case.get("sft_weight", 0.0)}
    data = _data({"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", "f"]})
    config = CPOConfig(output_dir=folder, **COMMON, **options)
    trainer = CPOTrainer(model, args=config, train_dataset=data, processing_class=tokenizer)
    return trainer.get_batch_loss_metrics(trainer.model, _pair_batch())[0], model


def _rolled_out(objective, case, model, reference, tokenizer) -> tuple[float, dict[str, torch.Tensor]]:
    """Both answers to each prompt, with rewards that are given and log-probabilities of sampling that are made up."""
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    found = cases.pairs()
    prompts = [one.prompt for one in found for _ in range(2)]
    answers = [answer for one in found for answer in (one.chosen, one.rejected)]
    options = {"temperature": case.get("temperature", 1.0), "beta": case.get("beta", 0.0), "num_generations": 2}
    options |= {"epsilon": case.get("epsilon", 0.2), "epsilon_high": case.get("epsilon_high")}
    options |= {"max_completion_length": case.get("max_answer_tokens", 256), "per_device_train_batch_size": 10}
    if objective == "grpo":
        options |= {"loss_type": case.get("loss", "dapo"), "importance_sampling_level": case.get("ratios", "token")}
    kinds = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[objective]
    with tempfile.TemporaryDirectory() as folder:
        config = kinds[0](output_dir=folder, **COMMON, **options)
        data = _data({"prompt": ["a"] * 10})
        about = {"args": config, "train_dataset": data, "processing_class": tokenizer}
        trainer = kinds[1](model, reward_funcs=lambda completions, **_: [0.0] * len(completions), **about)
    trainer.current_gradient_accumulation_steps = 1
    width = max(map(len, prompts))
    lefts = [np.concatenate([np.zeros(width - len(p), dtype=np.int64), p]) for p in prompts]
    masks = [np.repeat([0, 1], [width - len(p), len(p)]) for p in prompts]
    ones = [np.ones(len(answer), dtype=np.int64) for answer in answers]
    inputs = {"prompt_ids": padded(lefts), "prompt_mask": padded(masks), "completion_ids": padded(answers)}
    inputs |= {"completion_mask": padded(ones), "num_items_in_batch": torch.tensor(float(sum(map(len, answers))))}
    both = [torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask")]
    with torch.no_grad():
        logits = reference.eval()(input_ids=both[0], attention_mask=both[1]).logits[:, width - 1 : -1]
        logps = torch.log_softmax(logits / options["temperature"], -1)
        base = logps.gather(-1, inputs["completion_ids"][..., None])[..., 0]
    old = [cases.sampled(row[: len(answer)].numpy()) for row, answer in zip(base, answers, strict=True)]
    old = torch.stack([torch.nn.functional.pad(torch.tensor(one), (0, base.shape[1] - len(one))) for one in old])
    inputs |= {"ref_per_token_logps": base, "old_per_token_logps": old.float()}
    inputs |= {"old_logps": (old * inputs["completion_mask"]).sum(1).float()}
    inputs["advantages"] = _advantages(objective, case).float()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def _advantages(objective, case) -> torch.Tensor:
    """As the trainers write them, after they have asked for rewards."""
    from trl.trainer.utils import nanstd

    rewards = torch.tensor(cases.REWARDS).float()
    if objective == "rloo":
        ahead = (rewards - (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)).flatten()
        is_scaled = case.get("scale_rewards") == "batch"
        return (ahead - torch.nanmean(ahead)) / (nanstd(ahead) + 1e-4) if is_scaled else ahead
    ahead, scale = rewards - rewards.mean(1, keepdim=True), case.get("scale_rewards", "group")
    if scale == "none":
        return ahead.flatten()
    spread = nanstd(rewards, dim=1)[:, None] if scale == "group" else nanstd(rewards)
    return (ahead / (spread + 1e-4)).flatten()


def main() -> None:
    found = json.loads(FILE.read_text()) if sys.argv[1:] else {}
    with tempfile.TemporaryDirectory() as folder:
        models = cases.make_models(Path(folder))
        for name in sys.argv[1:] or cases.CASES | cases.ROLLOUTS:
            loss, gradients = trl_gradients(name, *models)
            prints = {of: cases.fingerprint(of, gradient) for of, gradient in gradients.items()}
            found[name] = {"loss": loss, "gradients": prints}
            print(name, loss, file=sys.stderr)
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    FILE.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
