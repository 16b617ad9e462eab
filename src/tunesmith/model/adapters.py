"""Every other adapter: the methods of the peft library (`method: peft`), by its public functions.

Two kinds. *Tuners* (IA3, VeRA, OFT, ...) exchange modules inside the model: what is called, compiled, sharded and saved
is still the model. *Prompts* (prefix, prompt and p-tuning) put trained vectors before each document: `Prompted` stands
before the model and gives hidden states of the document's own tokens. Documents are then padded, one a row, since each
needs the prompt before it.

Legend: B documents, T tokens, P prompt tokens, H hidden.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.disk import expanded
from tunesmith.errors import UserError, first_line, listed
from tunesmith.model.load import load_config, load_shallow, load_skeleton, locate, quiet
from tunesmith.model.structure import body, is_encoder_decoder, linears_of_layers

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

NAME = "default"
REFUSED = {
    "XLORA": "it mixes LoRA adapters that exist already",
    "POLY": "it needs the task of each document",
    "MULTITASK_PROMPT_TUNING": "it needs the task of each document",
    "CPT": "it has a loss of its own",
    "CARTRIDGE": "it is distilled from a long context, not trained on examples",
    "ADAPTION_PROMPT": "it replaces the attention of Llama by an older one",
    "LILY": "what it adds for a token depends on the tokens after it",
    "SHADOW": "it trains a second network beside the model",
}
"""Methods for causal models that are not trained here, and why."""
WORDS = {int: "a number", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}
WORDS |= dict.fromkeys((list, tuple, set), "a list")
STEPS = 1000
"""For configs that want the number of steps before it is known."""


def make_config(run: Run, *, steps: int = STEPS) -> PeftConfig:
    """The config that the settings name, checked; UserError where peft would not take it."""
    kinds = _kinds()
    given = dict(run.peft)
    if run.adapter is not None:
        given = json.loads((expanded(run.adapter) / "adapter_config.json").read_text()) | given
    wanted = str(given.pop("peft_type")).upper().replace("-", "_")
    if wanted not in kinds:
        near = get_close_matches(wanted, kinds, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"it has {listed(sorted(kinds), most=60)}."
        raise UserError(f"peft.peft_type: the installed peft library has no {wanted}; {hint}")
    if wanted in REFUSED:
        raise UserError(f"peft.peft_type: {wanted} cannot be trained here: {REFUSED[wanted]}.")
    fields = {field.name for field in dataclasses.fields(kinds[wanted]) if field.init}
    ours = {"peft_type", "task_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping"}
    if run.adapter is not None:
        given = {name: value for name, value in given.items() if name in fields - ours}
    if strange := sorted(given.keys() - (fields - ours)):
        near = get_close_matches(strange[0], fields - ours, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"it has {listed(sorted(fields - ours), most=40)}."
        raise UserError(f"peft.{strange[0]}: {wanted} has no such field; {hint}")
    hints = _type_hints(kinds[wanted])
    for name, value in run.peft.items():
        if name in hints and value is not None and not _takes(hints[name], value):
            words = " or ".join(sorted(set(_words(hints[name]))))
            raise UserError(f"peft.{name} is {json.dumps(value)[:60]}, but {wanted} needs {words} there.")
    if wanted == "ADALORA":
        given.setdefault("total_step", steps)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = kinds[wanted](**given, task_type="CAUSAL_LM")
    except (TypeError, ValueError, ImportError) as error:
        raise UserError(f"peft: {wanted} does not take these settings: {first_line(error)}.") from error
    if config.is_prompt_learning and getattr(config, "num_virtual_tokens", 1) is None:
        raise UserError(f"peft.num_virtual_tokens: say how many vectors {wanted} puts before a document, such as 20.")
    if wanted == "TRAINABLE_TOKENS" and not config.token_indices:
        raise UserError(
            "peft.token_indices: say the ids of the tokens whose embeddings TRAINABLE_TOKENS trains, such as [32000]."
        )
    init = getattr(config, "init_lora_weights", None)
    if isinstance(init, str) and init not in ("gaussian", "orthogonal"):
        raise UserError(
            f"peft.init_lora_weights: `{init}` changes the base's weights or needs data; use method: lora or qlora "
            "with lora.init."
        )
    return config


def _kinds() -> dict[str, type]:
    try:
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING
    except ImportError as error:
        raise UserError("method: peft needs the peft library; install `tunesmith[peft]`.") from error
    return {getattr(kind, "value", str(kind)): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}


def _type_hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except (NameError, TypeError):  # of names that only a type checker imports
        return {}


def _takes(hint: Any, value: Any) -> bool:
    """Whether a field of this type takes a value out of YAML, as far as plain types tell; others take anything."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_takes(one, value) for one in inner)
    if origin is typing.Literal:
        return value in inner
    kind = origin or hint
    if kind is type(None):
        return value is None
    if kind in (int, float):  # peft calls some numbers whole that need not be
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind in (list, tuple, set):
        return isinstance(value, list) and all(_takes(inner[0], one) for one in value if inner)
    return isinstance(value, kind) if kind in WORDS else True


def _words(hint: Any) -> list[str]:
    """What a field of this type takes."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [words for one in inner for words in _words(one)]
    if origin is typing.Literal:
        return [json.dumps(one) for one in inner]
    return [WORDS[kind]] if (kind := origin or hint) in WORDS else []


def is_prompt(run: Run) -> bool:
    return run.method == "peft" and make_config(run).is_prompt_learning


def check_merges(run: Run) -> None:
    """UserError where what the run trains can be in no weight, before anything is loaded."""
    _refuse_prompt(make_config(run))


def _refuse_prompt(config: Any) -> None:
    if config.is_prompt_learning:
        kind = config.peft_type.value
        raise UserError(f"{kind} puts vectors before each document, which no weight can take in; keep the adapter.")


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A model with an adapter of peft's on it."""

    model: nn.Module
    """What is called: the model itself, or a `Prompted` before it."""
    peft: PeftModel

    @property
    def config(self) -> PeftConfig:
        return self.peft.peft_config[NAME]

    @property
    def is_prompt(self) -> bool:
        return bool(self.config.is_prompt_learning)


def put_on(model: nn.Module, run: Run, *, steps: int = STEPS, start: Path | None = None, empty: bool = False) -> Tuned:
    """Freeze the model and put the run's adapter on it, drawn from the run's seed or as it is in the folder `start`."""
    from peft import PeftModel, get_peft_model

    config = make_config(run, steps=steps)
    _fill_targets(config, model)
    model.requires_grad_(False)
    with _in_words(f"peft: {config.peft_type.value}", model), torch.random.fork_rng(devices=_devices(model)):
        torch.manual_seed(run.seed)
        if start is None or config.is_prompt_learning:
            peft = get_peft_model(model, config, adapter_name=NAME, low_cpu_mem_usage=empty)
            if start is not None:
                _put_prompt(peft, start)
        else:
            peft = PeftModel.from_pretrained(model, str(start), adapter_name=NAME, is_trainable=True)
            if config.peft_type.value == "ADALORA":
                peft.peft_config[NAME].total_step = getattr(config, "total_step", steps)
    tuned = Tuned(Prompted(peft) if config.is_prompt_learning else model, peft)
    _check_trained(tuned)
    return tuned


def _fill_targets(config: Any, model: nn.Module) -> None:
    """Where nothing is said, and peft has no modules for models of this kind: those that it takes in a Llama, where the
    model has modules of these names; otherwise all linears, or all norms for a method that trains these. Of a model
    that sees images only those that text passes through: the others, often of the same names, would get no gradient."""
    if getattr(config, "target_parameters", None) or not hasattr(config, "target_modules"):
        return
    if config.target_modules is None:
        config.target_modules = _usual_targets(config, model)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else body(model)
    targets, inside = config.target_modules, {*decoder.modules(), model.get_output_embeddings()}
    if is_encoder_decoder(model) or targets is None or (isinstance(targets, str) and targets != "all-linear"):
        return
    linears = linears_of_layers(model)
    meant = {
        name: module
        for name, module in model.named_modules()
        if (name in linears if targets == "all-linear" else _is_named(name, targets))
    }
    if not inside >= set(meant.values()):
        config.target_modules = {name for name, module in meant.items() if module in inside}
        if feedforward := getattr(config, "feedforward_modules", None):
            config.feedforward_modules = {name for name in config.target_modules if _is_named(name, feedforward)}


def _is_named(name: str, ends: Iterable[str]) -> bool:
    return any(f".{name}".endswith(f".{one}") for one in ends)


def _usual_targets(config: Any, model: nn.Module) -> Any:
    """None where the method needs none."""
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.utils import constants

    kind, family = config.peft_type.value, getattr(model.config, "model_type", "")
    is_ia3 = kind == "IA3"
    known = constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING if is_ia3 else None
    known = known or getattr(PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type], "target_module_mapping", None)
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if not known:
        return None
    if family in known:
        if is_ia3 and config.feedforward_modules is None:
            config.feedforward_modules = constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING[family]
        return set(known[family])
    likely = set(known["llama"])
    if kind == "LN_TUNING" and not likely <= names:
        likely = {n.rpartition(".")[2] for n, module in model.named_modules() if type(module).__name__.endswith("Norm")}
    if is_ia3 and config.feedforward_modules is None:
        config.feedforward_modules = {"down_proj"} & names if likely <= names else set()
    return likely if likely <= names else "all-linear"


def _put_prompt(peft: PeftModel, folder: Path) -> None:
    """Give a prompt the vectors of the files, where they are what is trained."""
    from safetensors.torch import load_file

    (vectors,) = load_file(folder / "adapter_model.safetensors").values()
    trained = [one for one in peft.prompt_encoder.parameters() if one.requires_grad]
    kind = peft.peft_config[NAME].peft_type.value
    if len(trained) != 1 or trained[0].shape != vectors.shape:
        raise ValueError(
            f"the files of {kind} hold what its encoder gives, and not the encoder that would be trained on"
        )
    with torch.no_grad():
        trained[0].copy_(vectors)


def open_saved(model: nn.Module, folder: Path) -> Tuned:
    """Put the adapter in `folder`, of any method, on the model, to be used."""
    from peft import PeftModel

    with _in_words(f"The adapter in {folder}", model):
        peft = PeftModel.from_pretrained(model, str(folder), adapter_name=NAME)
    return Tuned(Prompted(peft) if peft.peft_config[NAME].is_prompt_learning else model, peft)


def _check_trained(tuned: Tuned) -> None:
    kind = tuned.config.peft_type.value
    trained = {parameter for parameter in tuned.peft.parameters() if parameter.requires_grad}
    if not trained:
        raise UserError(f"peft: {kind} with these settings leaves nothing to train.")
    if trained - set(tuned.model.parameters()):
        raise UserError(f"peft.peft_type: {kind} trains weights outside the model, which cannot be saved here.")


def _devices(model: nn.Module) -> list[torch.device]:
    device = next(model.parameters()).device
    return [device] if device.type == "cuda" else []


@contextlib.contextmanager
def _in_words(what: str, model: nn.Module) -> Iterator[None]:
    """peft says no with many kinds of exceptions, and much besides."""
    try:
        with warnings.catch_warnings(), quiet():
            warnings.simplefilter("ignore")
            yield
    except (
        ValueError,
        TypeError,
        RuntimeError,
        KeyError,
        AttributeError,
        NotImplementedError,
        AssertionError,
    ) as error:
        if "DefaultCPUAllocator" in str(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        said = first_line(error).rstrip(".")
        raise UserError(f"{what} does not go on {type(model).__name__}: {said}.") from error


def trained_parameters(run: Run) -> int:
    """How many the run's adapter has, by putting it on the model's modules without weights; or, where its code needs
    weights, on models of one and two layers."""
    key = run.model_dump_json(include={"model", "peft", "adapter", "trust_remote_code"})
    if key not in _counted:
        _counted[key] = _trained_parameters(run)
    return _counted[key]


_counted: dict[str, int] = {}
"""A plan asks more than once."""


def _trained_parameters(run: Run) -> int:
    try:
        skeleton = load_skeleton(run)
        with torch.device("meta"):
            return _count(put_on(skeleton, run, empty=True))
    except UserError as error:
        if "meta" not in str(error).lower():
            raise
    one, two = (_count(put_on(_shallow(run, layers), run)) for layers in (1, 2))
    layers = getattr(load_config(run).get_text_config(), "num_hidden_layers", 1)
    return one + (layers - 1) * (two - one)


def _shallow(run: Run, layers: int) -> nn.Module:
    try:
        return load_shallow(run, layers=layers)
    except UserError as error:
        raise UserError(
            f"peft.peft_type: how much {make_config(run).peft_type.value} trains cannot be told without loading the "
            f"model, of which none with {layers} of its layers can be built; use another type, or method: lora."
        ) from error


def _count(tuned: Tuned) -> int:
    return sum(parameter.numel() for parameter in tuned.peft.parameters() if parameter.requires_grad)


# Prompts


class Prompted(nn.Module):
    """A model with trained vectors before each document, which looks like the model alone to those who call it: its
    outputs are those of the document's own tokens."""

    def __init__(self, peft: PeftModel):
        super().__init__()
        self.peft = peft
        self.inner = _PromptedBody(peft)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.peft.get_base_model(), name)

    @property
    def base_model(self) -> nn.Module:
        return self.inner

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        options.pop("use_cache", None)
        output = self.peft(input_ids=input_ids, **options)
        output.logits = output.logits[:, -input_ids.shape[1] :]
        return output

    def generate(self, *arguments: Any, **options: Any) -> torch.Tensor:
        return self.peft.generate(*arguments, **options)


class _PromptedBody(nn.Module):
    """All of the model but its head, with the prompt before each document."""

    def __init__(self, peft: PeftModel):
        super().__init__()
        self.peft = (peft,)  # not its child: it is Prompted's

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, use_cache: bool = False
    ) -> tuple[torch.Tensor]:
        (peft,) = self.peft
        model, config = peft.get_base_model(), peft.peft_config[NAME]
        count, length = input_ids.shape
        options: dict[str, Any] = {}
        if attention_mask is not None:
            before_bp = attention_mask.new_ones(count, config.num_virtual_tokens)
            options["attention_mask"] = torch.cat([before_bp, attention_mask], dim=1)
        found = body(model)
        if config.peft_type.value == "PREFIX_TUNING":
            prefix = peft.get_prompt(count, max_cache_len=length + config.num_virtual_tokens)
            output = found(input_ids=input_ids, past_key_values=prefix, use_cache=True, **options)
        else:
            embedded_bth = model.get_input_embeddings()(input_ids)
            prompts_bph = peft.get_prompt(count).to(embedded_bth.dtype)
            both = torch.cat([prompts_bph, embedded_bth], dim=1)
            output = found(inputs_embeds=both, use_cache=False, **options)
        return (output[0][:, -length:],)


# What is saved


def state(tuned: Tuned) -> dict[str, torch.Tensor]:
    """The adapter's tensors by the names of peft's files; of weights that lie over ranks, as they lie."""
    from peft import get_peft_model_state_dict

    if tuned.is_prompt:
        return {"prompt_embeddings": tuned.peft.get_prompt_embedding_to_save(NAME)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(get_peft_model_state_dict(tuned.peft, adapter_name=NAME, save_embedding_layers=False))


def config_text(tuned: Tuned, run: Run) -> str:
    """What peft needs to know of it, for `adapter_config.json`."""
    source = locate(run.model)
    base = str(Path(source.location).resolve()) if source.is_local else source.location
    described = tuned.config.to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
    return json.dumps(_plain(described), indent=2, sort_keys=True) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return getattr(value, "value", value)


@contextlib.contextmanager
def without(tuned: Tuned) -> Iterator[None]:
    """The base alone, for as long as this lasts."""
    with tuned.peft.disable_adapter():
        yield


def merge(tuned: Tuned) -> list[str]:
    """Put the adapter into the base's weights; returns the names of the modules that it was on. UserError where the
    method cannot."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    kind = tuned.config.peft_type.value
    _refuse_prompt(tuned.config)
    names = [name for name, module in tuned.model.named_modules() if isinstance(module, BaseTunerLayer)]
    try:
        with warnings.catch_warnings(), quiet():
            warnings.simplefilter("ignore")
            tuned.peft.merge_and_unload(safe_merge=True)
    except (AttributeError, NotImplementedError, ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"peft cannot merge {kind}: {first_line(error).rstrip('.')}; keep the adapter.") from error
    return [name for name in names if isinstance(getattr(_module(tuned.model, name), "weight", None), torch.Tensor)]


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


# AdaLoRA


@dataclasses.dataclass(frozen=True)
class RankSchedule:
    """AdaLoRA's share in each step: a penalty that keeps its factors orthogonal, and ranks taken away where they
    matter least. All that it remembers is saved with the run."""

    tuned: Tuned

    @classmethod
    def of(cls, tuned: Tuned | None) -> RankSchedule | None:
        return cls(tuned) if tuned is not None and tuned.config.peft_type.value == "ADALORA" else None

    def penalty(self) -> torch.Tensor:
        """What is added to the loss of a step: how far each factor is from orthogonal, on average."""
        factors = [(name, one) for name, one in self.tuned.model.named_parameters() if one.requires_grad]
        norms = []
        for name, one in factors:
            if "lora_A" in name or "lora_B" in name:
                square = one @ one.T if "lora_A" in name else one.T @ one
                norms.append(torch.linalg.matrix_norm(square - torch.eye(len(square)).to(square)))
        return self.tuned.config.orth_reg_weight * torch.stack(norms).mean()

    def after_update(self, step: int) -> None:
        """With the gradients of this step still there."""
        self.tuned.peft.base_model.update_and_allocate(step)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {}
        for kind in _KEPT:
            found |= {f"{kind}/{name}": value for name, value in getattr(self._allocator, kind).items()}
        ranks = self.tuned.config.rank_pattern or {}
        return found | {f"ranks/{name}": torch.tensor(kept, dtype=torch.uint8) for name, kept in ranks.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._allocator.reset_ipt()
        ranks = {}
        for full_name, value in tensors.items():
            kind, _, name = full_name.partition("/")
            if kind == "ranks":
                ranks[name] = value.bool().tolist()
            else:
                getattr(self._allocator, kind)[name] = value.clone()
        self.tuned.config.rank_pattern = ranks or None

    @property
    def _allocator(self) -> Any:
        return self.tuned.peft.base_model.rankallocator


_KEPT = ("ipt", "exp_avg_ipt", "exp_avg_unc")
