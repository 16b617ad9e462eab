"""What the user wants: `Run` and its parts, small, typed, frozen and closed.

A setting exists only where the plan cannot decide for the user. Every field carries the sentence that the settings
reference, the JSON Schema and `tunesmith init` show, so this file is the one place to read; the kinds of values they
have are in `values`. Cross-field rules that need the machine, the model or the data live where those are known, not
here."""

from __future__ import annotations

import math
import re
from pathlib import PurePath
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from tunesmith.config.values import (
    Count,
    Folder,
    Number,
    ProfileSteps,
    StopRule,
    Sweep,
    Targets,
    Text,
    WholeNumber,
    stop_rule,
)


class Settings(BaseModel):
    """Base of all settings: an unknown key is an error and nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True
    )


FormatName = Literal[
    "messages",
    "sharegpt",
    "alpaca",
    "prompt_completion",
    "question_answer",
    "text",
    "tokens",
    "preference",
    "judged",
    "scored",
    "labelled",
    "labelled_pair",
    "prompts",
    "anchors",
    "similar",
    "tagged",
]
TaskFormat = Literal["choices", "letters", "answers", "instructions", "samples"]
"""Formats of `eval` alone: records that are asked as tasks, as `tunesmith eval --tasks` asks them."""
TASK_FORMATS: tuple[TaskFormat, ...] = get_args(TaskFormat)
ObjectiveName = Literal[
    "sft",
    "dpo",
    "kto",
    "orpo",
    "simpo",
    "cpo",
    "distill",
    "reward",
    "classify",
    "classify_tokens",
    "embed",
    "grpo",
    "rloo",
]


class Dataset(Settings):
    """One source of examples: a file, folder or glob (`path`), or a data set on the hub (`hub`)."""

    path: Text | None = None
    """File, folder or glob: .json, .jsonl, .csv, .parquet, .arrow, .txt, also .gz and .zst."""
    hub: Text | None = None
    """Name of a data set on the Hugging Face hub."""
    subset: Text | None = None
    """Configuration of the hub data set."""
    split: Text = "train"
    """Split of the hub data set, or of a folder whose files are named after splits."""
    name: Text | None = None
    """Name in reports; the file's or data set's name when left out."""
    format: FormatName | TaskFormat | None = None
    """Record format; recognised when left out. The last five are tasks, for `eval`; `samples` are shown, not scored."""
    fields: dict[Text, Text] = {}
    """Field names of this data, as `wanted: found`, e.g. `{prompt: question_text}`."""
    weight: Annotated[Number, Field(gt=0, le=1000)] = 1.0
    """How often each example is seen per epoch; 0.5 takes a different half each epoch."""
    limit: Count | None = None
    """Use only this many records, the first ones."""

    @model_validator(mode="after")
    def _one_source(self) -> Dataset:
        if (self.path is None) == (self.hub is None):
            raise ValueError("needs exactly one of `path` (a file, folder or glob) and `hub` (a hub data set)")
        return self

    @property
    def title(self) -> str:
        if self.name:
            return self.name
        if self.hub:
            return self.hub
        assert self.path
        name = PurePath(self.path).name or self.path
        for ending in (".gz", ".zst", ".zstd"):
            name = name.removesuffix(ending)
        return PurePath(name).stem or name


class Lora(Settings):
    """Low-rank adapters (`method: lora` and `qlora`)."""

    rank: Annotated[Count, Field(le=4096)] = 16
    """Rank of the adapters."""
    alpha: Annotated[Number, Field(gt=0)] | None = None
    """Scale: the adapter's output is multiplied by alpha / rank. Twice the rank when left out."""
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input."""
    targets: Targets = "all-linear"
    """`all-linear`, or patterns of module names such as `q_proj` or `layers.*.mlp.*`."""
    layers: Text | None = None
    """Decoder layers that get adapters: `top 8`, `bottom 4`, `0-7`, `3,5,7`; all when left out."""
    rank_stabilised: bool = False
    """Scale by alpha / sqrt(rank), which keeps large ranks learning."""
    bits: Literal[4, 8] = 4
    """Bits of a base weight with `method: qlora`: 4 (nf4), or 8 (int8), which is closer to the base."""
    dora: bool = False
    """DoRA: learn magnitude and direction of each output's weights apart; slower, helps small ranks most."""
    b_rate: Annotated[Number, Field(gt=0, le=1000)] = 1.0
    """LoRA+: learning rate of the second factor (B), in times that of the first; 16 is usual."""
    init: Literal["default", "pissa", "olora", "eva", "lora-ga", "loftq"] = "default"
    """Initial factors: random, or from weights (`pissa`, `olora`), data (`eva`), gradients or quantization errors."""

    @property
    def takes_out(self) -> bool:
        """Whether the first factors' product is taken out of the base's weights, so that the model begins as it was."""
        return self.init in ("pissa", "olora", "lora-ga")

    @property
    def has_ends(self) -> bool:
        """Whether adapters may be on the embedding or the output head, as models usually call them."""
        words = ("embed", "head", "wte", "output")
        return self.targets != "all-linear" and any(word in name for name in self.targets for word in words)

    @property
    def scale(self) -> float:
        """What the factors' product is multiplied by."""
        alpha = self.alpha if self.alpha is not None else 2.0 * self.rank
        return alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


class Preference(Settings):
    """Objectives that learn from preferences (`objective: dpo`, `kto`, `orpo`, `simpo` and `cpo`)."""

    loss: Literal["sigmoid", "hinge", "ipo", "robust"] = "sigmoid"
    """Loss of a pair by its margin, with `dpo` and `cpo`; `robust` (`dpo`) needs `label_smoothing`."""
    beta: Annotated[Number, Field(gt=0)] | None = None
    """How much a difference in log-probability counts; 0.1 when left out, 2 with `simpo`."""
    label_smoothing: Annotated[Number, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs that are taken to be labelled the wrong way round (cDPO with the sigmoid loss)."""
    length_normalised: bool = False
    """With `dpo`: compare log-probabilities per token, so that longer answers have no advantage."""
    sft_weight: Annotated[Number, Field(ge=0)] | None = None
    """Weight of the chosen answers' SFT loss beside the pairs'; 0 when left out, 1 with `orpo` and `cpo`."""
    margin: Annotated[Number, Field(ge=0)] = 1.0
    """With `simpo`: how much the chosen answer's reward should be ahead (gamma)."""
    desirable_weight: Annotated[Number, Field(gt=0)] = 1.0
    """With `kto`: weight of answers that are wanted."""
    undesirable_weight: Annotated[Number, Field(gt=0)] = 1.0
    """With `kto`: weight of answers that are not."""


class Distillation(Settings):
    """Learning from another model's probabilities (`objective: distill`)."""

    teacher: Text | None = None
    """The model to learn from, with the same vocabulary: a folder, a .gguf file, or a name on the hub."""
    loss: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """Divergence: `forward_kl` covers what the teacher finds likely, `reverse_kl` its likeliest, `jsd` is between."""
    temperature: Annotated[Number, Field(gt=0, le=100)] = 1.0
    """Divides the logits of both models; the loss is multiplied by its square, so that gradients keep their size."""
    weight: Annotated[Number, Field(gt=0, le=1)] = 0.5
    """Share of the teacher's part in the loss; the rest is the loss of the data's own tokens."""
    top_k: Count | None = None
    """Run the teacher once, before training, and keep this many of its likeliest tokens; in each step when left out."""
    on_policy: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """Share of steps in which the student answers the prompts and learns from its own answers (GKD's lambda)."""


class Embedding(Settings):
    """Vectors of texts that are close where texts belong together (`objective: embed`)."""

    pooling: Literal["last", "mean"] = "last"
    """A text's vector: the hidden state of its last token, or the mean over all."""
    temperature: Annotated[Number, Field(gt=0, le=100)] = 0.05
    """Divides cosines (1 / scale in sentence-transformers); lower values weigh the closest negatives more."""
    matryoshka: list[Count] = []
    """Sizes that vectors can be cut to, such as [256, 64]; each adds a loss over so many leading dimensions."""


class Rollout(Settings):
    """The model's own answers, checked by `rewards` (`objective: grpo`, `rloo`) or by a teacher (`distill`)."""

    engine: Literal["own", "vllm"] = "own"
    """What answers: the trainer itself, or vLLM in a process of its own, given the adapter before each step."""
    prompts: Count = 8
    """Prompts of an optimizer step, over all devices."""
    answers: Annotated[Count, Field(ge=2, le=1024)] = 8
    """Answers to each prompt, which are compared with each other (the group size)."""
    max_answer_tokens: Count = 256
    """Answers are cut off after this many tokens."""
    temperature: Annotated[Number, Field(gt=0, le=10)] = 1.0
    """Sampling temperature; the loss divides logits by it, too."""
    updates: Annotated[Count, Field(le=64)] = 1
    """Optimizer updates on the answers of a step; from the second on, ratios are clipped by `epsilon`."""
    loss: Literal["dapo", "grpo", "dr_grpo", "bnpo"] = "dapo"
    """With `grpo`: mean over all tokens (`dapo`, `bnpo`), over answers, or over `max_answer_tokens` (`dr_grpo`)."""
    ratios: Literal["token", "sequence"] = "token"
    """With `grpo`: probability ratios of single tokens, or their geometric mean over the answer (GSPO)."""
    epsilon: Annotated[Number, Field(gt=0)] = 0.2
    """Ratios below 1 - epsilon or above 1 + epsilon_high are clipped."""
    epsilon_high: Annotated[Number, Field(gt=0)] | None = None
    """The same as `epsilon` when left out; 0.28 is usual with `dapo`."""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Divide advantages by the spread of rewards; `group` with `grpo` and `none` with `rloo` when left out."""
    beta: Annotated[Number, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the model without its adapter; above 0 it costs one more forward pass."""


class Reward(Settings):
    """One check of an answer (`rewards`), or the name of one: `exact`, `tests`, or `file.py:function`."""

    kind: Literal["exact", "regex", "json_schema", "tests", "function"]
    """The answer equals the record's `answer`, matches a pattern or JSON schema, passes tests; or your function."""
    weight: Number = 1.0
    """Multiplies what the check finds: 0 to 1, any number from a function."""
    name: Text | None = None
    """Name in figures; the kind, or the function's name, when left out."""
    extract: Text | None = None
    """With `exact`: pattern of what counts as the model's answer, its first group; the last match is taken."""
    pattern: Text | None = None
    """With `regex`: what an answer must match somewhere (Python's syntax; dots match line ends)."""
    file: Text | None = None
    """With `json_schema`: the file with the schema."""
    function: Text | None = None
    """With `function`: `file.py:name` or `module:name`; called as `name(answer, record)`, returns a number."""
    seconds: Annotated[Number, Field(gt=0, le=3600)] = 10.0
    """With `tests`: time limit of one answer."""
    memory_mb: Annotated[Count, Field(ge=64)] = 1024
    """With `tests`: memory limit of one answer."""

    @model_validator(mode="after")
    def _has_its_own(self) -> Reward:
        own = {"regex": "pattern", "json_schema": "file", "function": "function"}
        wanted = own.get(self.kind)
        if wanted and getattr(self, wanted) is None:
            raise ValueError(f"kind {self.kind} needs `{wanted}`")
        for name in {"extract", "pattern", "file", "function"} - {wanted, "extract" if self.kind == "exact" else None}:
            if getattr(self, str(name)) is not None:
                raise ValueError(f"kind {self.kind} has no use for `{name}`")
        for name in ("extract", "pattern"):
            try:
                re.compile(getattr(self, name) or "")
            except re.error as error:
                raise ValueError(f"`{name}` is no regular expression: {error}") from None
        if self.function is not None and not all(self.function.rpartition(":")[::2]):
            raise ValueError("`function` needs a file or module and a name, such as `rewards.py:score`")
        if self.weight == 0:
            raise ValueError("a weight of 0 rewards nothing; leave it out of the list")
        return self

    @property
    def title(self) -> str:
        return self.name or (self.function.rpartition(":")[2] if self.function else self.kind)


def _as_rewards(value: object) -> object:
    """`rewards: exact` and `rewards: file.py:function` are what people write for one of them."""
    if isinstance(value, str | dict):
        value = [value]
    if not isinstance(value, list):
        return value
    return [_reward_named(reward) if isinstance(reward, str) else reward for reward in value]


def _reward_named(text: str) -> dict[str, str]:
    return {"kind": "function", "function": text} if ":" in text else {"kind": text}


Rewards = Annotated[
    list[Reward], BeforeValidator(_as_rewards, json_schema_input_type=list[Reward | str] | Reward | str)
]


def _as_list(value: object) -> object:
    """`data: file.jsonl`, `data: hub:NAME` and `data: {path: ...}` are what people write for one data set."""
    if isinstance(value, str | dict):
        value = [value]
    if isinstance(value, list):
        return [named_source(item) if isinstance(item, str) else item for item in value]
    return value


def named_source(text: str) -> dict[str, str]:
    """The settings of a data set that is given as one text: `hub:NAME`, or a path."""
    return {"hub": text.removeprefix("hub:").strip()} if text.startswith("hub:") else {"path": text}


Datasets = Annotated[
    list[Dataset],
    BeforeValidator(_as_list, json_schema_input_type=list[Dataset | str] | Dataset | str),
]


class Run(Settings):
    """A fine-tuning run: what the user wants. How it is done is the plan's."""

    model: Text
    """A folder, a .gguf file, or a name on the Hugging Face hub."""
    method: Literal["full", "lora", "qlora", "peft", "relora", "loqt"] = "lora"
    """What is trained: all weights, LoRA (`qlora`: over 4 bits; `relora`, `loqt`: merged at intervals), `peft`."""
    lora: Lora = Lora()
    """Settings of the adapters; used with `method: lora` and `qlora`."""
    objective: ObjectiveName = "sft"
    """What is learned: texts (`sft`), preferences, a teacher, scores, labels, embeddings, or what earns rewards."""
    preference: Preference = Preference()
    """Settings of objectives that learn from preferences."""
    distillation: Distillation = Distillation()
    """Settings of `objective: distill`."""
    embedding: Embedding = Embedding()
    """Settings of `objective: embed`."""
    rollout: Rollout = Rollout()
    """Settings of `objective: grpo` and `rloo`, and of answers with `distillation.on_policy`."""
    rewards: Rewards = []
    """With `objective: grpo` and `rloo`: how answers are checked; the reward is the sum."""
    labels: list[Text] = []
    """With `objective: classify` and `classify_tokens`: names of the classes; those in the data when left out."""
    peft: dict[Text, Any] = {}
    """With `method: peft`: its `peft_type`, such as `IA3`, and the fields of that type's config in the peft library."""
    adapter: Text | None = None
    """Folder of an existing adapter over the same model, ours or peft's, to train on; its settings come with it."""
    data: Annotated[Datasets, Field(min_length=1)]
    """Data sets to train on."""
    eval: Datasets = []
    """Held-out data sets, and tasks (by `format`): losses and scores before, during and after training."""
    held_out: Annotated[Number, Field(ge=0)] | None = None
    """Training records to hold out: a share below 1, or a number; 0: none. Default: 5% (200 at most) without `eval`."""
    chat_template: Text | None = None
    """File with a chat template (Jinja, or JSON with one) to use instead of the model's own."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens are targets: all assistant turns, the last one only, or everything."""
    special_tokens: list[Text] = []
    """Special tokens that keep their meaning in texts, e.g. `<|tool_call|>`; all others in texts are plain text."""
    new_tokens: list[Text] = []
    """Tokens to add to the vocabulary, which grows to a multiple of 64; their rows are trained."""
    sequence_length: Annotated[Count, Field(ge=8)] = 2048
    """Longest sequence, in tokens (never more than the model was made for); examples are packed into such sequences."""
    too_long: Literal["truncate", "split", "drop"] | None = None
    """What happens to examples longer than `sequence_length`; by default texts are split and others truncated."""
    bad_records: Literal["stop", "skip"] = "stop"
    """Records that cannot be trained on: name them all and stop, or leave them out and say how many."""
    exclude: Text | None = None
    """File of training records to leave out, by their content, as the run page writes it (`excluded.jsonl`)."""
    batch_tokens: Annotated[Count, Field(ge=8)] | None = None
    """Tokens per optimizer step, over all devices; proposed from the data's size when left out."""
    epochs: Annotated[Number, Field(gt=0, le=10000)] | None = None
    """Passes over the data; proposed from its size when left out: one, or as many as make 100 steps of a tiny set."""
    steps: Count | None = None
    """Stop after this many optimizer steps, instead of after `epochs`."""
    learning_rate: Annotated[Number, Field(gt=0)] | None = None
    """Peak learning rate; proposed from method and model when left out (2e-4 for adapters of 8B, 2e-5 for all)."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Shape of the learning rate after warm-up (wsd: warm-up, stable, decay)."""
    warmup: Annotated[Number, Field(ge=0)] = 0.03
    """Warm-up: a share of all steps when below 1, else a number of steps."""
    optimizer: Literal[
        "adamw",
        "adamw_8bit",
        "adamw_4bit",
        "adamw_fp8",
        "lion",
        "muon",
        "adafactor",
        "sgd",
        "galore",
        "apollo",
        "lisa",
        "badam",
    ] = "adamw"
    """Optimizer; AdamW's states in fewer bits, in low rank (`galore`, `apollo`), of some layers (`lisa`, `badam`)."""
    weight_decay: Annotated[Number, Field(ge=0, le=10)] = 0.0
    """Weight decay, on matrices only."""
    max_grad_norm: Annotated[Number, Field(gt=0)] | None = 1.0
    """Gradients with a larger norm are scaled down to it; null switches this off."""
    quantization_aware: Literal["int4", "q4_0", "fp8", "nvfp4"] | None = None
    """Train for a quantized export: linears compute with weights rounded exactly as that export type stores them."""
    z_loss: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """Weight of a penalty that keeps logits near zero (the squared log of each softmax's sum); 1e-4 is usual."""
    neftune_noise_alpha: Annotated[Number, Field(ge=0, le=1000)] = 0.0
    """Noise on embeddings while training (NEFTune), of at most alpha / sqrt(tokens x width); 5 is usual, 0: none."""
    router_aux_loss_coef: Annotated[Number, Field(ge=0, le=10)] | None = None
    """Weight of the load-balancing loss of an MoE model's routers; when left out, what the model's config asks for."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """Arithmetic; `auto` takes bf16 where the device has it; `fp8` is bf16 with large matmuls in fp8 (newer GPUs)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; `auto` takes a GPU when there is one."""
    deterministic: bool = False
    """On a GPU: only kernels that give the same bits every time (slower). A CPU always does."""
    seed: Annotated[WholeNumber, Field(ge=0, lt=2**63)] = 0
    """Seed of data order, initial adapters and dropout."""
    eval_every: Count | None = None
    """Steps between evaluations; by default up to ten, in a tenth of the training time, on a sample if needed."""
    stop_when: StopRule | None = None
    """End the run early: `no gain in 3 evaluations` (or that `of TASK`), `loss below 1.2`, `TASK above 0.6`."""
    save_every: Count | None = None
    """Steps between checkpoints; every ten minutes and at the end of each epoch when left out."""
    keep: Count = 2
    """Newest checkpoints to keep; the best one by held-out loss is kept as well."""
    max_minutes: Annotated[Number, Field(gt=0)] | None = None
    """Save and stop in time to end within this many minutes; `train` again continues."""
    profile_steps: ProfileSteps | None = None
    """Profile these steps inside the run, e.g. `10:12` (the last included); see `profile` in the run's folder."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""
    sweep: Sweep = {}
    """Several adapters over one base: settings with lists of values, all combined, or a list of variants."""
    output: Folder = "runs/default"
    """Folder of the run: plan, events, checkpoints and the trained weights."""

    @model_validator(mode="after")
    def _tasks_are_evaluated(self) -> Run:
        if task_data := next((dataset for dataset in self.data if dataset.format in TASK_FORMATS), None):
            raise ValueError(f"data: `format: {task_data.format}` is a task's, which is evaluated; put it under `eval`")
        if self.eval_tasks and self.objective in ("reward", "classify", "embed"):
            raise ValueError(f"eval: tasks need a model that predicts tokens, and objective is {self.objective}")
        task = stop_rule(self.stop_when).task if self.stop_when else None
        known = [dataset.title for dataset in self.eval_tasks]
        samples = [dataset.title for dataset in self.eval_tasks if dataset.format == "samples"]
        if task is not None and task in samples:
            raise ValueError(f"stop_when: {task} has prompts, whose answers are shown and not scored")
        if task is not None and task not in known:
            named = f"it has {', '.join(known)}" if known else "none of its data sets has the `format` of a task"
            raise ValueError(f"stop_when: {task} is no task of `eval`: {named}")
        if twice := next((title for title in known if known.count(title) > 1), None):
            raise ValueError(f"eval: two tasks are called {twice}; give each a `name`")
        return self

    @model_validator(mode="after")
    def _suits_objective(self) -> Run:
        if why := _unsuited(self):
            raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _methods_agree(self) -> Run:
        has_type = "peft_type" in self.peft
        if self.method == "peft" and not has_type and self.adapter is None:
            raise ValueError("peft: `method: peft` needs `peft_type`, such as `peft: {peft_type: IA3}`")
        if self.method != "peft" and self.peft:
            raise ValueError(f"peft: it is for `method: peft`, and method is {self.method}")
        if self.method == "full" and self.adapter is not None:
            raise ValueError("adapter: an adapter is trained on with method lora, qlora or peft, and not with `full`")
        if self.method == "peft" and self.new_tokens:
            raise ValueError("new_tokens: they are for `method: full`, `lora` and `qlora`")
        if self.is_merged and (why := _unsuited_merge(self)):
            raise ValueError(why)
        if self.method not in ("lora", "qlora"):
            return self
        if self.new_tokens and self.lora.has_ends:
            raise ValueError("lora.targets: with `new_tokens` embedding and head train their new rows, and no adapter")
        if self.adapter is not None and self.lora.init != "default":
            raise ValueError(f"lora.init: it is {self.lora.init}, but the factors begin as those of `adapter`")
        if self.lora.init == "loftq" and self.method != "qlora":
            raise ValueError("lora.init: `loftq` makes good what 4 or 8 bits lose, so it is for `method: qlora`")
        if self.lora.takes_out and self.method == "qlora":
            raise ValueError(
                f"lora.init: `{self.lora.init}` takes its factors out of the base's weights, which `qlora` holds "
                "in few bits; use `loftq`, `eva`, or `method: lora`"
            )
        return self

    @model_validator(mode="after")
    def _can_be_rounded(self) -> Run:
        if self.quantization_aware is None:
            return self
        if self.method not in ("full", "lora"):
            raise ValueError(
                f"quantization_aware: it rounds base and adapter together, which method {self.method} cannot; use "
                "`lora` or `full`"
            )
        if self.precision == "fp8":
            raise ValueError(
                "quantization_aware: its weights are multiplied in bf16 or fp32; leave `precision: fp8` out"
            )
        if self.method == "lora" and (self.lora.dora or self.lora.dropout or self.lora.takes_out):
            named = "dora" if self.lora.dora else "dropout" if self.lora.dropout else f"init: {self.lora.init}"
            raise ValueError(f"quantization_aware: it rounds the merged weight, which goes without `lora.{named}`")
        return self

    @property
    def eval_texts(self) -> list[Dataset]:
        """The held-out data sets whose loss is measured."""
        return [dataset for dataset in self.eval if dataset.format not in TASK_FORMATS]

    @property
    def eval_tasks(self) -> list[Dataset]:
        """The held-out data sets that are asked as tasks."""
        return [dataset for dataset in self.eval if dataset.format in TASK_FORMATS]

    @property
    def has_adapters(self) -> bool:
        return self.method != "full"

    @property
    def has_lora(self) -> bool:
        """Whether the trained adapters are low-rank ones of our own."""
        return self.method in ("lora", "qlora", "relora", "loqt")

    @property
    def unused_lora(self) -> list[str]:
        """Settings of `lora` that say something, where the method has no use for them."""
        fields = {} if self.has_lora else Lora.model_fields
        return [f"lora.{name}" for name, field in fields.items() if getattr(self.lora, name) != field.default]

    @property
    def is_merged(self) -> bool:
        """Whether adapters are merged into the base while it trains, so that the result is a model."""
        return self.method in ("relora", "loqt")

    @property
    def gives_adapter(self) -> bool:
        return self.has_adapters and not self.is_merged

    @property
    def algorithm(self) -> str:
        """The optimizer, however its states are held."""
        return self.optimizer.partition("_")[0]

    @property
    def optimizer_states(self) -> Literal["int8", "int4", "fp8"] | None:
        """How the optimizer's states are to be held, where that is asked for."""
        wanted = {"adamw_8bit": "int8", "adamw_4bit": "int4", "adamw_fp8": "fp8"}
        return wanted.get(self.optimizer)  # pyright: ignore[reportReturnType]


_PREFERENCE_SETTINGS: dict[str, tuple[str, ...]] = {
    "sft": (),
    "dpo": ("loss", "beta", "label_smoothing", "length_normalised", "sft_weight"),
    "kto": ("beta", "desirable_weight", "undesirable_weight"),
    "orpo": ("beta", "sft_weight"),
    "simpo": ("beta", "label_smoothing", "sft_weight", "margin"),
    "cpo": ("loss", "beta", "label_smoothing", "sft_weight"),
    "distill": (),
    "reward": (),
    "classify": (),
    "classify_tokens": (),
    "embed": (),
    "grpo": (),
    "rloo": (),
}


def _unsuited(run: Run) -> str | None:
    """Which setting does not go with the objective, in a sentence; None where all do."""
    objective, preference = run.objective, run.preference
    used = _PREFERENCE_SETTINGS[objective]
    changed = {name for name, field in Preference.model_fields.items() if getattr(preference, name) != field.default}
    if unused := sorted(changed - set(used)):
        known = f"it has {', '.join(used)}" if used else "it learns from no preferences"
        return f"`objective: {objective}` has no use for preference.{unused[0]}: {known}"
    if objective in ("embed", "classify_tokens") and run.chat_template is not None:
        return f"chat_template: `objective: {objective}` reads texts as the tokenizer by itself does; leave it out"
    if why := _unsuited_teacher(run) or _unsuited_head(run) or _unsuited_embedding(run) or _unsuited_rollout(run):
        return why
    for name in ("z_loss", "neftune_noise_alpha"):
        if getattr(run, name) and objective != "sft":
            return f"{name} is for `objective: sft`, not for {objective}"
    if objective in ("sft", "distill"):
        return None
    if preference.loss == "robust" and objective != "dpo":
        return f"preference.loss robust is for `objective: dpo`, not for {objective}"
    if preference.loss == "robust" and not preference.label_smoothing:
        return "preference.loss robust needs label_smoothing, the share of labels that may be wrong, such as 0.1"
    if preference.label_smoothing and preference.loss in ("hinge", "ipo"):
        return f"preference.label_smoothing is for the sigmoid and robust losses, not for {preference.loss}"
    if preference.length_normalised and preference.loss != "sigmoid":
        return "preference.length_normalised is for the sigmoid loss (ipo normalises by length already)"
    if run.train_on != "assistant":
        return f"`objective: {objective}` compares answers as they stand in the data; leave train_on out"
    if run.too_long == "split":
        return f"`objective: {objective}` needs answers in one piece; too_long may be truncate or drop"
    return None


def _unsuited_merge(run: Run) -> str | None:
    """Which setting does not go with adapters that are merged while they are trained, in a sentence."""
    lora, method = run.lora, f"`method: {run.method}`"
    if run.adapter is not None or run.new_tokens:
        return f"{'adapter' if run.adapter else 'new_tokens'}: {method} merges adapters of its own into the base"
    if lora.dora or lora.init != "default" or lora.has_ends:
        named = "dora" if lora.dora else "targets" if lora.has_ends else "init"
        return f"lora.{named}: {method} has plain adapters on the linears of the layers, drawn anew at each merge"
    if run.method == "loqt" and (lora.dropout or lora.b_rate != 1):
        named = "dropout" if lora.dropout else "b_rate"
        return f"lora.{named}: `method: loqt` trains the second factors alone, over directions of the gradient"
    return None


def _unsuited_teacher(run: Run) -> str | None:
    """Which setting does not go with a teacher, or is for one alone, in a sentence."""
    if run.objective != "distill":
        is_set = run.distillation != Distillation()
        return f"distillation is for `objective: distill`, and objective is {run.objective}" if is_set else None
    if run.distillation.teacher is None:
        return "distillation: `objective: distill` needs a `teacher`, such as `distillation: {teacher: FOLDER}`"
    if run.distillation.on_policy and run.distillation.top_k is not None:
        return (
            "distillation.top_k: with `on_policy` the teacher is asked about answers that do not exist before; leave "
            "one of them out"
        )
    if run.distillation.on_policy and run.profile_steps is not None:
        return "profile_steps: steps of distillation.on_policy begin with answers, which are not profiled yet"
    if run.new_tokens:
        return "new_tokens: the teacher of `objective: distill` does not know them"
    return None


LAYERS_ALONE = (
    "with `objective: {}` adapters are on the layers and begin without effect; leave out `init`, and the embedding and "
    "the head in `targets`"
)


def _unsuited_head(run: Run) -> str | None:
    """Which setting does not go with a head for labels or rewards, or is for one alone, in a sentence."""
    classifies = run.objective in ("classify", "classify_tokens")
    if not classifies and run.labels:
        return f"labels are for `objective: classify` and `classify_tokens`, and objective is {run.objective}"
    if classifies and (len(run.labels) == 1 or len(set(run.labels)) < len(run.labels)):
        such = "[bad, good]" if run.objective == "classify" else "[O, B-PER, I-PER]"
        return f"labels: `objective: {run.objective}` needs two names or more, all different, such as `labels: {such}`"
    if not classifies and run.objective != "reward":
        return None
    if run.method == "peft" or run.is_merged or run.adapter is not None:
        return f"`objective: {run.objective}` trains a new head; method may be full, lora or qlora, without `adapter`"
    if run.has_lora and (run.lora.has_ends or run.lora.init != "default"):
        return f"lora: {LAYERS_ALONE.format(run.objective)}"
    if run.new_tokens:
        return f"new_tokens: they are not for `objective: {run.objective}`"
    if run.router_aux_loss_coef:
        return f"router_aux_loss_coef is for objectives over tokens, not for {run.objective}"
    return None


def _unsuited_embedding(run: Run) -> str | None:
    """Which setting does not go with embeddings, or is for them alone, in a sentence."""
    if run.objective != "embed":
        is_set = run.embedding != Embedding()
        return f"embedding is for `objective: embed`, and objective is {run.objective}" if is_set else None
    if run.method not in ("full", "lora", "qlora") or run.adapter is not None:
        return "`objective: embed`: method may be full, lora or qlora, without `adapter`"
    if run.has_lora and (run.lora.has_ends or run.lora.init != "default"):
        return f"lora: {LAYERS_ALONE.format(run.objective)}"
    if run.new_tokens:
        return "new_tokens: they are not for `objective: embed`"
    if run.router_aux_loss_coef:
        return "router_aux_loss_coef is for objectives over tokens, not for embed"
    if len(set(run.embedding.matryoshka)) < len(run.embedding.matryoshka):
        return "embedding.matryoshka: a number of dimensions stands there twice"
    if run.profile_steps is not None:
        return "profile_steps: steps of `objective: embed` are not profiled yet"
    return None


def _unsuited_rollout(run: Run) -> str | None:
    """Which setting does not go with the model's own answers, or is for them alone, in a sentence."""
    objective, rollout = run.objective, run.rollout
    if objective == "distill" and run.distillation.on_policy and not run.rewards:
        used = {"max_answer_tokens", "temperature"}
        others = (name for name, field in Rollout.model_fields.items() if getattr(rollout, name) != field.default)
        unused = next((name for name in others if name not in used), None)
        known = "distillation.on_policy has one answer to each prompt, with max_answer_tokens and temperature"
        return f"rollout.{unused}: {known}" if unused else None
    if objective not in ("grpo", "rloo"):
        why = f"rollout and rewards are for `objective: grpo` and `rloo`, and objective is {objective}"
        return why if rollout != Rollout() or run.rewards else None
    if not run.rewards:
        return f"rewards: `objective: {objective}` needs at least one, such as `rewards: [exact]`"
    if rollout.engine == "vllm" and (why := _unsuited_to_vllm(run)):
        return f"rollout.engine: vllm {why}; use engine: own"
    titles = [reward.title for reward in run.rewards]
    if twice := next((title for title in titles if titles.count(title) > 1), None):
        return f"rewards: two of them are called {twice}; give each a `name`"
    if rollout.max_answer_tokens > run.sequence_length - 8:
        return f"rollout.max_answer_tokens leaves no room for a prompt in sequence_length {run.sequence_length}"
    if run.profile_steps is not None:
        return f"profile_steps: steps of `objective: {objective}` begin with answers, which are not profiled yet"
    if objective == "rloo" and (rollout.loss != "dapo" or rollout.ratios != "token"):
        return "rollout.loss and rollout.ratios are for `objective: grpo`; rloo has one loss, over whole answers"
    if objective == "rloo" and rollout.scale_rewards == "group":
        return "rollout.scale_rewards: with `objective: rloo` it may be batch or none"
    if rollout.beta and (
        not run.has_lora or run.is_merged or run.adapter is not None or run.new_tokens or run.lora.init != "default"
    ):
        return (
            "rollout.beta: the reference is the model with its adapter switched off, so it needs method lora or qlora, "
            "begun anew (no `adapter`, `new_tokens` or `lora.init`); leave beta at 0"
        )
    if rollout.updates > 1 and str(run.peft.get("peft_type", "")).upper() == "ADALORA":
        return "rollout.updates: AdaLoRA's schedule goes by steps of one update"
    return None


def _unsuited_to_vllm(run: Run) -> str | None:
    """Why vLLM cannot answer with what is trained."""
    if run.method in ("qlora", "loqt"):
        return f"would answer with the base as its files have it, and method {run.method} trains on one in few bits"
    if run.method != "lora":
        return f"is given an adapter before each step, so it needs method lora, and method is {run.method}"
    if run.lora.dora:
        return "rejects DoRA"
    if run.new_tokens:
        return "ignores the embeddings of new_tokens"
    if run.quantization_aware is not None:
        return "would answer with a base that is not rounded, and quantization_aware trains on one that is"
    if run.deterministic:
        return "does not draw the same bits each time, as deterministic promises"
    return None


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of what may stand in run.yaml, for editors and for the settings reference."""
    schema = _standard_bounds(Run.model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema | {"title": "Tunesmith run"}


_JSON_SCHEMA_NAMES = {
    "gt": "exclusiveMinimum",
    "ge": "minimum",
    "lt": "exclusiveMaximum",
    "le": "maximum",
    "min_length": "minItems",
}


def _standard_bounds(node: Any) -> Any:
    """pydantic leaves its own names on bounds that stand behind a validator; editors know JSON Schema's."""
    if isinstance(node, list):
        return [_standard_bounds(item) for item in node]
    if isinstance(node, dict):
        return {_JSON_SCHEMA_NAMES.get(key, key): _standard_bounds(value) for key, value in node.items()}
    return node
