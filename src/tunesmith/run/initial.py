"""The adapter that a run begins with, where it is not drawn: one that exists, or factors made from weights or data.

It is written into the run's folder before the first step and read from there by every rank, in this sitting and later
ones, so that a run over several ranks, or one that is continued, begins with the same bits. `pissa`, `olora` and
`loftq` look at one weight after the other; `eva` and `lora-ga` send some of the data through the whole model. All but
`loftq` are the peft library's own code.
"""

from __future__ import annotations

import hashlib
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from tunesmith.config.adapter import CONFIG, WEIGHTS
from tunesmith.config.schema import Lora, Run
from tunesmith.data.store import TokenStore
from tunesmith.disk import expanded
from tunesmith.errors import UserError
from tunesmith.model import load, lora, quantized
from tunesmith.model.save import adapter_config_text, whole_folder
from tunesmith.model.source import find_source
from tunesmith.model.structure import is_transposed
from tunesmith.parallel.prepare import load_model
from tunesmith.plan.plan import Plan

EXAMPLES = 64
"""Of the training data that `eva` and `lora-ga` look at, and how many at a time."""
AT_A_TIME = 4
EXACT = 1024
"""Matrices with a smaller side get all their singular values; of larger ones the first are found by iteration."""


def make_start(run: Run, plan: Plan, stores: Iterable[TokenStore], *, is_continued: bool) -> None:
    """Write it into the run's folder, unless the run goes on with the one that is there or draws its adapters."""
    folder = Path(run.output) / lora.START
    if run.adapter is None and (not run.has_lora or run.lora.init == "default"):
        shutil.rmtree(folder, ignore_errors=True)
        return
    if is_continued and (folder / WEIGHTS).exists():
        return
    with whole_folder(folder) as partial:
        if run.adapter is not None:
            for name in (CONFIG, WEIGHTS):
                shutil.copyfile(expanded(run.adapter) / name, partial / name)
            return
        _require_peft(run.lora.init)
        by_data = run.lora.init in ("eva", "lora-ga")
        factors = _from_data(run, plan, list(stores)) if by_data else dict(_from_weights(run, plan))
        tensors = {lora.peft_name(name): value.float().cpu().contiguous() for name, value in factors.items()}
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        skeleton = load.load_skeleton(run)
        lora.attach(skeleton, run.lora, seed=run.seed)
        plain = run.model_copy(update={"lora": run.lora.model_copy(update={"init": "default"})})
        (partial / CONFIG).write_text(adapter_config_text(skeleton, plain))


def _require_peft(init: str) -> None:
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise UserError(f"lora.init: `{init}` needs the peft library; install `tunesmith[peft]`.") from error


@torch.no_grad()
def _from_weights(run: Run, plan: Plan) -> Iterator[tuple[str, torch.Tensor]]:
    """Factors by their names in the model, one linear after the other."""
    model, folder = load.load_empty(run, dtype="fp32")
    targets = {f"{name}.weight": name for name in lora.find_targets(model, run.lora)}
    device = torch.device("cuda" if plan.device == "cuda" else "cpu")
    with load.reading(run, "weights"), load.quiet():
        source = find_source(model, folder, dtype=torch.float32, storage="plain")
        for key, part, _ in source.read(list(targets), part=lambda *_: (), pin=False, codes={}):
            linear = model.get_submodule(targets[key])
            weight_oi = part.to(device, torch.float32)
            weight_oi = weight_oi.t().contiguous() if is_transposed(linear) else weight_oi.clone()
            if run.lora.rank > min(weight_oi.shape):
                raise UserError(
                    f"lora.rank is {run.lora.rank}, but '{targets[key]}' has no more than {min(weight_oi.shape)} "
                    f"directions for lora.init: {run.lora.init}; lower the rank or leave that linear out of "
                    "lora.targets."
                )
            factors_of = _residual if run.lora.init == "loftq" else _by_peft
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_seed(run.seed, targets[key]))
                a_ri, b_or = factors_of(weight_oi, run.lora)
            yield f"{targets[key]}.lora_a", a_ri
            yield f"{targets[key]}.lora_b", b_or
            if run.lora.dora:
                yield f"{targets[key]}.lora_m", weight_oi.norm(dim=1)


def _by_peft(weight_oi: torch.Tensor, settings: Lora) -> tuple[torch.Tensor, torch.Tensor]:
    """What the peft library's own layer begins with over this weight."""
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    init = settings.init
    if init == "pissa" and min(weight_oi.shape) > EXACT:
        init = "pissa_niter_16"
    outputs, inputs = weight_oi.shape
    with torch.device(weight_oi.device):
        base = nn.Linear(inputs, outputs, bias=False)
        base.weight = nn.Parameter(weight_oi.clone(), requires_grad=False)
        alpha = settings.alpha if settings.alpha is not None else 2.0 * settings.rank
        config = LoraConfig(
            r=settings.rank, lora_alpha=alpha, use_rslora=settings.rank_stabilised, init_lora_weights=init
        )
        layer = Linear(base, "default", config, r=settings.rank, lora_alpha=alpha)
    return layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()


def _residual(weight_oi: torch.Tensor, settings: Lora) -> tuple[torch.Tensor, torch.Tensor]:
    """LoftQ in one round over the base as it is quantized here: the best low-rank part of what rounding loses."""
    lost_oi = weight_oi - quantized.rounded(weight_oi, "int8" if settings.bits == 8 else "nf4")
    u, s, vh = torch.linalg.svd(lost_oi, full_matrices=False)
    root = (s[: settings.rank] / settings.scale).sqrt()
    return root[:, None] * vh[: settings.rank], u[:, : settings.rank] * root


def _from_data(run: Run, plan: Plan, stores: list[TokenStore]) -> dict[str, torch.Tensor]:
    """Factors by their names in the model, as the peft library finds them by what some of the data, or their gradients,
    are like in front of each linear."""
    from peft import EvaConfig, LoraConfig, LoraGAConfig, get_peft_model, initialize_lora_eva_weights
    from peft.tuners.lora import preprocess_loraga

    is_alone = plan.mesh.ranks == 1 and plan.storage == "plain"
    device = plan.device if is_alone else "cpu"
    model = load_model(run, dtype=plan.precision if is_alone else "fp32", device=device)
    settings = run.lora
    names = lora.find_targets(model, settings)
    batches = _batches(stores, torch.device(device))
    alpha = settings.alpha if settings.alpha is not None else 2.0 * settings.rank

    def train_step() -> None:
        for batch in batches:
            model(**batch, use_cache=False).loss.backward()

    lengths = {f"{name}.lora_m": _lengths(model.get_submodule(name)) for name in names if settings.dora}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), load.quiet():
        warnings.simplefilter("ignore")
        torch.manual_seed(run.seed)
        is_eva = settings.init == "eva"
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=alpha,
            use_rslora=settings.rank_stabilised,
            target_modules=names,
            init_lora_weights="eva" if is_eva else "lora_ga",
            eva_config=EvaConfig(rho=1.0, use_label_mask=False) if is_eva else None,
            lora_ga_config=None if is_eva else LoraGAConfig(),
        )
        if is_eva:
            tuned = get_peft_model(model, config)
            initialize_lora_eva_weights(tuned, batches, gather_distributed_inputs=False, show_progress_bar=False)
        else:
            preprocess_loraga(model, config, train_step)
            tuned = get_peft_model(model, config)
    factors: dict[str, torch.Tensor] = dict(lengths)
    inner = tuned.get_base_model()
    for name in names:
        layer = inner.get_submodule(name)
        a_ri, b_or = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
        if a_ri.shape[0] != settings.rank or b_or.shape[1] != settings.rank:
            raise UserError(
                f"lora.init: `{settings.init}` finds {min(a_ri.shape[0], b_or.shape[1])} directions at '{name}' and "
                f"not {settings.rank}; lower lora.rank, or give more data."
            )
        factors |= {f"{name}.lora_a": a_ri, f"{name}.lora_b": b_or}
    return factors


def _lengths(linear: nn.Module) -> torch.Tensor:
    return linear.weight.detach().float().norm(dim=0 if is_transposed(linear) else 1)


def _batches(stores: list[TokenStore], device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Examples spread evenly over the data sets, padded at the end, a few at a time."""
    chosen = []
    for store in stores:
        count = min(len(store), -(-EXAMPLES // len(stores)))
        chosen += [store.example(index * len(store) // count)[:2] for index in range(count)]
    batches = []
    for at in range(0, len(chosen), AT_A_TIME):
        examples = chosen[at : at + AT_A_TIME]
        shape = (len(examples), max(len(ids) for ids, _ in examples))
        tokens, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, -100)
        for row, (ids, weights) in enumerate(examples):
            own = torch.from_numpy(ids).long()
            tokens[row, : len(ids)], mask[row, : len(ids)] = own, 1
            labels[row, : len(ids)] = torch.where(torch.from_numpy(weights) > 0, own, -100)
        batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        batches.append({name: value.to(device) for name, value in batch.items()})
    return batches


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")
