"""Steps of a run whose model learns from its own answers: prompts -> answers -> rewards -> advantages -> micro-batches.

The answers are given by the weights and modules that are being trained, adapters on, from a key-value cache, or by vLLM
with the same adapter (`run.engine`), whose log-probabilities then stand beside the tokens. Ranks
share the prompts of a step; then each knows all answers, and packs them as one rank alone would. What tokens were given
when they were sampled is taken from the step's own forward pass, so that ratios begin at exactly 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tunesmith.config.schema import Rollout
from tunesmith.data.chat import Encoder
from tunesmith.data.loader import PackedDocument, deal
from tunesmith.data.prompts import Prompt, PromptBatch, prompt_of
from tunesmith.data.store import TokenStore
from tunesmith.data.types import MicroBatch, StepBatch
from tunesmith.errors import UserError
from tunesmith.evaluate.loss import HeldOut
from tunesmith.infer.call import try_out
from tunesmith.infer.decoding import PLAIN, Decoding
from tunesmith.infer.generate import stop_tokens
from tunesmith.infer.rollout import Sampled, Wanted, own_attention, sample
from tunesmith.model import lora
from tunesmith.model.forward import Entrance, to_device, token_losses
from tunesmith.model.scoring import document_logps
from tunesmith.objectives.grpo import Grpo, Rloo
from tunesmith.parallel.ranks import Ranks
from tunesmith.parallel.shard import Sharded
from tunesmith.plan.memory import ROLLOUT_ROWS as ROWS
from tunesmith.plan.plan import ForwardSpec, Plan
from tunesmith.rewards import Rewards
from tunesmith.run.engine import Engine
from tunesmith.run.shape import micro_batch_shape

SAMPLES = "rollouts.jsonl"
SHOWN_PROMPTS, SHOWN_ANSWERS, SHOWN_CHARACTERS, LARGEST_FILE = 2, 2, 2000, 8 << 20
"""Of a step, what is kept to be looked at; and how long the file may grow before every other step is left out."""
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Answer:
    """One of the model's own answers, checked."""

    ids: list[int]
    is_ended: bool
    text: str
    found: list[float]
    """What each reward gives it."""
    reward: float
    logps: list[float] | None = None
    """Log-probabilities with which its tokens were drawn, where another engine has drawn them."""


class Sampler:
    """The model as it answers."""

    def __init__(self, called: nn.Module, encoder: Encoder, settings: Rollout, seed: int, engine: Engine | None = None):
        """`engine`: what answers in the model's place, with the same weights."""
        self.called, self.encoder, self.settings, self.seed, self.engine = called, encoder, settings, seed, engine
        self.model: nn.Module = called.model if isinstance(called, Entrance) else called
        self.stop_ids = frozenset(stop_tokens(self.model, encoder))
        self._is_shared: bool | None = None

    def refresh(self, step: int) -> None:
        """Have answers from here on be given by the weights as they are after so many steps. All ranks take part."""
        if self.engine is not None:
            self.engine.refresh(f"step-{step}")

    def sampled(
        self,
        prompts: Sequence[list[int]],
        wanted: Sequence[Wanted],
        *,
        temperature: float,
        max_tokens: int | None = None,
        rows: int = ROWS,
        should_stop: Callable[[int], None] = lambda _: None,
        decoding: Decoding = PLAIN,
    ) -> list[Sampled]:
        """`max_tokens`: of an answer, where that is less than the settings say. `rows`: answers at a time. `decoding`:
        of the likeliest tokens; what is trained on is drawn from the model's own distribution."""
        most = max_tokens or self.settings.max_answer_tokens
        if self.engine is not None:
            assert decoding.is_plain
            return self.engine.sampled(
                prompts,
                wanted,
                max_tokens=most,
                temperature=temperature,
                stop_ids=self.stop_ids,
                rows=rows,
                should_stop=should_stop,
            )

        def work(model: nn.Module) -> list[Sampled]:
            return sample(
                model,
                prompts,
                wanted,
                max_tokens=most,
                temperature=temperature,
                stop_ids=self.stop_ids,
                rows=rows,
                is_shared=self._decodes_together(model),
                should_stop=should_stop,
                decoding=decoding,
            )

        was_training = self.called.training
        self.called.eval()
        try:
            return self.called(work) if isinstance(self.called, Entrance) else work(self.called)
        finally:
            if isinstance(self.called, Sharded):
                self.called.free_full_weights()
            self.called.train(was_training)

    def _decodes_together(self, model: nn.Module) -> bool:
        """Whether answers may be decoded together. UserError where the model cannot be decoded from a cache at all."""
        if self._is_shared is None:
            with own_attention(model):
                self._is_shared = try_out(model).is_shared
        return self._is_shared


class Generator(Sampler):
    """The model as it answers, with the rewards that its answers are checked by."""

    def __init__(
        self,
        called: nn.Module,
        encoder: Encoder,
        settings: Rollout,
        rewards: Rewards,
        seed: int,
        engine: Engine | None = None,
    ):
        super().__init__(called, encoder, settings, seed, engine)
        self.rewards = rewards

    def answers(
        self,
        prompts: Sequence[Prompt],
        wanted: Sequence[Wanted],
        *,
        temperature: float,
        should_stop: Callable[[int], None] = lambda _: None,
    ) -> list[Answer]:
        ids = [prompt.ids.tolist() for prompt in prompts]
        answers = self.sampled(ids, wanted, temperature=temperature, should_stop=should_stop)
        texts = [self.text_of(answer) for answer in answers]
        asked = [prompts[answer.prompt] for answer in wanted]
        checked = [(text, prompt.facts, prompt.origin) for text, prompt in zip(texts, asked, strict=True)]
        return [
            Answer(answer.ids, answer.is_ended, text, rewards, self.rewards.total(rewards), answer.logps)
            for answer, text, rewards in zip(answers, texts, self.rewards(checked), strict=True)
        ]

    def text_of(self, answer: Sampled) -> str:
        """The answer's words, without the token that ends it."""
        ids = answer.ids[:-1] if answer.is_ended else answer.ids
        return self.encoder.tokenizer.decode(ids, skip_special_tokens=True).strip()


class Rollouts:
    """Prompts of a step -> its micro-batches on this rank."""

    def __init__(
        self,
        generator: Generator,
        objective: Grpo,
        spec: ForwardSpec,
        plan: Plan,
        device: torch.device,
        ranks: Ranks,
        folder: Path,
        longest: int,
    ):
        """`longest`: tokens of the longest prompt."""
        self.generator, self.objective, self.spec, self.plan = generator, objective, spec, plan
        self.device, self.ranks, self.samples = device, ranks, Samples(folder / SAMPLES) if ranks.is_first else None
        settings = objective.rollout
        if longest + settings.max_answer_tokens > plan.sequence_length:
            raise UserError(
                f"The plan packs sequences of {plan.sequence_length:,} tokens, but the longest prompt and its answer "
                f"have {longest + settings.max_answer_tokens:,}; raise sequence_length in the plan, or lower "
                "rollout.max_answer_tokens."
            )

    def __call__(self, batch: PromptBatch, should_stop: Callable[[int, int], None]) -> StepBatch:
        self.generator.refresh(batch.step)
        groups = self._groups(batch, should_stop)
        self._save_samples(batch, groups)
        documents = [
            PackedDocument(
                np.concatenate([prompt.ids, np.array(answer.ids, dtype=np.int32)]),
                np.repeat(np.array([0, 1], dtype=np.float32), [len(prompt.ids), len(answer.ids)]),
                prompt.source,
                prompt.origin,
                number=number * len(group) + place,
            )
            for number, (prompt, group) in enumerate(zip(batch.prompts, groups, strict=True))
            for place, answer in enumerate(group)
        ]
        micro_batches = with_sampler(self._dealt(documents), [answer.logps for group in groups for answer in group])
        rewards = [[answer.reward for answer in group] for group in groups]
        figures: dict[str, float] = {}
        if self.objective.rollout.beta:
            micro_batches, compared = self._compared(micro_batches, len(documents))
            if isinstance(self.objective, Rloo):  # the divergence is part of the reward
                figures["kl"] = float(compared.mean())
                taken = self.objective.rollout.beta * compared.reshape(len(groups), -1)
                rewards = (np.array(rewards) - taken).tolist()
        of_groups = self.objective.advantages(rewards)
        advantages = torch.tensor([advantage for group in of_groups for advantage in group]).double()
        micro_batches = tuple(replace(batch, advantages=advantages[batch.numbers]) for batch in micro_batches)
        tokens = sum(len(document.ids) for document in documents)
        answered = float(sum(len(answer.ids) for group in groups for answer in group))
        return StepBatch(
            batch.step,
            batch.epoch,
            micro_batches,
            target_weight=answered,
            tokens=tokens,
            divisors={"examples": float(len(documents)), "tokens": answered},
            updates=self.objective.rollout.updates,
            figures=figures | self._figures(groups),
            figures_of=self._figures_of(batch.prompts, groups),
        )

    def _groups(self, batch: PromptBatch, should_stop: Callable[[int, int], None]) -> list[list[Answer]]:
        """The answers to each prompt of the step, on all ranks."""
        settings, generator = self.objective.rollout, self.generator
        rank, ranks = self.plan.mesh.data_rank(self.ranks.rank), self.plan.mesh.data_ranks
        mine = list(range(len(batch.prompts)))[rank::ranks]
        wanted = [
            Wanted(at, f"{generator.seed}:{batch.step}:{number}:{place}")
            for at, number in enumerate(mine)
            for place in range(settings.answers)
        ]
        prompts = [batch.prompts[number] for number in mine]
        stop = lambda done: should_stop(done, len(wanted))  # noqa: E731
        answers = generator.answers(prompts, wanted, temperature=settings.temperature, should_stop=stop) if mine else []
        here = [answers[at : at + settings.answers] for at in range(0, len(answers), settings.answers)]
        if self.ranks.count == 1:
            return here
        said = self.ranks.gather(json.dumps([[asdict(answer) for answer in group] for group in here]))
        every = {}
        for number, text in enumerate(said):
            groups = [[Answer(**fields) for fields in group] for group in json.loads(text)]
            places = range(len(batch.prompts))[self.plan.mesh.data_rank(number) :: ranks]
            every |= dict(zip(places, groups, strict=True))
        return [every[number] for number in range(len(batch.prompts))]

    def _dealt(self, documents: Sequence[PackedDocument]) -> tuple[MicroBatch, ...]:
        plan = self.plan
        return deal(
            documents,
            sequence_length=plan.sequence_length,
            micro_batch=plan.micro_batch,
            lengths=self.spec.lengths(plan.sequence_length),
            rank=plan.mesh.data_rank(self.ranks.rank),
            ranks=plan.mesh.data_ranks,
        )

    @torch.no_grad()
    def _compared(self, micro_batches: Sequence[MicroBatch], count: int) -> tuple[tuple[MicroBatch, ...], np.ndarray]:
        """The micro-batches with what the model without its adapter gives each token; and by how much the
        log-probability of each answer, of all ranks, is above that."""
        called, shape = self.generator.called, micro_batch_shape(self.plan)
        was_training = called.training
        called.eval()
        above = torch.zeros(count, dtype=torch.float64, device=self.device)
        compared = []
        for batch in micro_batches:
            inputs = to_device(batch, self.device, shape)
            with lora.without_adapters(self.generator.model):
                base_n = token_losses(called, inputs, self.spec)[1]
            if isinstance(self.objective, Rloo):
                own_n = token_losses(called, inputs, self.spec)[1]
                if (batch.parts >= 0).any():
                    at = batch.numbers[batch.parts >= 0].to(self.device)
                    above[at] = document_logps(batch, own_n) - document_logps(batch, base_n)
            compared.append(replace(batch, compared=-base_n.double().cpu()))
        if isinstance(called, Sharded):
            called.free_full_weights()
        called.train(was_training)
        copies = self.ranks.count // self.plan.mesh.data_ranks
        return tuple(compared), (self.ranks.sum(above) / copies).cpu().numpy()

    def _figures(self, groups: Sequence[Sequence[Answer]]) -> dict[str, float]:
        answers = [answer for group in groups for answer in group]
        rewards = np.array([answer.reward for answer in answers])
        spreads = [max(answer.reward for answer in group) - min(answer.reward for answer in group) for group in groups]
        figures = {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "no_spread": sum(spread == 0 for spread in spreads) / len(spreads),
            "answer_tokens": sum(len(answer.ids) for answer in answers) / len(answers),
            "truncated": sum(not answer.is_ended for answer in answers) / len(answers),
        }
        return figures | self._found(answers)

    def _found(self, answers: Sequence[Answer]) -> dict[str, float]:
        """The mean of each reward, where there are several."""
        names = self.generator.rewards.names
        if len(names) == 1:
            return {}
        return {
            f"reward/{name}": math.fsum(answer.found[at] for answer in answers) / len(answers)
            for at, name in enumerate(names)
        }

    def _figures_of(
        self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Answer]]
    ) -> dict[int, Mapping[str, float]]:
        sources = sorted({prompt.source for prompt in prompts})
        pairs = list(zip(prompts, groups, strict=True))
        return {
            source: self._figures([group for prompt, group in pairs if prompt.source == source]) for source in sources
        }

    def _save_samples(self, batch: PromptBatch, groups: Sequence[Sequence[Answer]]) -> None:
        if self.samples is None:
            return
        tokenizer = self.generator.encoder.tokenizer
        lines = [
            {
                "step": batch.step + 1,
                "origin": prompt.origin,
                "prompt": tokenizer.decode(prompt.ids.tolist())[-SHOWN_CHARACTERS:],
                "answer": answer.text[:SHOWN_CHARACTERS],
                "reward": answer.reward,
                "tokens": len(answer.ids),
                "ended": answer.is_ended,
            }
            for prompt, group in list(zip(batch.prompts, groups, strict=True))[:SHOWN_PROMPTS]
            for answer in sorted(group, key=lambda answer: -answer.reward)[:: max(1, len(group) - 1)][:SHOWN_ANSWERS]
        ]
        self.samples.add(batch.step + 1, lines)


class Samples:
    """A file with a few answers of each step, the best and the worst to a prompt, which never grows beyond a size."""

    def __init__(self, path: Path):
        self.path = path
        self._is_begun = False

    def add(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """A disk that refuses it costs these lines, and no run."""
        with suppress(OSError):
            if not self._is_begun:  # steps that are done again, and a line that was being written in a kill
                self._write([line for line in self._read() if line["step"] < step])
                self._is_begun = True
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            if self.path.stat().st_size > LARGEST_FILE:
                kept = self._read()
                steps = sorted({line["step"] for line in kept})[-1::-2]
                self._write([line for line in kept if line["step"] in steps])

    def _read(self) -> list[dict[str, Any]]:
        lines = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError, TypeError):
                    lines.append(json.loads(line))
        return [line for line in lines if isinstance(line, dict) and isinstance(line.get("step"), int)]

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def held_out_rewards(
    generator: Generator,
    stores: Sequence[TokenStore],
    *,
    ranks: Ranks | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[HeldOut]:
    """The mean reward of the likeliest answer to each prompt, by data set; the loss is what it lacks: minus that."""
    ranks, results = ranks or Ranks(), []
    done, total = 0, sum(len(store) for store in stores)
    names = generator.rewards.names
    for store in stores:
        sums = torch.zeros(4 + len(names), dtype=torch.float64)
        mine = range(len(store))[ranks.rank :: ranks.count]
        for start in range(0, len(mine), ROWS):
            prompts = [prompt_of(store, index) for index in mine[start : start + ROWS]]
            wanted = [Wanted(number, "") for number in range(len(prompts))]

            def tell(_: int, so_far: int = done + start * ranks.count) -> None:
                if progress:
                    progress(min(so_far, total), total)

            for answer in generator.answers(prompts, wanted, temperature=0.0, should_stop=tell):
                is_cut = not answer.is_ended
                sums += torch.tensor([answer.reward, len(answer.ids), is_cut, 1.0, *answer.found]).double()
        place = generator.model.get_input_embeddings().weight.device
        reward, tokens, truncated, count, *of_rewards = ranks.sum(sums.to(place)).tolist()
        figures = {"reward": reward / count, "answer_tokens": tokens / count, "truncated": truncated / count}
        if len(names) > 1:
            figures |= {f"reward/{name}": value / count for name, value in zip(names, of_rewards, strict=True)}
        results.append(HeldOut(store.title, -reward / count, tokens, len(store), figures))
        done += len(store)
    return results


def with_sampler(batches: tuple[MicroBatch, ...], logps: Sequence[list[float] | None]) -> tuple[MicroBatch, ...]:
    """Micro-batches of answers, with the log-probabilities their tokens were drawn with, where these are known."""
    if not all(logps):
        return batches

    def of(batch: MicroBatch) -> torch.Tensor:
        counted = batch.numbers[batch.parts >= 0].tolist()
        return torch.tensor([logp for number in counted for logp in logps[number] or ()], dtype=torch.float64)

    return tuple(replace(batch, sampler=of(batch)) for batch in batches)


def check_rewards(rewards: Rewards, stores: Sequence[TokenStore]) -> None:
    """UserError where prompts lack what their answers are to be checked by."""
    for store in stores if rewards.names else ():
        for index in range(len(store)):
            rewards.check_record(store.facts(index), store.origin(index))


def at_temperature(spec: ForwardSpec, temperature: float) -> ForwardSpec:
    """Logits divided by the temperature, soft caps included."""
    softcap = None if spec.softcap is None else spec.softcap / temperature
    return replace(spec, logit_scale=spec.logit_scale / temperature, softcap=softcap)
