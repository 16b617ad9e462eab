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

    case = dict(EVERY[name])
    objective = case.pop("objective", "distill")
    model, reference = (AutoModelForCausalLM.from_pretrained(str(one)) for one in (model_folder, reference_folder))
    tokenizer = AutoTokenizer.from_pretrained(str(model_folder))
    make = {"dpo": _dpo, "kto": _kto, "orpo": _orpo, "simpo": _cpo, "cpo": _cpo, "sft": _sft, "distill": _distill}
    make |= {"reward": _reward, "grpo": _rolled_out, "rloo": _rolled_out}
    if name in cases.ADAPTED:
        make["grpo"] = make["rloo"] = _adapted
    with tempfile.TemporaryDirectory() as folder:
        loss, trained = make[objective](objective, case, model, reference, tokenizer, folder)
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in trained.named_parameters() if weight.grad is not None}


EVERY = cases.CASES | cases.ROLLOUTS | cases.DRAWN | cases.ADAPTED | cases.DISTILLED


COMMON = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}


def _prompts_and_answers() -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    found = cases.pairs()
    return [one.prompt for one in found], [one.chosen for one in found], [one.rejected for one in found]


def _data(columns: dict[str, Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(columns)


def _sft(objective, case, model, reference, tokenizer, folder) -> tuple[torch.Tensor, Any]:
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(output_dir=folder, **COMMON)
    data = _data({"prompt": ["a", "b"], "completion": ["c", "d"]})
    trainer = SFTTrainer(model, args=config, train_dataset=data, processing_class=tokenizer)
    prompts, chosen, _ = _prompts_and_answers()
    batch = batch_of(prompts, chosen)
    labels = batch["input_ids"].masked_fill(batch.pop("completion_mask") == 0, -100)
    return trainer.compute_loss(trainer.model, {**batch, "labels": labels}), model


def _reward(objective, case, model, reference, tokenizer, folder) -> tuple[torch.Tensor, Any]:
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    headed = AutoModelForSequenceClassification.from_pretrained(model.config.name_or_path, num_labels=1)
    headed.score.weight.data.copy_(torch.from_numpy(cases.drawn("score", tuple(headed.score.weight.shape), 0.3)))
    config = RewardConfig(output_dir=folder, **COMMON)
    data = _data({"chosen": ["a b", "c d"], "rejected": ["e f", "g h"]})
    trainer = RewardTrainer(headed, args=config, train_dataset=data, processing_class=tokenizer)
    prompts, chosen, rejected = _prompts_and_answers()
    batch = batch_of([*prompts, *prompts], [*chosen, *rejected])
    del batch["completion_mask"]
    return trainer.compute_loss(trainer.model, {**batch, "margin": torch.tensor(cases.MARGINS)}), headed


def _distill(objective, case, model, reference, tokenizer, folder) -> tuple[torch.Tensor, Any]:
    """Times the square of the temperature, which TRL leaves to the learning rate."""
    from trl import DistillationConfig, DistillationTrainer

    heat = case.get("temperature", 1.0)
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}[case["loss"]]
    config = DistillationConfig(output_dir=folder, beta=beta, temperature=heat, **COMMON)
    about = {"args": config, "train_dataset": _data({"prompt": ["a", "b"]}), "processing_class": tokenizer}
    trainer = DistillationTrainer(model, teacher_model=reference, **about)
    prompts, chosen, _ = _prompts_and_answers()
    inputs = _asked_and_answered(prompts, chosen)
    return heat**2 * trainer.compute_loss(trainer.model, inputs), model


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


def _asked_and_answered(prompts: list[np.ndarray], answers: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """As TRL's trainers of own answers have them: prompts filled up on their left, answers on their right."""
    width = max(map(len, prompts))
    lefts = [np.concatenate([np.zeros(width - len(p), dtype=np.int64), p]) for p in prompts]
    masks = [np.repeat([0, 1], [width - len(p), len(p)]) for p in prompts]
    ones = [np.ones(len(answer), dtype=np.int64) for answer in answers]
    inputs = {"prompt_ids": padded(lefts), "prompt_mask": padded(masks), "completion_ids": padded(answers)}
    count = torch.tensor(float(sum(map(len, answers))))
    return inputs | {"completion_mask": padded(ones), "num_items_in_batch": count}


def _rollout_trainer(objective, case, model, tokenizer, folder, **about) -> Any:
    """TRL's trainer, to which the model's answers are given: both to each prompt, with rewards that are given."""
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    found = cases.pairs()
    prompts = [one.prompt.tolist() for one in found for _ in range(2)]
    answers = [answer.tolist() for one in found for answer in (one.chosen, one.rejected)]
    options = {"temperature": case.get("temperature", 1.0), "beta": case.get("beta", 0.0), "num_generations": 2}
    options |= {"epsilon": case.get("epsilon", 0.2), "epsilon_high": case.get("epsilon_high")}
    options |= {"max_completion_length": case.get("max_answer_tokens", 256), "per_device_train_batch_size": 10}
    if objective == "grpo":
        options |= {"loss_type": case.get("loss", "dapo"), "importance_sampling_level": case.get("ratios", "token")}
        options |= {"scale_rewards": case.get("scale_rewards", "group")}
    else:
        options |= {"normalize_advantages": case.get("scale_rewards") == "batch"}
    settings, kind = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[objective]

    class Answered(kind):
        def _generate(self, _):
            if objective == "rloo":
                return prompts, answers, ["x"] * len(answers)
            return prompts, answers, None, ["x"] * len(answers), None, {}, None, None

    config = settings(output_dir=folder, **COMMON, **options)
    about |= {"args": config, "train_dataset": _data({"prompt": ["a"] * 10}), "processing_class": tokenizer}
    trainer = Answered(model, reward_funcs=lambda **_: [one for some in cases.REWARDS for one in some], **about)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def _rolled_out(objective, case, model, reference, tokenizer, folder) -> tuple[torch.Tensor, Any]:
    """With log-probabilities of sampling that are made up, so that ratios are clipped."""
    trainer = _rollout_trainer(objective, case, model, tokenizer, folder)
    if case.get("beta"):
        trainer.ref_model.load_state_dict(reference.state_dict())
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * 10)
    width, answers = inputs["prompt_ids"].shape[1], inputs["completion_mask"].sum(1).tolist()
    both = [torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask")]
    with torch.no_grad():
        logits = reference.eval()(input_ids=both[0], attention_mask=both[1]).logits[:, width - 1 : -1]
        logps = torch.log_softmax(logits / case.get("temperature", 1.0), -1)
        base = logps.gather(-1, inputs["completion_ids"][..., None])[..., 0]
    old = [cases.sampled(row[:count].numpy()) for row, count in zip(base, answers, strict=True)]
    old = torch.stack([torch.nn.functional.pad(torch.tensor(one), (0, base.shape[1] - len(one))) for one in old])
    inputs |= {"old_per_token_logps": old.float(), "old_logps": (old * inputs["completion_mask"]).sum(1).float()}
    if case.get("engine") == "vllm":
        inputs["importance_sampling_ratio"] = _importance(trainer, old, answers)
    return trainer._compute_loss(trainer.model, inputs), model


def _importance(trainer, old: torch.Tensor, answers: list[int]) -> torch.Tensor:
    """What TRL makes of log-probabilities of another engine, in the mode `token_truncate` with its default cap: the
    lines of `GRPOTrainer._generate_and_score_completions`, which ask an engine that is not here."""
    drawn = [cases.by_sampler(row[:count].numpy()) for row, count in zip(old, answers, strict=True)]
    drawn = torch.stack([torch.nn.functional.pad(torch.tensor(one), (0, old.shape[1] - len(one))) for one in drawn])
    mask = torch.arange(old.shape[1])[None] < torch.tensor(answers)[:, None]
    trainer.use_vllm = True
    assert trainer.vllm_importance_sampling_correction
    options = {"min": trainer.vllm_importance_sampling_clip_min, "max": trainer.vllm_importance_sampling_clip_max}
    return torch.exp((old - drawn) * mask).clamp(**options).float()


def _adapted(objective, case, model, reference, tokenizer, folder) -> tuple[torch.Tensor, Any]:
    """Nothing made up: what answers were given when they were sampled, and what the model without its adapter gives
    them, is as TRL finds it."""
    from peft import LoraConfig

    adapter = LoraConfig(r=cases.RANK, lora_alpha=2 * cases.RANK, target_modules=list(cases.FACTORS))
    trainer = _rollout_trainer(objective, case, model, tokenizer, folder, peft_config=adapter)
    for name, weight in trainer.model.named_parameters():
        if weight.requires_grad:
            name = name.removeprefix("base_model.model.").replace(".default.weight", "").lower()
            weight.data.copy_(torch.from_numpy(cases.drawn(name, tuple(weight.shape), 0.1)))
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * 10)
    return trainer._compute_loss(trainer.model, inputs), trainer.model


def main() -> None:
    found = json.loads(FILE.read_text()) if sys.argv[1:] else {}
    with tempfile.TemporaryDirectory() as folder:
        models = cases.make_models(Path(folder))
        for name in sys.argv[1:] or EVERY:
            loss, gradients = trl_gradients(name, *models)
            prints = {of: cases.fingerprint(of, gradient) for of, gradient in gradients.items()}
            found[name] = {"loss": loss, "gradients": prints}
            print(name, loss, file=sys.stderr)
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    FILE.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
