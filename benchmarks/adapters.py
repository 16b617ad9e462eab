"""Every adapter on a tiny model: trained, killed and resumed, read by peft, continued from peft, merged, on two ranks.

    PYTHONPATH=src:tests python benchmarks/adapters.py [NAME ...]

Each cell is really run, by `tunesmith` in a process of its own; what it gives goes into results/adapters.json, from
which docs/generate.py makes the table of docs/adapters.md. Needs the packages of the tests.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

WHAT = "Every adapter on a tiny model, on the CPU"
TENSORS = "adapter/adapter_model.safetensors"
LINEARS = ["q_proj", "v_proj", "up_proj"]
SAME = 2e-5
"""Largest difference of losses that counts as the same: other sums in another order, in fp32."""

LORA: dict[str, dict[str, Any]] = {
    "lora": {},
    "rank-stabilised": {"rank_stabilised": True},
    "lora+": {"b_rate": 16},
    "dora": {"dora": True},
    "embedding and head": {"targets": ["q_proj", "embed_tokens", "lm_head"]},
    "new tokens": {},
    "pissa": {"init": "pissa"},
    "olora": {"init": "olora"},
    "eva": {"init": "eva"},
    "lora-ga": {"init": "lora-ga"},
    "loftq": {"init": "loftq"},
}
PEFT: dict[str, dict[str, Any]] = {
    "LORA": {"r": 4, "target_modules": LINEARS},
    "LORA on experts": {
        "r": 4,
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "LORA on embedding and head": {"r": 4, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "LORA with trained tokens": {"r": 4, "target_modules": LINEARS, "trainable_token_indices": [1, 2, 40]},
    "ADALORA": {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 2, "deltaT": 1, "target_modules": LINEARS},
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "PROMPT_TUNING": {"num_virtual_tokens": 4},
    "P_TUNING": {"num_virtual_tokens": 4, "encoder_hidden_size": 16},
    "PREFIX_TUNING": {"num_virtual_tokens": 4},
    "VERA": {"r": 8, "target_modules": ["q_proj", "o_proj"]},
    "PVERA": {"r": 8, "target_modules": ["q_proj", "o_proj"]},
    "OFT": {"oft_block_size": 8, "target_modules": LINEARS},
    "BOFT": {"boft_block_size": 4, "target_modules": LINEARS},
    "LOHA": {"r": 4, "target_modules": LINEARS},
    "LOKR": {"r": 4, "target_modules": LINEARS},
    "FOURIERFT": {"n_frequency": 50, "target_modules": LINEARS},
    "LN_TUNING": {"target_modules": ["input_layernorm", "post_attention_layernorm"]},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2, 40], "target_modules": ["embed_tokens"]},
    "HRA": {"r": 4, "target_modules": LINEARS},
    "MISS": {"r": 4, "target_modules": LINEARS},
    "RANDLORA": {"r": 4, "target_modules": LINEARS},
    "SHIRA": {"r": 2, "target_modules": LINEARS},
    "C3A": {"block_size": 8, "target_modules": LINEARS},
    "ROAD": {"group_size": 8, "target_modules": LINEARS},
    "WAVEFT": {"n_frequency": 50, "target_modules": LINEARS},
    "OSF": {"target_modules": LINEARS},
    "DELORA": {"r": 4, "target_modules": LINEARS},
    "GRALORA": {"r": 4, "target_modules": LINEARS},
    "VBLORA": {"r": 4, "num_vectors": 16, "vector_length": 8, "topk": 2, "target_modules": LINEARS},
    "UNILORA": {"r": 4, "target_modules": LINEARS},
    "TINYLORA": {"r": 2, "target_modules": LINEARS},
    "FROD": {"target_modules": ["q_proj", "o_proj"]},
    "PSOFT": {"r": 4, "target_modules": LINEARS},
    "PEANUT": {"r": 4, "target_modules": LINEARS},
    "HIRA": {"r": 4, "target_modules": LINEARS},
    "LILY": {"r": 4, "target_modules": LINEARS},
    "GLORA": {"r": 4, "target_modules": LINEARS},
    "BEFT": {"target_modules": LINEARS},
    "ADAMSS": {"r": 8, "num_subspaces": 2, "target_modules": LINEARS},
    "SUPERTUNING": {},
    "DEFT": {"target_modules": LINEARS},
}
EXPERTS = {"LORA on experts"}
"""On a mixture of experts."""
RATES = {
    **dict.fromkeys(("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"), 0.1),
    **dict.fromkeys(("VERA", "PVERA", "FOURIERFT", "WAVEFT", "VBLORA", "TINYLORA", "IA3"), 2e-2),
}
"""Of methods that need a higher one to learn something in a few steps."""


def settings_of(name: str) -> dict[str, Any]:
    if name in LORA:
        method = "qlora" if name == "loftq" else "lora"
        more = {"new_tokens": ["<|new|>"]} if name == "new tokens" else {}
        return {"method": method, "lora": {"rank": 4, **LORA[name]}, **more}
    return {"method": "peft", "lora": {}, "peft": {"peft_type": name.partition(" ")[0], **PEFT[name]}}


class Cells:
    """Of one adapter, each in folders of its own."""

    def __init__(self, runs: Any, folder: Path, model: Path, name: str):
        self.runs, self.folder, self.model, self.name = runs, folder, model, name
        self.settings = {
            **settings_of(name),
            "learning_rate": RATES.get(name, 5e-3),
            "steps": 8,
            "save_every": 2,
            "eval_every": 3,
        }

    def run(
        self,
        part: str,
        *arguments: str,
        ranks: int = 1,
        sharding: str = "none",
        precision: str = "fp32",
        **options: Any,
    ) -> Path:
        from tiny import write_all

        where = self.folder / part
        changes = options.pop("changes", {})
        write_all(where, self.model, **{**self.settings, **changes})
        plan = json.loads((where / "plan.json").read_text())
        axis = "replicate" if sharding == "ddp" else "shard"
        plan |= {"sharding": sharding, "mesh": {**plan["mesh"], axis: ranks}, "adapted": None, "precision": precision}
        (where / "plan.json").write_text(json.dumps(plan))
        ended = self.runs(where, "train", "run.yaml", "--plan", "plan.json", *arguments, **options)
        if ended.code not in (0, -9):
            raise RuntimeError(ended.err.strip().splitlines()[-1][:300] if ended.err.strip() else str(ended.code))
        return where / "run"

    def trained(self) -> bool:
        """It learns: the held-out loss falls."""
        summary = json.loads((self.run("whole") / "summary.json").read_text())
        return summary["held_out_after"] < summary["held_out_before"]

    def read_by_peft(self) -> bool:
        """peft's model, with the saved adapter on the unchanged base, has the held-out loss that the trainer saw."""
        if self.name == "loftq":
            return None  # over a base in 4 bits, which peft reads with bitsandbytes
        run = self.folder / "whole" / "run"
        found = _held_out(self._peft(run / "adapter"), self.folder / "whole")
        return abs(found - json.loads((run / "summary.json").read_text())["held_out_after"]) < SAME

    def continued(self) -> bool:
        """An adapter that peft made has, before it is trained on here, the loss that it has in peft."""
        import torch
        from peft import get_peft_model

        from tunesmith.config.load import from_mapping
        from tunesmith.model.adapters import make_config

        if self.name in LORA and self.name not in ("lora", "rank-stabilised", "dora"):
            return None  # a way to begin, or a rate
        if self.name in LORA:
            from peft import LoraConfig

            config = LoraConfig(
                r=4, target_modules=LINEARS, use_dora=self.name == "dora", use_rslora=self.name == "rank-stabilised",
                task_type="CAUSAL_LM",
            )  # fmt: skip
        else:
            config = make_config(
                from_mapping({"model": str(self.model), "data": "x", **settings_of(self.name)}), steps=8
            )
        torch.manual_seed(1)
        theirs = get_peft_model(_plain(self.model), config)
        with torch.no_grad():
            for weight in theirs.parameters():
                if weight.requires_grad:
                    weight.add_(0.02 * torch.randn(weight.shape))
        theirs.save_pretrained(self.folder / "theirs")
        changes = {"adapter": str(self.folder / "theirs"), "steps": 2, "lora": {}}
        if self.name in PEFT:
            changes["peft"] = {"peft_type": self.name.partition(" ")[0]}
            changes["peft"] |= {"total_step": 8} if self.name == "ADALORA" else {}
        run = self.run("continued", changes=changes)
        first = json.loads((run / "summary.json").read_text())["held_out_before"]
        return abs(first - _held_out(self._peft(self.folder / "theirs"), self.folder / "continued")) < SAME

    def resumed(self) -> bool:
        """Killed in the middle and started again, it ends with the same bytes."""
        from tiny import Die, assert_same

        run = self.run("killed", die=Die("tunesmith.train.step:TrainStep.launch", count=4))
        ended = self.runs(self.folder / "killed", "train", "run.yaml", "--plan", "plan.json")
        if ended.code != 0:
            raise RuntimeError(ended.err.strip().splitlines()[-1])
        whole = self.folder / "whole" / "run"
        if self.name == "new tokens":  # the adapter's config names the base that lies in the run's own folder
            return all((run / file).read_bytes() == (whole / file).read_bytes() for file in (TENSORS, "summary.json"))
        try:
            assert_same(run, whole)
        except AssertionError:
            return False
        return True

    def merged(self) -> bool:
        ended = self.runs(self.folder / "whole", "merge", "run", "--to", "merged")
        if ended.code == 0:
            return True
        raise RuntimeError(ended.err.strip().splitlines()[-1][:300])

    def chatted(self) -> bool:
        """What is opened for talking says what peft's own model says."""
        import torch

        from tunesmith.run.open import open_run

        run = self.folder / "whole" / "run"
        tokens = torch.arange(3, 20)[None]
        asked = {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "max_new_tokens": 8,
            "do_sample": False,
        }
        mine = open_run(run).model.generate(**asked)
        return self.name == "loftq" or mine.tolist() == self._peft(run / "adapter").generate(**asked).tolist()

    def half(self) -> bool | str:
        """Over a base in bf16, which trains on a GPU."""
        if self.name == "loftq":
            return None
        run = self.run("half", changes={"steps": 5}, precision="bf16")
        return json.loads((run / "summary.json").read_text())["held_out_after"] < 20

    def ddp(self) -> bool | str:
        return self._on_two("ddp")

    def zero3(self) -> bool | str:
        return self._on_two("zero3")

    def _on_two(self, sharding: str) -> bool | str:
        """Two ranks see the losses of one."""
        run = self.run(sharding, ranks=2, sharding=sharding, forks_ranks=True)
        pairs = zip(_losses(run), _losses(self.folder / "whole" / "run"), strict=True)
        far = max(abs(one - other) for one, other in pairs)
        return True if far < SAME else f"losses differ by {far:.1g}"

    def _peft(self, folder: Path) -> Any:
        from peft import PeftModel

        grown = folder.parent / "grown_base"
        return PeftModel.from_pretrained(_plain(grown if grown.exists() else self.model), str(folder)).eval()


CELLS = ("trained", "read_by_peft", "continued", "resumed", "merged", "chatted", "half", "ddp", "zero3")


def _plain(model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def _losses(run: Path) -> list[float]:
    from tunesmith.train import events

    return [record["loss"] for record in events.read(run) if record["event"] == "step"]


def _held_out(model: Any, folder: Path) -> float:
    """The loss of the held-out answers, one document at a time, by the model's own forward pass."""
    import torch

    from tunesmith.config.load import from_mapping
    from tunesmith.run.choose import tokenize

    before = os.getcwd()
    os.chdir(folder)
    try:
        run = from_mapping(json.loads((folder / "run.yaml").read_text()))
        data = tokenize(run.model_copy(update={"data": run.eval, "eval": [], "held_out": 0}), None)
    finally:
        os.chdir(before)
    total, count = 0.0, 0.0
    with torch.no_grad():
        for store in data.train:
            for index in range(len(store)):
                ids, weights, _ = store.example(index)
                tokens = torch.from_numpy(ids).long()[None]
                logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[0, -tokens.shape[1] :]
                losses = torch.nn.functional.cross_entropy(logits[:-1].double(), tokens[0, 1:], reduction="none")
                own = torch.from_numpy(weights)[1:]
                total, count = total + (losses * own).sum().item(), count + own.sum().item()
    return total / count


def main(names: list[str]) -> None:
    from results import read_rows, write_result
    from transformers.utils import logging

    from tiny import Runs
    from tiny_model import make_tiny_model

    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    rows = {row["adapter"]: row for row in read_rows("adapters")}
    place = Path(tempfile.mkdtemp())
    model = make_tiny_model(place / "model", tie_word_embeddings=False)
    runs = Runs(place / "cache")
    only = [name for name in names if name in CELLS]
    for name in [name for name in names if name not in CELLS] or [*LORA, *PEFT]:
        began = time.monotonic()
        folder = place / name
        cells = Cells(runs, folder, _mixture(place) if name in EXPERTS else model, name)
        row: dict[str, Any] = {"adapter": name}
        for cell in only or CELLS:
            if cell == "trained" or row.get("trained", True) in (True, False):
                row[cell] = _try(getattr(cells, cell))
        rows[name] = {**(rows.get(name, {}) if only else {}), **row}
        print(f"{name} ({time.monotonic() - began:.0f} s): {json.dumps(row)}", flush=True)
        order = [*LORA, *PEFT]
        write_result("adapters", WHAT, sorted(rows.values(), key=lambda row: order.index(row["adapter"])))
        shutil.rmtree(folder, ignore_errors=True)
    runs.close()


def _mixture(place: Path) -> Path:
    """A Mixtral of two layers, with the tokenizer of the tiny model."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    folder = place / "mixture"
    if not folder.exists():
        shutil.copytree(place / "model", folder)
        torch.manual_seed(0)
        sizes = json.loads((folder / "config.json").read_text())
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        names += ("num_key_value_heads", "bos_token_id", "eos_token_id", "pad_token_id")
        config = MixtralConfig(**{name: sizes[name] for name in names}, num_local_experts=4, initializer_range=0.3)
        MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def _try(cell: Callable[[], bool]) -> bool | str:
    try:
        return cell()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]


if __name__ == "__main__":
    main(sys.argv[1:])
