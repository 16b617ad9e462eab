"""What comes of a run: its adapter or its model, written by all ranks into one folder, with what lies beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from tunesmith.checkpoint.codec import ShardSlice
from tunesmith.checkpoint.result import Shapes, stored_parts, stored_shapes, write_on_all_ranks
from tunesmith.config.schema import Run
from tunesmith.data.prepare import Prepared, answers_reason
from tunesmith.infer.described import facts_of
from tunesmith.model import adapters, load, lora, side_files
from tunesmith.model.card import card
from tunesmith.model.files import Held
from tunesmith.model.lora import peft_name
from tunesmith.model.merges import merged_weights
from tunesmith.model.save import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    MODEL_FILES,
    adapter_config_text,
    remove_leftovers,
    saved_buffers,
    whole_folder,
    write_adapter,
    write_model,
)
from tunesmith.model.source import files_of
from tunesmith.optim.build import Optimizer
from tunesmith.parallel.pipeline import Pipelined
from tunesmith.parallel.shard import Sharded, gathered
from tunesmith.plan.plan import Plan
from tunesmith.run.state import Share


@dataclass(frozen=True)
class ResultWriter:
    """Writes the result of a run. What the end needs of the base and of the model's names is looked up when this is
    made: by the end the base may be gone."""

    run: Run
    model: nn.Module
    optimizer: Optimizer
    share: Share
    data: Prepared
    steps: int
    losses: dict[int, float]
    """Held-out losses by step, for the model card."""
    dtype: torch.dtype
    adapter_config: str
    """Empty where all weights are trained."""
    empty: nn.Module | None
    """The model without weights, where its weights lie over ranks and are all trained, or are merged with adapters."""
    files: dict[str, Held] | None
    """How its files held it, if as the model has it."""
    tuned: adapters.Tuned | None = None
    """With `method: peft`: the model and peft's own view of it."""

    @classmethod
    def of(
        cls,
        run: Run,
        plan: Plan,
        model: nn.Module,
        optimizer: Optimizer,
        share: Share,
        data: Prepared,
        *,
        steps: int,
        losses: dict[int, float],
        tuned: adapters.Tuned | None = None,
    ) -> ResultWriter:
        empty, files = None, None
        if run.is_merged or (isinstance(share.called, Sharded | Pipelined) and not run.has_adapters):
            empty, folder = load.load_empty(run, dtype=plan.precision)
            files = files_of(empty, folder)
        config = _adapter_config(model, run, share) if run.has_lora and run.gives_adapter else ""
        dtype = getattr(torch, load.DTYPES[plan.precision])
        return cls(run, model, optimizer, share, data, steps, losses, dtype, config, empty, files, tuned)

    def write(self, name: str | None = None) -> Path:
        """Write the result into a folder of this name, the usual one when left out, and say which it is. All ranks must
        take part."""
        target = Path(self.run.output) / (name or ("adapter" if self.run.gives_adapter else "model"))
        if self.share.ranks.is_first:
            remove_leftovers(target)
        self.optimizer.finish_update()
        describe = partial(self._describe, self._done if name is None else None)
        if self.tuned is not None:
            return self._write_with_peft(self.tuned, target, describe)
        if self.run.is_merged:
            assert self.empty is not None
            return write_model(self.empty, target, describe, merged_weights(self.model, self.dtype))
        if not isinstance(self.share.called, Sharded | Pipelined):
            if self.run.has_adapters:
                return write_adapter(self.model, self.run, target, describe)
            return write_model(self.model, target, describe)
        if self.run.has_adapters:
            self._write_adapter_together(target, describe)
        elif self.files is None:
            self._write_translated(target, describe)
        else:
            self._write_model_together(target, describe)
        return target

    def write_current(self, target: Path) -> Path:
        """Write the adapter as it is now, and no more than its config beside it, for another engine that answers with
        it. All ranks must take part."""
        self.optimizer.finish_update()
        if not isinstance(self.share.called, Sharded):
            return write_adapter(self.model, self.run, target)
        self._write_adapter_together(target, lambda partial: self._write_config(partial))
        return target

    def _write_config(self, target: Path) -> None:
        (target / ADAPTER_CONFIG).write_text(self.adapter_config)

    def _write_adapter_together(self, target: Path, describe: Callable[[Path], None]) -> None:
        tensors = self.share.own(self.optimizer.weights)
        parts, shapes = self._adapter_parts(tensors)
        write_on_all_ranks(target, shapes, parts, self.share.ranks, pattern=ADAPTER_FILE, describe=describe)

    def _write_with_peft(self, tuned: adapters.Tuned, target: Path, describe: Callable[[Path], None]) -> Path:
        """Write the adapter by the names of the peft library. It is small, so the first rank writes it all."""
        ranks, called = self.share.ranks, self.share.called
        is_whole = tuned.is_prompt and isinstance(called, Sharded)  # what is saved of a prompt is computed
        if is_whole:
            called.unshard()
        tensors = gathered(adapters.state(tuned), ranks)
        if is_whole:
            called.reshard()
        if ranks.is_first:
            with whole_folder(target) as partial:
                values = {name: value.clone() for name, value in tensors.items()}
                save_file(values, partial / ADAPTER_FILE.format(suffix=""), metadata={"format": "pt"})
                (partial / ADAPTER_CONFIG).write_text(adapters.config_text(tuned, self.run))
                describe(partial)
        ranks.wait()
        return target

    def _adapter_parts(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Iterator[tuple[str, ShardSlice]], Shapes]:
        """What this rank writes, by PEFT's names and as factors over the unchanged base; and what all are like."""
        start = lora.Start.of(self.run)
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        if start is not None and start.takes_out:
            sides = {"lora_a": (2, 1), "lora_b": (1, 2)}
            for name, (shape, dtype) in shapes.items():
                factors = sides.get(name.rpartition(".")[2], (1,) * len(shape))
                shapes[name] = (tuple(size * factor for size, factor in zip(shape, factors, strict=True)), dtype)

        def parts() -> Iterator[tuple[str, ShardSlice]]:
            for name, rows in self.share.parts(tensors):
                if start is None or not start.takes_out or name.endswith(".lora_m"):
                    yield peft_name(name), rows
                    continue
                value, stop = rows.tensor.cpu(), rows.start + rows.tensor.shape[0]
                if name.endswith(".lora_b"):
                    value = start.joined(name, value, slice(rows.start, stop))
                elif rows.start == 0:  # whoever has the first rows writes the second half, too
                    ranks = tensors[name].shape[0]
                    yield peft_name(name), ShardSlice(start.factor(name).to(value), ranks, 2 * ranks)
                yield peft_name(name), ShardSlice(value, rows.start, shapes[name][0][0])

        return parts(), {peft_name(name): shape for name, shape in shapes.items()}

    def _write_translated(self, target: Path, describe: Callable[[Path], None]) -> None:
        """Write the model by transformers, where that alone knows the layout of its files: it wants all weights."""
        ranks, is_cut = self.share.ranks, isinstance(self.share.called, Pipelined)
        tensors = self._all_tensors()
        weights = gathered(tensors, ranks, self.dtype, keeps=self.share.is_first_of_stage if is_cut else None)
        if ranks.is_first:
            write_model(self.empty, target, describe, weights)
        ranks.wait()

    def _write_model_together(self, target: Path, describe: Callable[[Path], None]) -> None:
        tensors = self.share.own(self._all_tensors())
        buffers = saved_buffers(self.model)
        parts = (part for name, rows in self.share.parts(tensors) for part in stored_parts(name, rows, self.files))
        as_they_are = {name for name, tensor in tensors.items() if name in buffers or not tensor.is_floating_point()}
        kinds = {
            name: (tensor.shape, tensor.dtype if name in as_they_are else self.dtype)
            for name, tensor in tensors.items()
        }
        shapes = stored_shapes(kinds, self.files)
        write_on_all_ranks(target, shapes, parts, self.share.ranks, pattern=MODEL_FILES, describe=describe)

    def _all_tensors(self) -> dict[str, torch.Tensor]:
        """Trained weights, those of integers, which are not, and buffers."""
        frozen = {name: weight for name, weight in self.model.named_parameters() if not weight.requires_grad}
        return {**frozen, **self.optimizer.weights, **saved_buffers(self.model)}

    @property
    def _done(self) -> int:
        """Steps of the finished run; where `stop_when` has ended it, those of its last evaluation."""
        return max(self.losses, default=self.steps) if self.run.stop_when is not None else self.steps

    def _describe(self, steps: int | None, target: Path) -> None:
        side, encoder = Path(self.run.output) / side_files.FOLDER, self.data.encoder
        loaded_by = side_files.read_asked(side).get("loaded_by")
        reasons = answers_reason(encoder, self.data.train)
        facts = facts_of(self.run, encoder, reasons=reasons, loaded_by=loaded_by)
        text = card(self.run, replace(facts, steps=steps, before=self.losses.get(0), after=self.losses.get(self._done)))
        dtype = None if self.run.gives_adapter else self.dtype
        side_files.put_beside(side, target, dtype=dtype, card=text)
        if self.adapter_config:
            self._write_config(target)


def _adapter_config(model: nn.Module, run: Run, share: Share) -> str:
    if isinstance(share.called, Pipelined):  # a stage does not have all names
        model = load.load_skeleton(run)
        lora.attach(model, run.lora, seed=run.seed)
    return adapter_config_text(model, run)
