"""vLLM as what answers in a run (`rollout.engine: vllm`): where it cannot, how it is started, and which adapter it has.

The first rank starts it before the weights are loaded, while the memory it takes is still free, and all ranks ask it.
The adapter is written into the run's folder before the answers of a step, loaded under a name of that step, and removed
once the next one is there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.infer.rollout import Sampled, Wanted
from tunesmith.infer.vllm import Address, Client
from tunesmith.infer.vllm_server import VARIABLE, Server, find_command, refusals
from tunesmith.launch.rank_environment import read_rank_environment
from tunesmith.model import side_files, vllm
from tunesmith.model.load import DTYPES, locate
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.memory import ROLLOUT_ROWS
from tunesmith.plan.plan import Plan

BASE = "base"
"""The name of the model without an adapter."""
LOG, FOLDER = "vllm.log", "rollout_adapter"
"""In the run's folder: what vLLM says, and the adapter it has now, which is gone when the run ends."""
GIB = 2**30
Progress = Callable[[str, int, int | None], None]


def check_engine(run: Run) -> None:
    """UserError where vLLM is wanted and cannot be had here: before anything is loaded."""
    if run.rollout.engine != "vllm":
        return
    if read_rank_environment().nodes > 1:
        raise UserError(
            "rollout.engine: vllm is for ranks of one host, which share the process that answers; on several hosts "
            "leave it at own."
        )
    if find_command() is None:
        raise UserError(
            "rollout.engine: vllm needs vLLM, which is not installed here (no command `vllm`); install it in an "
            f"environment of its own and set {VARIABLE} to the command in there, or leave rollout.engine at own."
        )


def engine_options(run: Run, plan: Plan) -> list[str]:
    """The command line with which vLLM serves the run's base, ready for its adapters."""
    words = ["--served-model-name", BASE]
    side = Path(run.output) / side_files.FOLDER
    words += ["--tokenizer", str(side.resolve())] if side.exists() else []
    words += ["--trust-remote-code"] if run.trust_remote_code else []
    words += ["--dtype", DTYPES[plan.precision], "--max-model-len", str(plan.sequence_length)]
    words += ["--max-num-seqs", str(min(ROLLOUT_ROWS, run.rollout.prompts * run.rollout.answers))]
    factors = run.lora.rank * (2 if run.lora.takes_out else 1)
    words += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(vllm.largest_rank({"r": factors}))]
    # Draws are from the model's own distribution at the run's temperature, whatever its files say of sampling.
    words += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    words += ["--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
    if plan.device == "cpu":
        return [*words, "--enforce-eager"]
    share = plan.engine_memory / torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if share <= 0:
        raise UserError(
            "The plan leaves vLLM no memory of the GPU (engine_memory is 0), so rollout.engine: vllm cannot start; "
            "plan anew."
        )
    return [*words, "--gpu-memory-utilization", f"{min(share, 0.95):.4f}"]


def engine_environment(plan: Plan) -> dict[str, str]:
    """The environment of vLLM, for what is no option of it: that adapters may come and go, and the device."""
    loads = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    if plan.device == "cpu":
        return loads | {"VLLM_CPU_KVCACHE_SPACE": str(max(1, plan.engine_memory // GIB))}
    visible, here = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.current_device()
    return loads | {"CUDA_VISIBLE_DEVICES": visible.split(",")[here] if visible else str(here)}


@dataclass(frozen=True)
class RunningEngine:
    """The server as a rank knows it."""

    client: Client
    folder: Path
    """Where adapters are written for it."""


@contextmanager
def started_engine(
    run: Run, plan: Plan, ranks: Ranks, progress: Progress | None = None
) -> Iterator[RunningEngine | None]:
    """vLLM as a server for this run, which ends with the context; None where the trainer itself answers."""
    if run.rollout.engine != "vllm":
        yield None
        return
    folder, server = Path(run.output) / FOLDER, None
    try:
        if ranks.is_first:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
            folder.mkdir(parents=True)
            server = Server(
                locate(run.model).location,
                engine_options(run, plan),
                engine_environment(plan),
                log=Path(run.output) / LOG,
                tell=lambda _: progress("Starting vLLM", 0, None) if progress else None,
            )
        said = json.loads(ranks.tell(json.dumps([server.port, server.key] if server else [])))
        yield RunningEngine(Client(Address(*said), lambda: _why_ended(server)), folder)
    finally:
        if server is not None:
            server.close()
        if ranks.is_first:
            shutil.rmtree(folder, ignore_errors=True)


def _why_ended(server: Server | None) -> str | None:
    if server is None or server.is_alive:
        return None
    return f"vLLM ended while it was to answer: {server.last_words()}."


class Engine:
    """What answers in the place of the trainer's own model."""

    def __init__(self, started: RunningEngine, write: Callable[[Path], Any], ranks: Ranks):
        """`write`: the adapter as it is now, into a folder; a matter of all ranks."""
        self.client, self.folder, self.write, self.ranks = started.client, started.folder, write, ranks
        self._name = ""
        self.refresh("start")  # what vLLM rejects is known before the first step

    def refresh(self, name: str) -> None:
        """Have answers from here on be those of the adapter as it is now, known by this name. All ranks take part;
        nothing is done where it is the one that vLLM has."""
        if name == self._name:
            return
        where = self.folder / name
        self.write(where)
        if self.ranks.is_first:
            if not self._name:
                check_adapter(where)
            self.client.load_adapter(name, where)
            if self._name:
                self.client.unload_adapter(self._name)
                shutil.rmtree(self.folder / self._name, ignore_errors=True)
        self.ranks.wait()
        self._name = name

    def sampled(
        self,
        prompts: Sequence[list[int]],
        wanted: Sequence[Wanted],
        *,
        max_tokens: int,
        temperature: float,
        stop_ids: frozenset[int],
        rows: int,
        should_stop: Callable[[int], None],
    ) -> list[Sampled]:
        """The answers that are wanted, by the adapter as it was at the last `refresh`, `rows` at a time."""
        return self.client.answers(
            self._name,
            prompts,
            wanted,
            max_tokens=max_tokens,
            temperature=temperature,
            stop_ids=stop_ids,
            rows=rows,
            should_stop=should_stop,
        )


def check_adapter(folder: Path) -> None:
    """UserError where vLLM would leave some of the adapter out, or reject it."""
    if notes := refusals(folder):
        raise UserError(f"rollout.engine: vllm cannot answer with this run's adapter; use own. {' '.join(notes)}")
