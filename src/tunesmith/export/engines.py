"""The engines that exports are loaded back by: each asked the same few things, in its own process memory.

They stand in for the server that will run the export: transformers, peft, llama.cpp (through xllamacpp), onnxruntime
and vLLM. All of them read the exported files and nothing else of the run.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import logging
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from tunesmith.config.schema import Run
from tunesmith.errors import UserError, first_line
from tunesmith.infer.vllm_server import Server
from tunesmith.model.load import quiet
from tunesmith.model.save import ADAPTER_CONFIG, ADAPTER_FILE
from tunesmith.model.vllm import largest_rank
from tunesmith.plan.models import language_model_class
from tunesmith.run.streamed import StreamedModel, written_weights

Messages = Sequence[dict[str, str]]
FEW = 3
LIKELIEST = 128
"""Tokens whose probabilities llama.cpp and vLLM are asked for at each place. Of 512, llama.cpp takes a third longer."""
SLOTS = 8
"""Sequences that llama.cpp is asked of at once: it reads its weights once for a token of each."""
VLLM_CACHE = 1 << 30
"""Bytes of vLLM's key-value cache, which takes most of the memory where it is not told: for a hundred tokens."""
VLLM_ROOM = 2
"""Tokens of its context that vLLM needs beside a text that it is asked of: one after it, and one that it makes."""
LOUDER = 16.0
EXPORT = "export"
"""The name by which vLLM serves what is proved."""


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the next token at each place of a sequence.

    Legend: T places, V vocabulary, K tokens that an engine tells of: all of the vocabulary, or some."""

    logprobs_tk: torch.Tensor
    ids_tk: torch.Tensor | None = None
    """Which they are, the likeliest first; None: all, in their order."""

    @classmethod
    def of(cls, logits_tv: torch.Tensor) -> Scores:
        return cls(logits_tv.float().log_softmax(-1))

    @classmethod
    def told(cls, rows: Sequence[Sequence[tuple[int, float]]]) -> Scores:
        """Of a row of tokens and their log-probabilities for each place."""
        logprobs = torch.tensor([[logprob for _, logprob in row] for row in rows])
        return cls(logprobs, torch.tensor([[token for token, _ in row] for row in rows]))

    @property
    def best_t(self) -> torch.Tensor:
        return self.logprobs_tk.argmax(1) if self.ids_tk is None else self.ids_tk[:, 0]

    def same_of(self, rows_tv: torch.Tensor) -> torch.Tensor:
        """What others say of the tokens that are told of here."""
        return rows_tv if self.ids_tk is None else rows_tv.gather(1, self.ids_tk)

    def as_many_of(self, rows_tv: torch.Tensor) -> Scores:
        """What would be told of others."""
        return Scores(rows_tv) if self.ids_tk is None else Scores(*rows_tv.topk(self.ids_tk.shape[1]))


class Engine(Protocol):
    name: str

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[Scores]: ...
    def greedy(self, ids: Sequence[int], count: int) -> list[int]: ...
    def tokenize(self, text: str) -> list[int]:
        """Of text in which special tokens stand for themselves; nothing is put around it."""
        ...

    def prompt(self, messages: Messages, mode: dict[str, Any]) -> list[int] | None:
        """By its own chat template; None where it has no place for the template's variables."""
        ...

    def stops_at(self, token: int) -> bool: ...
    def close(self) -> None: ...


class Transformers:
    """A model folder. In fp32, so that what is seen is the files' rounding alone."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False):
        from transformers import AutoTokenizer, GenerationConfig

        self.trusted = {"trust_remote_code": trust_remote_code}
        """Whether code beside the weights may be run: the run's own, which was trusted when it was trained."""
        self.name = f"transformers {importlib.metadata.version('transformers')}"
        with quiet():
            self.model = self._load(folder).eval()
            self.tokenizer = AutoTokenizer.from_pretrained(folder, **self.trusted)
            self.generation = GenerationConfig.from_pretrained(folder)
            # No penalty, and no beams: a text is compared with the likeliest tokens.
            self.model.generation_config = GenerationConfig(eos_token_id=self.generation.eos_token_id)

    def _load(self, folder: Path) -> Any:
        options = {"dtype": torch.float32, "output_loading_info": True}
        with contextlib.redirect_stderr(io.StringIO()):
            model, report = _class_of(folder, self.trusted).from_pretrained(folder, **options, **self.trusted)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if report[kind]:
                raise UserError(f"transformers reports {kind.replace('_', ' ')}: {sorted(map(str, report[kind]))[0]}.")
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(_as_weight)
                module.register_forward_hook(_in_fp32)
        quantized = getattr(model.config, "quantization_config", None)
        if quantized is not None and quantized.quant_method == "bitsandbytes":
            _say_nothing_of_each_matmul()
            for one in (*model.parameters(), *model.buffers()):  # some of what is not quantized stays in 16 bits there
                one.data = one.data.float() if one.dtype in (torch.bfloat16, torch.float16) else one.data
        if quantized is not None:
            with contextlib.redirect_stderr(io.StringIO()):  # compressed-tensors dequantizes now, with bars of its own
                model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False)
        return model

    @torch.no_grad()
    def scores(self, sequences: Sequence[Sequence[int]]) -> list[Scores]:
        return [
            Scores.of(self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]) for ids in sequences
        ]

    @torch.no_grad()
    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        tokens = torch.tensor([list(ids)])
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        with quiet():
            made = self.model.generate(
                tokens, attention_mask=torch.ones_like(tokens), pad_token_id=pad, do_sample=False, max_new_tokens=count
            )
        return made[0, len(ids) :].tolist()

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt(self, messages: Messages, mode: dict[str, Any]) -> list[int] | None:
        text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, **mode)
        return self.tokenize(text)

    def stops_at(self, token: int) -> bool:
        named = self.generation.eos_token_id
        return token in (named if isinstance(named, list) else [named])

    def close(self) -> None:
        del self.model


def _class_of(folder: Path, trusted: dict[str, bool]) -> Any:
    from transformers import AutoConfig

    return language_model_class(AutoConfig.from_pretrained(folder, **trusted))


def _say_nothing_of_each_matmul() -> None:
    """bitsandbytes warns at each matmul in 8 bits whose input is not fp16, which is all of them here."""
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def _as_weight(linear: torch.nn.Linear, args: tuple) -> tuple:
    """nvfp4 comes out of its library in bf16, whatever is asked for, and when the model is first called."""
    weight = linear.weight
    return tuple(x.to(weight.dtype) for x in args) if weight.dtype in (torch.bfloat16, torch.float16) else args


def _in_fp32(_: torch.nn.Linear, args: tuple, made: Any) -> Any:
    """Routers are linears that may give more than a tensor, and are not quantized."""
    return made.float() if isinstance(made, torch.Tensor) else made


class Streamed(Transformers):
    """A model folder that does not fit into memory, by transformers' own modules with a layer of weights at a time."""

    def __init__(self, folder: Path, run: Run):
        self.run = run
        super().__init__(folder, trust_remote_code=run.trust_remote_code)
        self.name += ", one layer at a time"

    def _load(self, folder: Path) -> Any:
        self.streamed = StreamedModel(written_weights(folder, self.run))
        return self.streamed.model

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[Scores]:
        return [Scores.of(logits) for logits in self.streamed.logits_of(sequences)]

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """A few tokens only: all weights are read for each."""
        made: list[int] = []
        while len(made) < min(count, FEW):
            made.append(int(self.streamed.logits(torch.tensor([[*ids, *made]]))[0, -1].argmax()))
        return made


class Peft(Transformers):
    """A base with an adapter folder."""

    has_adapter = True

    def __init__(self, folder: Path, base: Path, *, trust_remote_code: bool = False):
        self.base = base
        super().__init__(folder, trust_remote_code=trust_remote_code)
        self.name = f"peft {importlib.metadata.version('peft')}"

    def _load(self, folder: Path) -> Any:
        from peft import PeftModel

        base = _class_of(self.base, self.trusted).from_pretrained(self.base, dtype=torch.float32, **self.trusted)
        return PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).to(torch.float32)

    def without_influence(self, ids: Sequence[int]) -> list[str]:
        """Tensors of the adapter that change nothing of what the model says of these tokens."""
        factors = {name: one for name, one in self.model.named_parameters() if "lora_" in name}
        for one in factors.values():
            one.requires_grad_(True)
        generator = torch.Generator().manual_seed(0)
        logits = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
        (logits * torch.randn(logits.shape, generator=generator)).sum().backward()
        found = [name for name, one in factors.items() if one.grad is None or not one.grad.any()]
        self.model.zero_grad(set_to_none=True)
        return found


SERVER = """
import json, sys, xllamacpp
asked = json.loads(sys.argv[1])
parameters = xllamacpp.CommonParams()
parameters.model.path = asked["file"]
parameters.n_ctx, parameters.n_parallel = asked["context"] * asked["slots"], asked["slots"]
parameters.n_gpu_layers, parameters.warmup = 0, False
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = asked["threads"]
parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
# Its flash attention rounds to fp16.
parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
parameters.use_jinja = True
if asked["adapter"]:
    parameters.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(asked["adapter"], 1.0)]
server = xllamacpp.Server(parameters)
print("listening", server.listening_address, flush=True)
sys.stdin.read()
"""
"""llama.cpp's own server, until nobody listens any more."""
LOADING = "error loading model: "
"""Before what llama.cpp does not like about a file."""


class LlamaCpp:
    """A GGUF file, by llama.cpp's own server, spoken to over the loopback interface. It has a process of its own: a
    file that it does not like may end it."""

    def __init__(self, file: Path, *, vocabulary: int, context: int, adapter: Path | None = None):
        self.name = f"llama.cpp (xllamacpp {importlib.metadata.version('xllamacpp')})"
        self.likeliest = min(vocabulary, LIKELIEST)
        threads = torch.get_num_threads()
        asked = {"file": str(file), "context": context, "slots": SLOTS, "threads": threads}
        asked["adapter"] = str(adapter) if adapter else ""
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (closed by close)
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("listening "):
                self._address = line.split()[1]
                return
        why = self._last_words()
        self.close()
        raise UserError(f"llama.cpp does not load {file.name}: {why}.")

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = [line.strip() for line in self._said if line.strip()]
        if found := [line.partition(LOADING)[2] for line in lines if LOADING in line]:
            return found[-1].rstrip(".")  # what comes after it only says that there is no model
        telling = [line for line in lines if "error" in line.lower() or "GGML_ASSERT" in line] or lines
        return telling[-1].rstrip(".") if telling else "it said nothing"

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[Scores]:
        """It tells of what comes after a text alone. So each text is asked of place by place, which costs one token
        as long as its cache has those before, and a place of all of them at once."""
        plain = self.tokenize("a")[0]  # taken by force: at an end token, probabilities would not be told
        options = {"n_predict": 1, "n_probs": self.likeliest, "logit_bias": [[plain, 1e4]]}
        rows: list[list[list[tuple[int, float]]]] = [[] for _ in sequences]
        for first in range(0, len(sequences), SLOTS):
            together = list(enumerate(sequences))[first : first + SLOTS]
            for end in range(1, max(len(ids) for _, ids in together) + 1):
                asked = [(number, ids[:end]) for number, ids in together if end <= len(ids)]
                answers = self._complete([ids for _, ids in asked], **options)
                for (number, _), found in zip(asked, answers, strict=True):
                    told = found["completion_probabilities"][0]["top_logprobs"]
                    rows[number].append([(one["id"], one["logprob"]) for one in told])
        return [Scores.told(one) for one in rows]

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        # Not the tokens whose probabilities it tells: those of a character that has several are left out there.
        (found,) = self._complete([ids], n_predict=count, return_tokens=True)
        return found["tokens"]

    def tokenize(self, text: str) -> list[int]:
        return self._ask("/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"]

    def prompt(self, messages: Messages, mode: dict[str, Any]) -> list[int] | None:
        body = {"messages": list(messages), **({"chat_template_kwargs": mode} if mode else {})}
        text = self._ask("/apply-template", body)["prompt"]
        return self._ask("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]

    def stops_at(self, token: int) -> bool:
        (found,) = self._complete([[token]], n_predict=2, logit_bias=[[token, 1000.0]])
        return found["stop_type"] == "eos"

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()  # asked to end, it waits some seconds for connections
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._said.close()

    def _complete(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[dict[str, Any]]:
        asked = {"prompt": [list(ids) for ids in prompts], "temperature": 0.0, "cache_prompt": True}
        found = self._ask("/completion", {**asked, "top_k": 1, "samplers": ["top_k"], **options})
        return found if isinstance(found, list) else [found]  # one prompt has one answer

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data=data, headers={"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy stands before this machine
        try:
            with opener.open(request, timeout=600) as answer:
                return json.load(answer)
        except OSError as error:
            raise UserError(f"llama.cpp gave no answer: {first_line(error)} ({self._last_words()}).") from error


class Vllm:
    """A model folder, or a base with an adapter folder, by vLLM's own server, spoken to over the loopback interface."""

    def __init__(self, folder: Path, *, vocabulary: int, context: int, dtype: str, base: Path | None = None):
        self.likeliest, self.context = min(vocabulary, LIKELIEST), context
        self.folder, self.has_adapter = folder, base is not None
        options = ["--dtype", dtype, "--max-logprobs", str(self.likeliest), "--max-model-len", str(context)]
        options += ["--max-num-seqs", "1", "--enforce-eager", "--kv-cache-memory-bytes", str(VLLM_CACHE)]
        if base is None:
            self.server = Server(str(folder), [*options, "--served-model-name", EXPORT])
        else:
            rank = largest_rank(json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")))
            options += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", f"{EXPORT}={folder}"]
            options += ["--tokenizer", str(folder), "--generation-config", str(folder), "--served-model-name", "base"]
            self.server = Server(str(base), options, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"})
        self.name = f"vLLM {self.server.version}"

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[Scores]:
        """Of one token more each, since a place is told of by the token after it."""
        return [Scores.told(self._prompt_logprobs(EXPORT, [*ids, 0], self.likeliest)) for ids in sequences]

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        most = min(count, self.context - len(ids))
        return self._complete(EXPORT, ids, max_tokens=most, return_token_ids=True)["token_ids"]

    def tokenize(self, text: str) -> list[int]:
        asked = {"model": EXPORT, "prompt": text, "add_special_tokens": False}
        return self.server.ask("/tokenize", asked)["tokens"]

    def prompt(self, messages: Messages, mode: dict[str, Any]) -> list[int] | None:
        asked = {"model": EXPORT, "messages": list(messages), "chat_template_kwargs": mode}
        return self.server.ask("/tokenize", asked)["tokens"]

    def stops_at(self, token: int) -> bool:
        found = self._complete(EXPORT, [token], max_tokens=2, allowed_token_ids=[token])
        return found["finish_reason"] == "stop"

    def without_influence(self, ids: Sequence[int]) -> list[str]:
        """Tensors of the adapter that change nothing of what vLLM says of these tokens: of each module its two alone
        are put on the base, and louder, since on a GPU vLLM rounds what a small one says to 16 bits."""
        tensors = load_file(self.folder / ADAPTER_FILE.format(suffix=""))
        modules: dict[str, list[str]] = {}
        for name in tensors:
            modules.setdefault(_vllm_module(name), []).append(name)
        plain, found = self._prompt_logprobs("base", ids, FEW), []
        with tempfile.TemporaryDirectory(prefix="tunesmith-") as folder:
            config = (self.folder / ADAPTER_CONFIG).read_text(encoding="utf-8")
            for number, names in enumerate(modules.values()):
                alone = Path(folder, str(number))
                alone.mkdir()
                (alone / ADAPTER_CONFIG).write_text(config, encoding="utf-8")
                loud = {name: tensors[name] * (LOUDER if ".lora_B" in name else 1.0) for name in names}
                save_file(loud, alone / ADAPTER_FILE.format(suffix=""))
                self.server.ask("/v1/load_lora_adapter", {"lora_name": alone.name, "lora_path": str(alone)})
                if self._prompt_logprobs(alone.name, ids, FEW) == plain:
                    found += names
                self.server.ask("/v1/unload_lora_adapter", {"lora_name": alone.name})
        return found

    def close(self) -> None:
        self.server.close()

    def _prompt_logprobs(self, model: str, ids: Sequence[int], count: int) -> list[list[tuple[int, float]]]:
        """For each place but the first: so many tokens and their log-probabilities given what is before it, the
        likeliest first."""
        found = self._complete(model, ids, max_tokens=1, prompt_logprobs=count)["prompt_logprobs"]
        ranked = [sorted(row.items(), key=lambda one: one[1]["rank"])[:count] for row in found[1:]]
        return [[(int(token), told["logprob"]) for token, told in row] for row in ranked]

    def _complete(self, model: str, ids: Sequence[int], **options: Any) -> dict[str, Any]:
        asked = {"model": model, "prompt": list(ids), "temperature": 0.0, "repetition_penalty": 1.0}
        return self.server.ask("/v1/completions", asked | options)["choices"][0]


def _vllm_module(name: str) -> str:
    """What vLLM loads together: an adapted module, or all experts of a layer."""
    module = re.sub(r"\.lora_(embedding_)?[AB].*", "", name)
    return re.sub(r"\.experts\..*", ".experts", module)


class OnnxRuntime(Transformers):
    """An ONNX graph with its cache."""

    def __init__(self, folder: Path):
        import onnxruntime

        super().__init__(folder)
        self.name = f"onnxruntime {importlib.metadata.version('onnxruntime')}"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        file = str(folder / "model.onnx")
        self.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self.sizes = json.loads((folder / "onnx.json").read_text(encoding="utf-8"))

    def _load(self, folder: Path) -> Any:
        return torch.nn.Identity()  # the graph is all there is

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[Scores]:
        return [Scores.of(self._run(list(ids), None)[0]) for ids in sequences]

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """Token by token, through the cache."""
        made: list[int] = []
        logits, cache = self._run(list(ids), None)
        while len(made) < count:
            made.append(int(logits[-1].argmax()))
            if self.stops_at(made[-1]):
                break
            logits, cache = self._run([made[-1]], cache)
        return made

    def _run(self, ids: list[int], cache: list[Any] | None) -> tuple[torch.Tensor, list[Any]]:
        import numpy as np

        shape = (1, self.sizes["kv_heads"], 0, self.sizes["head_dim"])
        past = cache if cache is not None else [np.zeros(shape, np.float32)] * (2 * self.sizes["layers"])
        mask = np.ones((1, past[0].shape[2] + len(ids)), np.int64)
        names = [one.name for one in self.session.get_inputs()]
        given = {"input_ids": np.array([ids], np.int64), "attention_mask": mask}
        given |= dict(zip([name for name in names if name.startswith("past")], past, strict=True))
        logits, *present = self.session.run(None, {name: given[name] for name in names})
        return torch.from_numpy(logits)[0], present
