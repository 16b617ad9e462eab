"""What is proposed where the settings leave it open: tokens a step, epochs, learning rate, and what is held out.

Pure functions of the data's size, the method and the model; the machine has no say, so that the same run has the same
steps on every one of them. A setting that is given always wins. docs/benchmarks.md holds what these rules propose
against a sweep on real data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.objectives import objective_of

MIN_STEPS = 100
"""Optimizer steps below which a model has learned little of what its data could teach."""
STEPS = 300
"""Steps that a batch is made small enough for; a larger set then gets larger batches, not more steps."""
BATCH_TOKENS = (512, 65536)
"""Fewest and most tokens a step that are proposed: fewer are noise, and more teach no more."""
UNKNOWN_BATCH = 16384
"""Tokens a step where nothing is known of the data."""
MAX_EPOCHS = 10.0
"""Passes beyond which a set is learned by heart: a tiny one has fewer than `MIN_STEPS` steps instead. One pass is
proposed wherever it makes enough steps: 886 instructions seen three times were learned by heart, and more than all that
one pass had gained was lost again (docs/lab.md)."""
RATES = {"full": 2e-5, "lora": 2e-4, "qlora": 2e-4, "peft": 2e-4, "relora": 2e-4, "loqt": 2e-4}
"""Usual peak learning rates of AdamW for a model `WIDTH` wide."""
PEFT_RATES = {
    **dict.fromkeys(("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"), 1e-2),
    **dict.fromkeys(("IA3", "VERA", "PVERA", "VBLORA", "FOURIERFT", "WAVEFT", "RANDLORA", "ROAD", "C3A"), 2e-3),
    **dict.fromkeys(("LN_TUNING", "TRAINABLE_TOKENS", "ADALORA", "BEFT", "TINYLORA", "UNILORA"), 1e-3),
}
"""Of methods of peft that train few parameters, or start from none, and need a higher one."""
WIDTH, WIDTH_POWER, MOST_WIDER = 4096, 0.75, 5.0
"""A narrower model wants a higher rate: by the ratio of the widths to this power, and at most so many times."""
OF_ADAMW = {"lion": 0.2, "galore": 4.0}
"""Rates by AdamW's: each step of Lion is as large as AdamW's largest, and GaLore takes a quarter of each."""
HELD_OUT_FROM = 100
"""Records below which a data set is too small to hold any out."""
HELD_OUT_SHARE, HELD_OUT_MOST = 0.05, 200
"""What is held out by itself: this share of the records, and no more than so many."""
EVALUATED_SHARE = 0.1
"""Of the time of training, what evaluation may take where `eval_every` is left out."""
EVALUATED_TOKENS = 0.1
"""Of the tokens that are trained on, at most so many are evaluated at a time: a token takes half the time or less when
nothing is learned from it, so the first evaluation and the last take `EVALUATED_SHARE` together."""
SAMPLED_TOKENS = 0.04
"""The same for a sample of held-out data that are more than that: it leaves time for evaluations within the run."""
EVALUATED_LEAST = 16
"""Examples that are evaluated however short a run is: fewer say nothing."""
FILL = 0.95
"""Of packed sequences, roughly."""
ALIGNED = 64
"""Packed sequences are a multiple of so many tokens long."""

Decide = Callable[[str, object, str], None]
"""Writes down a decision: topic, choice, reason."""


@dataclass(frozen=True)
class DataSize:
    """How much there is to learn from in one pass over the training data, as their weights count it."""

    examples: float
    tokens: float
    longest: int | None
    """Tokens of the longest example after cutting; None where nobody knows."""
    is_exact: bool = False
    """Counted after tokenization, not guessed from files."""
    shared: float = 0.0
    """Tokens besides: those of prompts that the second answer of a pair shares with the first."""

    @property
    def words(self) -> str:
        about = "" if self.is_exact else "about "
        return f"{about}{self.examples:,.0f} examples with {about}{self.tokens:,.0f} tokens"


@dataclass(frozen=True)
class Amount:
    """How the data becomes steps."""

    sequence_length: int
    """Of a packed sequence."""
    sequences: int
    """In a step."""
    epochs: float
    learning_rate: float
    steps: int | None
    """In all, roughly; None where the data's size is not known."""


def propose(run: Run, width: int, limit: int, size: DataSize | None, decide: Decide) -> Amount:
    """What the settings leave open, for a model `width` wide and sequences of at most `limit` tokens."""
    epochs = run.epochs if run.epochs is not None else 1.0
    if objective_of(run).has_rollouts:
        return _of_rollouts(run, width, limit, size, epochs, decide)
    length, sequences = _batch(run, limit, size, epochs, decide)
    batch = length * sequences
    if run.epochs is None and run.steps is None:
        epochs = _enough(size, batch, epochs)
        decide("epochs", f"{epochs:g}", _why_epochs(size, epochs))
    steps = run.steps or _steps(size, batch, epochs)
    if steps is not None and run.steps is None:
        decide("steps", f"about {steps:,}", few_steps(steps) or f"at least {MIN_STEPS}, below which little is learned")
    return Amount(length, sequences, epochs, _rate(run, width, batch, decide), steps)


def _of_rollouts(run: Run, width: int, limit: int, size: DataSize | None, epochs: float, decide: Decide) -> Amount:
    """What is proposed where a step is a number of prompts, and its tokens are the model's own: with answers as long as
    they may be."""
    rollout = run.rollout
    longest = min(limit, rollout.max_answer_tokens + (size.longest if size and size.longest else limit))
    count = rollout.prompts * rollout.answers
    length = min(limit, -(-count * longest // ALIGNED) * ALIGNED)
    mean = size.tokens / max(1.0, size.examples) if size else longest
    sequences = math.ceil(count * min(longest, rollout.max_answer_tokens + mean) / length)
    if run.batch_tokens not in (None, length * sequences):
        raise UserError(
            f"batch_tokens is not for objective: {run.objective}, whose steps are rollout.prompts times "
            "rollout.answers; leave it out."
        )
    answers = f"{rollout.prompts} prompts x {rollout.answers} answers"
    decide("batch", f"{answers} a step", f"about {sequences:,} packed sequences of {length:,} tokens")
    steps = run.steps
    if size is not None and run.epochs is None and steps is None:
        epochs = min(MAX_EPOCHS, max(epochs, math.ceil(MIN_STEPS * rollout.prompts / max(1.0, size.examples))))
        decide("epochs", f"{epochs:g}", f"{size.examples:,.0f} prompts: so that there are {MIN_STEPS} steps at least")
    if size is not None and steps is None:
        steps = max(1, math.ceil(size.examples * epochs / rollout.prompts))
        decide("steps", f"about {steps:,}", "each begins with the model's own answers")
    return Amount(length, sequences, epochs, _rate(run, width, length * sequences, decide), steps)


def few_steps(steps: int) -> str | None:
    """What so few steps mean, and what to do; None where there are enough."""
    if steps >= MIN_STEPS:
        return None
    return (
        f"fewer than {MIN_STEPS}: each step moves the weights a little, so the model learns little of the data; a "
        "smaller batch_tokens makes more steps of it, and so do more epochs"
    )


def held_out_records(run: Run, records: Sequence[int]) -> int:
    """How many of the training records are held out, given those of each data set: as asked for, or by themselves
    where there is no `eval`."""
    if run.held_out is not None:
        count = round(run.held_out * (sum(records) if run.held_out < 1 else 1))
        if count >= sum(records):
            raise UserError(
                f"held_out asks for {count:,} records, and the training data have {sum(records):,}; lower it."
            )
        return count
    if run.eval_texts:
        return 0
    return min(HELD_OUT_MOST, math.ceil(HELD_OUT_SHARE * sum(count for count in records if count >= HELD_OUT_FROM)))


def _enough(size: DataSize | None, batch: int, epochs: float) -> float:
    """More epochs, where the batch cannot be made small enough for the steps to suffice."""
    if size is None:
        return epochs
    each = max(1.0, size.tokens / (FILL * batch))
    return min(MAX_EPOCHS, max(epochs, math.ceil(MIN_STEPS / each)))


def _why_epochs(size: DataSize | None, epochs: float) -> str:
    if size is None:
        return "the data's size is not known yet; `train` decides when it has counted the tokens"
    if epochs >= MAX_EPOCHS:
        return f"{size.words} are so few that more would be learning them by heart"
    if epochs > 1:
        return f"{size.words}: so that there are {MIN_STEPS} steps at least"
    return f"{size.words}: enough to be seen once"


def _batch(run: Run, limit: int, size: DataSize | None, epochs: float, decide: Decide) -> tuple[int, int]:
    """Length of the packed sequences, and how many of them make a step."""
    wanted = run.batch_tokens
    if wanted is None:
        wanted = _wanted_batch(size, epochs) if size else max(UNKNOWN_BATCH, limit)
    length = limit
    if wanted < limit:
        longest = size.longest if size and size.longest else limit
        longest += run.rollout.max_answer_tokens if objective_of(run).is_on_policy else 0  # in the place of its answer
        length = min(limit, max(wanted, -(-longest // ALIGNED) * ALIGNED))
        if run.batch_tokens is not None and length > wanted and (size is None or size.is_exact):
            raise UserError(
                f"batch_tokens is {wanted}, less than the {length} of "
                + ("sequence_length" if length == limit else "the longest example")
                + ": a step holds at least one sequence; raise batch_tokens or lower sequence_length."
            )
    sequences = max(1, round(wanted / length))
    counted = f"{sequences} sequence{'s'[: sequences > 1]}"
    if run.batch_tokens is not None:
        why = f"batch_tokens {wanted:,} is {counted} of {length:,} tokens"
    elif size is None:
        why = "the data's size is not known yet; `train` decides when it has counted the tokens"
    else:
        why = f"{size.words}: {length * sequences:,} tokens a step"
        why += " is as small as the longest example lets it be" if length > wanted else ""
    decide("batch", f"{counted} a step", why)
    if length < limit:
        why = "no example is longer, so nothing is cut" if size and size.is_exact else "examples seem to be no longer"
        decide("sequence length", f"{length:,}", f"small steps: {why}")
    return length, sequences


def _wanted_batch(size: DataSize, epochs: float) -> int:
    """The power of two that makes `STEPS` steps at least, within what is sensible."""
    tokens = size.tokens * epochs / STEPS
    smallest, largest = BATCH_TOKENS
    return min(largest, max(smallest, 2 ** math.floor(math.log2(max(1.0, tokens)))))


def _steps(size: DataSize | None, batch: int, epochs: float) -> int | None:
    return None if size is None else max(1, math.ceil(size.tokens * epochs / (FILL * batch)))


def _rate(run: Run, width: int, batch: int, decide: Decide) -> float:
    wider = min(MOST_WIDER, (WIDTH / width) ** WIDTH_POWER)
    objective = objective_of(run)
    factor = wider * objective.rate * OF_ADAMW.get(run.algorithm, 1.0)
    common = PEFT_RATES.get(str(run.peft.get("peft_type", "")).upper(), RATES[run.method])
    usual = float(f"{common * factor:.0e}")
    rate = usual if run.learning_rate is None else run.learning_rate
    if run.learning_rate is None:
        optimizer = "" if run.algorithm == "adamw" else f" with {run.algorithm}"
        optimizer += "" if objective.rate == 1 else f" and objective: {objective.name}"
        decide("learning rate", f"{rate:g}", f"usual for method: {run.method}{optimizer} in a model {width:,} wide")
    elif not usual / 20 <= rate <= usual * 20:
        decide("learning rate", f"{rate:g}", f"unusual: {usual:g} is common for method: {run.method}")
    if batch > 2**20:
        why = f"{batch:,} tokens a step is an unusually large batch, for which a higher rate may suit"
        decide("learning rate", f"{rate:g}", why)
    return rate
