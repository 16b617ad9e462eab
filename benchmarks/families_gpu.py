"""Families at published shapes on one GPU: what the planner plans, beside Unsloth and transformers with Liger.

    python benchmarks/families_gpu.py --data FILE ... [--out FOLDER] [--deadline SECONDS] [--only TEXT ...] [--list]
    python benchmarks/families_gpu.py --collect FOLDER/families_gpu.jsonl ...

Weights are random; documents are those of FILE (any that `tunesmith train` reads), packed, cut in tokens by a
vocabulary learned from them. Each system measures each case in a process of its own, since Liger and Unsloth change
transformers' code for all of theirs; they prepare beside each other and are timed alone (`pool.py`). Ours probes the
model, makes its plan (bf16, 16,384 tokens a step) within the case's memory, compiles on few layers, and is timed, with
the share of time in which a kernel ran. Transformers have Liger's kernels where Liger knows the family. Others have the
same documents, adapters on the same linears and torch's fused AdamW; transformers' attention is the first of
flash-attn-4, FlexAttention, torch's and the model's own that runs. Unsloth loads the model from files (in memory, where
there is /dev/shm), as its own documentation says, and gets its documents padded, in rows of similar length; rates are
of tokens that are no padding. Others checkpoint their activations where they do not fit otherwise.

Cases: `lora` (whole models up to 9B; Phi-4 is cut to 24 of 40 layers), `full` (cut to about half: `layers` in the row),
`moe` (Qwen3-30B-A3B by QLoRA in 24 and in 12 GiB, which the process cannot exceed; beside it transformers' own LoRA
over bf16 weights, since bitsandbytes has no stacks of experts). `--systems` chooses of ours, transformers and unsloth.
On an H200 with 16 cores the first case was through after 75 s and each one after that took about 65 s, when each was
one process and without Unsloth; not measured in the form it has now.

Each row is written as soon as it is known, a system and a case at a time; a call that was stopped loses only what was
under way, and what is in FOLDER already is not measured again. What a process does may take `--seconds` before it has
its memory, and again after that; then it is ended, and costs its own row alone. It needs peft, flash-attn-4,
liger-kernel and unsloth, of which each is left out where it is missing; without a GPU, `--tiny` tries all of it but
Liger and Unsloth on small shapes. The second form puts what was measured into benchmarks/results/families_gpu.json,
beside rows that are there already.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_profile
import pool
from gpu import SETTINGS
from gpu_worker import device, give_back
from results import read_rows, write_result
from shapes import FAMILIES, shapes_of

from tunesmith.measure.results import document

GIB = 2**30
WHAT = "Families at published shapes on one GPU: tokens a second of planned steps, beside transformers and Liger"
WORDS = 16_000
"""Of the vocabulary learned from the data; models have their own number of embeddings."""
TOKENS, LENGTH = 16_384, 4_096
WARM, TIMED = 2, 5
SECONDS = 30
"""For the timed steps of others, at most, where one does not take longer."""
KERNELS = 60
"""That are kept of each row, those that take the most time."""
STILL = 100
"""Seconds after which a process says in the log where it is, again and again."""
FEW_WORDS = 16_384
"""Of the rehearsal."""
SYSTEMS = ("ours", "transformers", "unsloth")
"""Processes of a case. Transformers have Liger where it knows the family, and are called so then."""
OTHERS = ("liger", "transformers", "unsloth")
ATTENTIONS = ("flash_attention_4", "flex_attention", "sdpa", "eager")
SHAPES = shapes_of(FAMILIES)
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "shared_intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "sliding_window": 16,
    "vocab_size": 2_048,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    shape: str
    method: str
    layers: int
    gib: float = 100
    """What its plan may use."""
    held_gib: float = 112
    """Set aside on the GPU for another system; for ours what its plan says."""
    is_capped: bool = False
    """Ours cannot exceed it."""
    systems: tuple[str, ...] = SYSTEMS
    """That are measured, of SYSTEMS."""
    checkpointing: bool = False
    """Of the others, from the start."""
    first_gib: float = 6
    few_layers: int = 6
    """Of the rehearsal, in which there are no more than `first_gib`."""
    part_tokens: int = TOKENS
    """Of padded documents that others take at once."""
    tokens: int = TOKENS
    length: int = LENGTH

    @property
    def name(self) -> str:
        group = "moe, " if self.is_capped else ""
        cut = "" if self.layers == SHAPES[self.shape]["num_hidden_layers"] else f", {self.layers} layers"
        return f"{group}{self.shape}, {self.method}{cut}" + (f", {self.gib:g} GiB" if self.is_capped else "")


LAYERS = {"lora": {"Phi-4": 24}, "full": {"Phi-4": 12, "Qwen3-30B-A3B": 8, "gpt-oss-20b": 6, "Gemma-3-4B": 34}}
"""Of `full`: others have half."""
FULL_GIB = 124
"""For weights, gradients and states in fp32; others have theirs in bf16, and no limit but the GPU's."""
FULL: dict[str, Any] = {"first_gib": 28}
"""Masters, gradients and states of a rehearsal's layers."""
MORE: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {"checkpointing": True, "first_gib": 16, "few_layers": 2},  # 600M parameters a layer
    "gpt-oss-20b": {"first_gib": 16, "few_layers": 2},
    "Granite-4-H-Micro": {"part_tokens": 2_048},  # a scan in plain operations: 16,384 tokens took more than 120 GiB
}
"""What others cannot do without, and what a rehearsal needs."""
CASES = (
    *(
        Case(shape, "lora", LAYERS["lora"].get(shape, one["num_hidden_layers"]), **MORE.get(shape, {}))
        for shape, one in SHAPES.items()
    ),
    *(
        Case(
            shape,
            "full",
            LAYERS["full"].get(shape, one["num_hidden_layers"] // 2),
            FULL_GIB,
            **FULL | MORE.get(shape, {}),
        )
        for shape, one in SHAPES.items()
    ),
    Case("Qwen3-30B-A3B", "qlora", 48, 24, is_capped=True, systems=("ours",), **MORE["Qwen3-30B-A3B"]),
    Case("Qwen3-30B-A3B", "qlora", 48, 12, is_capped=True, systems=("ours",), **MORE["Qwen3-30B-A3B"]),
    Case("Qwen3-30B-A3B", "lora", 48, 110, is_capped=True, **MORE["Qwen3-30B-A3B"]),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="files to train on")
    parser.add_argument("--out", type=Path, default=Path("families-gpu"))
    parser.add_argument("--deadline", type=float, default=500.0, help="seconds after which no case is begun")
    parser.add_argument("--workers", type=int, default=4, help="processes at once")
    parser.add_argument("--seconds", type=float, default=200.0, help="of one process before it has memory, and after")
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name contains one of these")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the benchmark itself")
    parser.add_argument("--list", action="store_true", help="only say what would be measured")
    parser.add_argument("--collect", nargs="+", type=Path, help="files to make the result of")
    options = parser.parse_args()
    if options.collect:
        print(f"wrote {collect(options.collect)}")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES if any(text in case.name for text in options.only or [""])]
    cases = [case for case in cases if not case.is_capped or any("moe" in text for text in options.only)]
    done = {(row["name"], row["system"]) for row in read(options.out / "families_gpu.jsonl") if is_measured(row)}
    orders = [
        (case, system)
        for case in cases
        for system in case.systems
        if system in options.systems and is_installed(system) and (case.name, system) not in done
    ]
    if options.list:
        print(*(f"{case.name}: {system}" for case, system in orders), sep="\n")
        return
    measure(orders, options)


def is_installed(system: str) -> bool:
    return system != "unsloth" or find_spec("unsloth") is not None


def is_measured(row: dict[str, Any]) -> bool:
    return any("tokens_per_second" in row.get(name, {}) for name in ("ours", *OTHERS))


def measure(orders: list[tuple[Case, str]], options: argparse.Namespace) -> None:
    import torch

    has_gpu = torch.cuda.is_available()
    total = torch.cuda.get_device_properties(0).total_memory if has_gpu else 1 << 60
    # The compiler's processes are in sessions of their own: they would go on while a worker is stopped for others.
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    os.environ.update({**SETTINGS, **threads, **os.environ})
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="tunesmith-families-") as folder,
        (options.out / "families_gpu.jsonl").open("a") as rows,
        (options.out / "families_gpu.log").open("a") as log,
    ):
        os.environ["TUNESMITH_CACHE"] = f"{folder}/cache"
        write_models(Path(folder), [case for case, _ in orders], options)
        rows.write(json.dumps({"document": document(WHAT, [])}) + "\n")
        command = [sys.executable, __file__, "--worker", folder, *(str(file.resolve()) for file in options.data)]
        ways = {"workers": options.workers, "budget": total - (options.workers + 2) * GIB, "log": log}
        work = pool.Pool(command, **ways, deadline=options.deadline, reuses_workers=False, patience=math.inf)
        few = {"tokens": 512, "length": 256} if options.tiny else {}
        for case, system in orders:
            sizes = {"size": int(case.held_gib * GIB), "first_size": int(case.first_gib * GIB)}
            payload = {**asdict(case), **few, "name": case.name, "system": system}
            work.add(pool.Order(payload, **sizes, turn_seconds=60, seconds=options.seconds))
        for order, found in work.run():
            rows.write(json.dumps(order.payload | found) + "\n")
            rows.flush()
            name = f"{order.payload['name']}: {order.payload['system']}"
            print(f"{time.monotonic() - began:4.0f} s {name}: {words(found)}", flush=True)
        shutil.rmtree(in_memory(Path(folder)), ignore_errors=True)  # what processes that were ended have left


def write_models(folder: Path, cases: list[Case], options: argparse.Namespace) -> None:
    """Configs and a tokenizer, without weights: a folder for each shape and number of layers."""
    from transformers import AutoConfig

    tokenizer = learn_tokenizer(options.data, 2_000 if options.tiny else WORDS)
    for case in {(case.shape, case.layers): case for case in cases}.values():
        shape = dict(SHAPES[case.shape])
        if options.tiny:
            shape |= {name: size for name, size in TINY.items() if shape.get(name)}
        config = cut(AutoConfig.for_model(**ENDS | shape), shape["num_hidden_layers"])
        config.architectures = [architecture_of(config)]
        config = cut(config, min(case.layers, 8) if options.tiny else case.layers)
        where = folder / f"{case.shape}-{case.layers}"
        config.save_pretrained(where)
        tokenizer.save_pretrained(where)


ENDS = {"max_position_embeddings": 16384, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}


def architecture_of(config: Any) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]


def cut(config: Any, layers: int, words: int | None = None) -> Any:
    """The same with its first layers only, and fewer embeddings."""
    values = config.to_dict()
    whole = values["num_hidden_layers"]
    for name, value in values.items():
        if isinstance(value, list) and len(value) == whole:
            values[name] = value[:layers]
    values |= {"num_hidden_layers": layers} | ({"vocab_size": words} if words else {})
    return type(config).from_dict(values)


def learn_tokenizer(files: list[Path], words: int) -> Any:
    """Pairs of bytes that are frequent in the data: documents are about as long as real tokenizers make them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<pad>"]
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=words, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    backend.train([str(file) for file in files], trainer)
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), special, strict=True))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    made.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>\n{% endfor %}"
    return made


# the worker's side


def work(folder: Path, files: list[str]) -> None:
    order = next(pool.orders())
    faulthandler.dump_traceback_later(STILL, repeat=True)
    order.pop("name")
    system = order.pop("system")
    try:
        if system == "unsloth":  # which wants to be there before what it changes
            os.chdir(folder)  # where it writes
            import unsloth  # noqa: F401
        case = Case(**order | {"systems": tuple(order["systems"])})
        kinds = {"ours": Ours, "transformers": Transformers, "unsloth": Unsloth}
        found = kinds[system](case, folder, files).measure()
    except BaseException as error:  # an exit, too, is a finding
        traceback.print_exc()
        found = {"failed": said_of(error)}
    pool.say("result", **found)


def said_of(error: BaseException) -> str:
    is_memory = "OutOfMemory" in type(error).__name__
    return "out of memory" if is_memory else f"{type(error).__name__}: {str(error)[:300]}"


class Measured:
    """One case by one system."""

    def __init__(self, case: Case, folder: Path, files: list[str]):
        from transformers import AutoConfig

        from tunesmith.config.schema import Run

        self.case, self.folder = case, folder
        where = folder / f"{case.shape}-{case.layers}"
        self.config = AutoConfig.from_pretrained(where)
        sizes = {"batch_tokens": case.tokens, "sequence_length": case.length, "steps": 100, "held_out": 0}
        ways = {"method": case.method, "precision": "bf16" if device() == "cuda" else "fp32", "learning_rate": 1e-5}
        output = str(folder / f"run-{os.getpid()}")
        data = [{"path": file} for file in files]
        self.run = Run(model=str(where), data=data, lora={"rank": 16, "alpha": 16}, output=output, **sizes, **ways)
        self.rehearsed = cut(
            self.config, min(case.few_layers, self.config.num_hidden_layers), min(FEW_WORDS, self.config.vocab_size)
        )
        self.began = time.monotonic()

    def measure(self) -> dict[str, Any]:
        raise NotImplementedError

    def note(self, text: str) -> None:
        print(f"{self.case.name}: {text} after {time.monotonic() - self.began:.0f} s", file=sys.stderr, flush=True)

    def time(self, launch: Callable[[Any], Callable[[], Any]], *, is_ours: bool) -> dict[str, Any]:
        """Median of steps after warm-up, by the GPU's own clock; of ours also how busy it was."""
        import torch

        from tunesmith.measure.bench import _run
        from tunesmith.train.loop import peak_memory

        on_gpu = device() == "cuda"
        made = [self.loader.step(number) for number in range(WARM + TIMED)]
        began = time.monotonic()
        _run(launch, made[:WARM], on_gpu)
        if on_gpu:
            torch.cuda.synchronize()
        warm = time.monotonic() - began
        self.note(f"{WARM} steps took {warm:.1f} s,")
        if not is_ours:  # which compiles nothing
            made = made[: WARM + max(1, min(TIMED, int(SECONDS / (warm / WARM))))]
        with pool.turn():
            loss, times = _run(launch, made[WARM:], on_gpu)
            busy = busy_share(launch, made[WARM:]) if on_gpu and is_ours else None
        rates = [batch.tokens / seconds for batch, seconds in zip(made[WARM:], times, strict=True)]
        found = {
            "tokens_per_second": round(statistics.median(rates), 1),
            "spread": round((max(rates) - min(rates)) / statistics.median(rates), 3),
            "peak_bytes": peak_memory(torch.device(device())),
            "warm_seconds": round(warm, 1),
            "loss": round(float(loss), 4),
        }
        if on_gpu:
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        return found | (busy or {})


class Ours(Measured):
    def measure(self) -> dict[str, Any]:
        self.plan_it()
        self.note("planned")
        found: dict[str, Any] = {"predicted": self.predicted()}
        try:
            self.rehearse()
            found["rehearsal_seconds"] = round(time.monotonic() - self.began, 1)
            self.note("rehearsed")
            pool.ask_for_memory(self.plan.memory.total + 2 * GIB)
            found["ours"] = self.measure_step()
        except Exception as error:  # what was planned is known
            traceback.print_exc()
            found["ours"] = {"failed": said_of(error)}
        return found

    def plan_it(self) -> None:
        from tunesmith.model.probe import probe_run
        from tunesmith.plan.hardware import probe
        from tunesmith.run.choose import new_plan, tokenize, with_findings

        self.run, probed, self.notes = probe_run(self.run, device=device())
        data = tokenize(self.run, None)
        hardware = probe()
        gpus = tuple(gpu.changed(free=int(self.case.gib * GIB)) for gpu in hardware.gpus)
        plan = new_plan(self.run, hardware.changed(gpus=gpus), data, probed)
        self.plan = with_findings(plan, probed)
        lengths = self.plan.forward.lengths(self.plan.sequence_length)
        self.loader = loader_of(self.run, data, self.plan.sequences_per_step, self.plan.micro_batch, lengths)

    def predicted(self) -> dict[str, Any]:
        plan = self.plan
        kept = ("attention", "is_compiled", "cuda_graphs", "by_length", "micro_batch", "checkpointed_layers", "storage",
                "optimizer_states", "master_weights", "sequences_per_step", "kernels")  # fmt: skip
        said = {"peak_bytes": plan.memory.allocated if plan.device == "cuda" else plan.memory.total}
        said |= {"tokens_per_second": round(plan.tokens_per_second, 1), "notes": self.notes}
        said["memory"] = {name: size for name, size in plan.memory.model_dump().items() if size}
        said["time"] = {name: round(seconds, 5) for name, seconds in plan.time.model_dump().items() if seconds}
        offloads = [one for one in type(plan).model_fields if one.startswith("offload")]
        said["offloaded"] = {
            name: value for name in offloads if (value := getattr(plan, name)) not in (False, 0, "none", "gpu", None)
        }
        return said | {name: getattr(plan, name) for name in kept}

    def rehearse(self) -> None:
        """Compile on few layers."""
        few = min(self.plan.checkpointed_layers, self.rehearsed.num_hidden_layers)
        step = self.step_of(self.rehearsed, self.plan.changed(checkpointed_layers=few))
        for number in range(2):
            step(self.loader.step(number), 1e-5)
        del step
        give_back()

    def step_of(self, config: Any, plan: Any) -> Any:
        from tunesmith.measure.bench import build_step

        return build_step(config, self.run, plan)

    def measure_step(self) -> dict[str, Any]:
        import torch

        from tunesmith.parallel import compile

        if self.case.is_capped and device() == "cuda" and self.case.method == "qlora":
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(self.case.gib * GIB / whole)
        if device() == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step = self.step_of(self.config, self.plan)
        compile.news()  # of the rehearsal
        found = self.time(lambda batch: step.launch(batch, 1e-5), is_ours=True)
        if news := compile.news():
            found |= {"compile_seconds": round(news.seconds, 1), "compile_notes": news.notes}
        return found


class Transformers(Measured):
    """As it is, or with Liger."""

    def __init__(self, case: Case, folder: Path, files: list[str]):
        super().__init__(case, folder, files)
        from tunesmith.model import lora
        from tunesmith.model.load import load_skeleton
        from tunesmith.run.choose import tokenize

        self.loader = loader_of(self.run, tokenize(self.run, None), case.tokens // case.length)
        self.targets = lora.find_targets(load_skeleton(self.run), self.run.lora) if self.run.has_lora else []

    def measure(self) -> dict[str, Any]:
        name = "liger" if liger_knows(self.config) and not self.case.is_capped else "transformers"
        try:
            attention, tried = self.attention(name)
            pool.ask_for_memory()
            return {name: self.timed(name, attention) | {"attention": attention, "tried": tried}}
        except Exception as error:
            traceback.print_exc()
            return {name: {"failed": said_of(error)}}

    def attention(self, name: str) -> tuple[str, list[str]]:
        """The first attention with which a step of few layers runs, and why those before it do not."""
        tried = []
        for attention in attentions_for(self.config):
            try:
                step = self.step_of(self.model(name, self.rehearsed, attention, self.case.checkpointing), attention)
                step(self.loader.step(0))()
                self.note(f"{name} by {attention}")
                return attention, tried
            except Exception as error:
                tried.append(f"{attention}: {said_of(error)[:120]}")
            finally:
                step = None
                give_back()
        raise RuntimeError("; ".join(tried))

    def timed(self, name: str, attention: str) -> dict[str, Any]:
        for checkpointing in (True,) if self.case.checkpointing else (False, True):
            try:
                step = self.step_of(self.model(name, self.config, attention, checkpointing), attention)
                return self.time(step, is_ours=False) | {"is_checkpointed": checkpointing}
            except Exception as error:
                step = None
                if checkpointing or "OutOfMemory" not in type(error).__name__:
                    raise
            give_back()
        raise AssertionError

    def model(self, name: str, config: Any, attention: str, checkpointing: bool) -> Any:
        return their_model(name, config, attention, checkpointing, self.targets)

    def step_of(self, model: Any, attention: str) -> Callable[[Any], Any]:
        import torch

        trained = [weight for weight in model.train().parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        has_scan = hasattr(self.config, "mamba_n_heads")
        is_padded = attention in ("eager", "its own") or (has_scan and not has_scan_kernels())
        kind = device()

        def step(batch: Any) -> Callable[[], float]:
            parts = list(padded(batch, self.case.part_tokens) if is_padded else packed(batch, attention, has_scan))
            total = torch.zeros((), device=kind)
            for part in parts:
                with torch.autocast(kind, dtype=torch.bfloat16) if kind == "cuda" else nullcontext():
                    loss = model(**part, use_cache=False).loss / len(parts)
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return lambda: total.item()

        return step


class Unsloth(Transformers):
    def measure(self) -> dict[str, Any]:
        try:
            pool.ask_for_memory()
            return {"unsloth": self.timed("unsloth", "its own") | {"attention": "its own"}}
        except Exception as error:
            traceback.print_exc()
            return {"unsloth": {"failed": said_of(error)}}
        finally:
            shutil.rmtree(self.saved_at, ignore_errors=True)

    @property
    def saved_at(self) -> Path:
        return in_memory(self.folder) / f"unsloth-{os.getpid()}"

    def model(self, name: str, config: Any, attention: str, checkpointing: bool) -> Any:
        import torch
        from unsloth import FastLanguageModel

        model, _ = FastLanguageModel.from_pretrained(
            str(self.saved()),
            max_seq_length=self.case.length,
            dtype=torch.bfloat16,
            load_in_4bit=False,
            full_finetuning=not self.targets,
            use_gradient_checkpointing="unsloth" if checkpointing else False,
        )
        if not self.targets:
            return model
        ways = {"lora_alpha": 16, "lora_dropout": 0.0, "bias": "none"}
        return FastLanguageModel.get_peft_model(
            model,
            r=16,
            target_modules=sorted({name.rpartition(".")[-1] for name in self.targets}),
            use_gradient_checkpointing="unsloth" if checkpointing else False,
            **ways,
        )

    def saved(self) -> Path:
        """A folder with random weights; in memory where that is possible."""
        folder = self.saved_at
        if not folder.exists():
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer

            with torch.device(device()):
                model = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16)
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(self.run.model).save_pretrained(folder)
            del model
            give_back()
            self.note("written")
        return folder


def in_memory(folder: Path) -> Path:
    memory = Path("/dev/shm")
    return memory / folder.name if memory.is_dir() else folder


def loader_of(run: Any, data: Any, sequences: int, micro_batch: int | None = None, lengths: Any = None) -> Any:
    """Batches of packed documents; others get all of a step as one."""
    from tunesmith.data.loader import Loader
    from tunesmith.objectives import objective_of

    sizes = {"sequence_length": run.sequence_length, "sequences_per_step": sequences, "steps": run.steps}
    ways = {"micro_batch": micro_batch or sequences, "lengths": lengths, "objective": objective_of(run)}
    return Loader(data.train, [one.weight for one in run.data], seed=0, epochs=None, **sizes, **ways)


def attentions_for(config: Any) -> list[str]:
    """In the order in which they are tried. torch's own has no soft caps and no sinks."""
    has_more = getattr(config, "attn_logit_softcapping", None) is not None or config.model_type == "gpt_oss"
    here = ["sdpa", "eager"] if device() == "cpu" else [*ATTENTIONS]
    if not find_spec("flash_attn") and "flash_attention_4" in here:
        here.remove("flash_attention_4")
    return [one for one in here if one != "sdpa" or not has_more]


def their_model(name: str, config: Any, attention: str, checkpointing: bool, targets: list[str]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device() == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    if name == "liger":
        put_liger_on(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if not targets:
        return model
    from peft import LoraConfig, get_peft_model

    names = {one for one, _ in model.named_modules()}
    chosen = [one for one in targets if one in names]
    adapters = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.0, target_modules=chosen, task_type="CAUSAL_LM")
    kind, model.config.model_type = model.config.model_type, "plain"  # peft has other names for some families
    adapted = get_peft_model(model, adapters)
    model.config.model_type = kind
    return adapted


def has_scan_kernels() -> bool:
    """Libraries by which transformers keeps packed documents apart in state spaces; one that is there but cannot be
    imported would leave it with its plain code, which mixes them."""
    if not (find_spec("mamba_ssm") and find_spec("causal_conv1d")):
        return False
    for name in ("mamba_ssm", "causal_conv1d"):
        import_module(name)
    return True


def put_liger_on(model: Any) -> None:
    """As transformers' own trainer does it. It changes functions of the module's code, too: nothing plain after it."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)


def liger_knows(config: Any) -> bool:
    """Imported after ours was measured."""
    if not find_spec("liger_kernel"):
        return False
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return config.model_type in MODEL_TYPE_TO_APPLY_LIGER_FN


def documents_of(batch: Any) -> list[Any]:
    return [ids for one in batch.micro_batches for ids in one.tokens.split(one.boundaries.diff().tolist())]


def packed(batch: Any, attention: str, has_scan: bool) -> Iterator[dict[str, Any]]:
    """All documents of a step as one row, with positions that begin anew with each."""
    import torch

    documents = documents_of(batch)
    tokens, lengths = torch.cat(documents), torch.tensor([len(one) for one in documents])
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    labels = tokens.masked_fill(positions == 0, -100)
    inputs = {"input_ids": tokens[None], "labels": labels[None], "position_ids": positions[None]}
    if has_scan:
        inputs["seq_idx"] = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths)[None]
    inputs = {name: one.to(device()) for name, one in inputs.items()}
    if attention.startswith("flash"):
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int().to(device())
        inputs |= {f"cu_seq_lens_{side}": bounds for side in "qk"}
        inputs |= {f"max_length_{side}": int(lengths.max()) for side in "qk"}
    yield inputs


def padded(batch: Any, most: int) -> Iterator[dict[str, Any]]:
    """Documents as rows, sorted by length, in parts of no more than a step's tokens."""
    import torch

    left = sorted(documents_of(batch), key=len, reverse=True)
    while left:
        count = max(1, most // len(left[0]))
        part, left = left[:count], left[count:]
        tokens = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).to(device())
        lengths = torch.tensor([len(row) for row in part], device=device())
        mask = torch.arange(tokens.shape[1], device=device()) < lengths[:, None]
        yield {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.masked_fill(~mask, -100)}


def busy_share(launch: Callable[[Any], Callable[[], Any]], made: list[Any]) -> dict[str, Any]:
    """Of the time from the first kernel of some steps to the last, how much had a kernel running; and which took it."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    made = made[: gpu_profile.STEPS]
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for result in [launch(batch) for batch in made]:
            result()
    found = gpu_profile.read(trace)
    gap = sum(one[-1] for one in found["gaps"])
    kernels = [[one["name"][:80], one["calls"], one["ms"]] for one in found["kernels"][:KERNELS]]
    share = found["kernel_ms"] / (found["kernel_ms"] + gap) if found["kernel_ms"] else 0.0
    return {"busy": round(share, 4), "kernel_ms": found["kernel_ms"], "kernels": kernels}


# what came of it


def read(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    return [line for line in lines if "name" in line]


def ratio(row: dict[str, Any]) -> float | None:
    """Ours over the fastest other."""
    others = [row.get(name, {}).get("tokens_per_second") for name in OTHERS]
    ours = row.get("ours", {}).get("tokens_per_second")
    return ours / max(one for one in others if one) if ours and any(others) else None


def words(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"failed: {row['failed']}"
    said = [f"{row['rehearsal_seconds']:.0f} s of rehearsal"] if "rehearsal_seconds" in row else []
    for name in ("ours", *OTHERS):
        if (one := row.get(name)) is not None:
            busy = f", busy {one['busy']:.1%}" if one.get("busy") is not None else ""
            speed = "tokens_per_second" in one
            size = f"{one['peak_bytes'] / GIB:.1f} GiB{busy}" if speed else ""
            said.append(
                f"{name} {one['tokens_per_second']:,.0f} tokens/s, {size}" if speed else f"{name} {one['failed']}"
            )
    if (found := ratio(row)) is not None:
        said.append(f"{found:.2f} times the faster")
    if (predicted := row.get("predicted")) is not None:
        said.append(f"predicted {predicted['tokens_per_second']:,.0f}, {predicted['peak_bytes'] / GIB:.1f} GiB")
    return "; ".join(said)


def collect(files: list[Path]) -> Path:
    """A row for each case."""
    rows = {row["name"]: row for row in read_rows("families_gpu")}
    about: dict[str, Any] = {}
    for file in files:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        about = next(line["document"] for line in lines if "document" in line) | {"what": WHAT}
        for row in read(file):
            rows[row["name"]] = merged(rows.get(row["name"], {}), row, about["commit"])
    rows = {name: row for name, row in rows.items() if "predicted" in row}
    for row in rows.values():
        print(f"{row['name']}: {words(row)}")
    return write_result("families_gpu", WHAT, list(rows.values()), about=about | {"commit": "by row"})


def speed_of(part: dict[str, Any]) -> float:
    return part.get("tokens_per_second", 0.0)


def merged(before: dict[str, Any], row: dict[str, Any], commit: str) -> dict[str, Any]:
    """A case's row with what one process has found: a failure in the place of nothing alone, and of another system the
    best that it ever reached, since what is prepared beside it can only make it slower."""
    row = {name: value for name, value in row.items() if name != "system"}
    parts = {name: row.pop(name) for name in ("ours", *OTHERS) if name in row}
    if "failed" in row:
        return before
    new = {
        name: part | {"commit": commit}
        for name, part in parts.items()
        if name == "ours" or speed_of(part) >= speed_of(before.get(name, {}))
    }
    if "failed" in new.get("ours", {}) and speed_of(before.get("ours", {})):
        del new["ours"]
    if "predicted" in row and "ours" not in new:
        row = {}  # the plan of a run that failed, beside one that did not
    if "ours" in new:
        before = {name: value for name, value in before.items() if name != "note"}  # it was about another measurement
    return before | row | new | ({"commit": commit} if "ours" in new else {})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
