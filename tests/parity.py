"""A tiny model of a family trained by Tunesmith, and by a plain loop: transformers' model as it is, peft's adapters,
torch's AdamW, one document at a time. Losses must be equal, or the family refused in one sentence."""

from __future__ import annotations

import json
import random
import shutil
import traceback
import warnings
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from families import VOCABULARY, quiet, tiny_model

TOLERANCE = 1e-5
RANDOM = 1e-3
"""What the order of sums does not explain."""
LENGTHS = (5, 9, 3, 40, 17, 23, 60, 12, 31, 8, 26, 2)
STEPS = 3
RATE = {"lora": 1e-2, "qlora": 1e-2, "full": 1e-3}


@dataclass(frozen=True)
class Row:
    """What came of one family by one method."""

    family: str
    method: str
    outcome: str
    """`right`, `refused` (in one sentence), `different`, `traceback`, `random`, where the model itself draws numbers
    while it trains and a plain loop is not equal to itself, or `not built`, where transformers itself does not make or
    run the model."""
    layout: str | None = None
    difference: float | None = None
    """The largest of a step's loss from the plain loop's."""
    reason: str | None = None
    """Why it was refused, padded, or is wrong."""
    in_peft: str | None = None
    """`equal` where peft reads the adapter that was written and gives the same logits."""

    @property
    def is_acceptable(self) -> bool:
        return self.outcome in ("right", "refused", "random", "not built") and self.in_peft in (None, "equal")

    def fields(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, ())}


@dataclass(frozen=True)
class Trained:
    job: Any
    start: dict[str, torch.Tensor]
    """The adapters before the first step, by peft's names."""
    losses: list[float]
    warnings: list[str]
    documents: list[list[torch.Tensor]]
    """Of each step."""


def write_model(family: str, folder: Path, **changes: Any) -> Path:
    """A tiny model of this family in its folder, with a tokenizer and its weights drawn so that each one counts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = tiny_model(family, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and name.endswith("bias"):
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
        ids = torch.randint(3, VOCABULARY, (1, 7), generator=generator)
        logits = model(input_ids=ids, use_cache=False).logits
    if not logits.isfinite().all():
        raise ValueError("its logits are not finite")
    with quiet():
        model.generation_config = type(model.generation_config)() if model.generation_config is not None else None
        model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY - 1)} | {
        "<|endoftext|>": VOCABULARY - 1
    }  # Qwen's class adds that one
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="w1", eos_token="w2", pad_token="w0").save_pretrained(
        folder
    )
    return folder


def write_documents(path: Path) -> Path:
    chance = random.Random(0)
    rows = [[chance.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))
    return path


def compare(family: str, method: str, folder: Path, **changes: Any) -> Row:
    """The row of this family; everything is written below `folder`, and removed."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _compare(family, method, folder, changes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compare(family: str, method: str, folder: Path, changes: dict[str, Any]) -> Row:
    from tunesmith.errors import UserError

    model = folder / "model"
    try:
        write_model(family, model, **changes)
        expected_from = plain_model(model)
    except Exception as error:
        return Row(family, method, "not built", reason=one_line(error))
    try:
        trained = train(model, method, folder)
    except UserError as error:
        return Row(family, method, "refused", reason=str(error))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        return Row(family, method, "traceback", reason=f"{type(error).__name__} at {place}: {one_line(error)}")
    job, losses = trained.job, trained.losses
    known: dict[str, Any] = {"layout": job.spec.layout, "reason": "; ".join(trained.warnings) or None}
    try:
        with quiet():
            expected = plain_losses(expected_from, trained, method)
    except Exception as error:
        return Row(family, method, "not built", **known | {"reason": f"the plain loop: {one_line(error)}"})
    worst, outcome = distance(losses, expected), "right"
    if not worst <= TOLERANCE:
        with quiet():  # summed in another order, and with other random numbers where it draws any
            again = plain_losses(plain_model(model), replace(trained, documents=reversed_documents(trained)), method)
            nudged = [plain_losses(nudge(plain_model(model), seed), trained, method) for seed in range(2)]
        itself = distance(again, expected)
        is_random = itself > RANDOM
        itself = max(itself, *(distance(one, expected) for one in nudged))
        outcome = "random" if is_random else "right" if worst <= min(4 * itself, RANDOM) else "different"
        found = f"a plain loop differs from itself by {itself:.0e}" + (", by chance" if is_random else "")
        said = f"losses {losses} against {expected}" if outcome == "different" else found
        known["reason"] = "; ".join(filter(None, (said, known["reason"])))
    if method == "lora":
        known["in_peft"] = loads_in_peft(model, job)
    return Row(family, method, outcome, difference=float(f"{worst:.1e}"), **known)


def distance(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, expected, strict=True))


@torch.no_grad()
def nudge(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Each weight off by about a rounding: where that changes a plain loop's losses, ours may differ as much."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.mul_(1 + torch.finfo(torch.float32).eps / 2 * torch.randn(weight.shape, generator=generator))
    return model


def reversed_documents(trained: Trained) -> list[list[torch.Tensor]]:
    return [step[::-1] for step in trained.documents]


def train(model: Path, method: str, folder: Path, *, layout: str | None = None, **settings: Any) -> Trained:
    """`layout`: of documents, where it is to be another than what the probe has found."""
    from tunesmith.config.load import from_mapping
    from tunesmith.model import lora
    from tunesmith.model.probe import Probed
    from tunesmith.model.state_space import use_chunked_scan
    from tunesmith.model.structure import body
    from tunesmith.run.assemble import assemble
    from tunesmith.run.choose import with_findings
    from tunesmith.run.start import prepare_run
    from tunesmith.train.loop import rate_of, step_of

    (folder / "run").mkdir(parents=True)
    write_documents(folder / "train.jsonl")
    run = from_mapping(
        {
            "model": str(model),
            "method": method,
            "lora": {"rank": 2},
            "data": [{"path": str(folder / "train.jsonl")}],
            "sequence_length": 64,
            "batch_tokens": 128,
            "steps": STEPS,
            "learning_rate": RATE[method],
            "schedule": "constant",
            "warmup": 0,
            "max_grad_norm": None,
            "precision": "fp32",
            "device": "cpu",
            "output": str(folder / "run"),
        }
        | settings
    )
    warned: list[str] = []
    with quiet():
        setting = prepare_run(run, warn=warned.append)
        has_scan = setting.plan.forward.seq_idx  # whose linears all have adapters
        if layout is not None:
            spec = replace(setting.plan.forward, layout=layout, seq_idx=False)
            found = Probed(spec, can_fuse=setting.plan.fuse_adapters, adapted=setting.plan.adapted)
            setting = replace(setting, plan=with_findings(setting.plan, found))
        job = assemble(setting)
        if has_scan:
            use_chunked_scan(body(job.model))
        start = {name: tensor.clone() for name, tensor in lora.adapter_tensors(job.model).items()}
        job.model.train()
        step = step_of(job, None)
        losses, documents = [], []
        for number in range(run.steps):
            batch = job.loader.step(number)
            losses.append(step(batch, rate_of(job, number)).loss)
            documents.append(
                [ids for one in batch.micro_batches for ids in one.tokens.split(one.boundaries.diff().tolist())]
            )
    return Trained(job, start, losses, [*warned, *job.warnings], documents)


def plain_model(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def plain_losses(model, trained: Trained, method: str) -> list[float]:
    """Of each step, by the definition: every target's cross-entropy, summed, by their number."""
    if method != "full":
        model = with_peft(model, trained.start)
    model.train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE[method], weight_decay=0.0)
    losses = []
    for step in trained.documents:
        total = sum(len(ids) - 1 for ids in step)
        summed = 0.0
        for ids in step:
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            loss = F.cross_entropy(logits[:-1].float(), ids[1:], reduction="sum") / total
            loss.backward()
            summed += loss.item()
        losses.append(summed)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def with_peft(model, start: dict[str, torch.Tensor]):
    """peft's own adapters on the linears that have ours, beginning where ours began."""
    from peft import LoraConfig, get_peft_model

    names = sorted({name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in start})
    config = LoraConfig(r=2, lora_alpha=4, target_modules=names, lora_dropout=0.0, task_type="CAUSAL_LM")
    kind, model.config.model_type = model.config.model_type, "plain"  # peft has other names for some families
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, config)
    model.config.model_type = kind
    with torch.no_grad():
        for name in names:
            module = adapted.get_submodule(f"base_model.model.{name}")
            module.lora_A["default"].weight.copy_(start[f"base_model.model.{name}.lora_A.weight"])
            module.lora_B["default"].weight.copy_(start[f"base_model.model.{name}.lora_B.weight"])
    return adapted


def loads_in_peft(model: Path, job) -> str:
    """The trained adapter as it is written, read by peft over the plain base: `equal`, or what is wrong."""
    from peft import PeftModel

    from tunesmith.model.forward import hidden_states, to_device
    from tunesmith.model.structure import body

    try:
        folder = job.write_result()
        said: list[str] = []
        with warnings.catch_warnings(record=True) as caught, quiet(), torch.no_grad():
            warnings.simplefilter("always")
            adapted = PeftModel.from_pretrained(plain_model(model), str(folder)).eval()
            said = [str(one.message).splitlines()[0] for one in caught if "adapter keys" in str(one.message)]
            job.model.eval()
            batch = job.loader.step(0).micro_batches[0]
            inputs = to_device(batch, job.device)
            found = hidden_states(job.model, inputs, job.spec)
            worst = 0.0
            for first, last in islice(pairwise(batch.boundaries.tolist()), 3):
                tokens = batch.tokens[None, first:last]
                expected = body(adapted.base_model.model)(input_ids=tokens, use_cache=False)[0][0]
                scale = max(1.0, expected.abs().max().item())
                worst = max(worst, (found[first:last] - expected).abs().max().item() / scale)
    except Exception as error:
        return f"{type(error).__name__}: {one_line(error)}"
    if worst > 1e-4:
        return f"logits differ by {worst:.1e}" + (f" ({said[0]})" if said else "")
    return "equal" if not said else f"equal, but {said[0]}"


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
