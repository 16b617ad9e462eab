"""Proof of an export: its own engine, which has read the exported files, against base + adapter on held-out data.

What is compared: the log-probabilities of every token at every place, which token is likeliest, perplexity, a greedy
text, the tokens of texts and of the chat template, and where answers end. How far they may part is stated for each
precision; beyond it the export fails and says where. The reference is computed in fp32 from the base's files and the
adapter's, each by itself.

How much of the adapter is in the export is measured apart from rounding: what separates the export from the base is
projected onto what separates base + adapter from the base. 1 is all of it, 0 none, 0.5 an adapter at half its scale;
rounding to few bits, which goes any way, hardly moves it.

The share of equal tokens is a count over few places, and depends on the data: where two tokens are often about as
likely, a right export may be below the bound. For one that is, base + adapter are rounded alike and compared with
themselves: the export must do no worse than that, beyond chance.

Legend: T places, V vocabulary, K the tokens that an engine tells of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jinja2 import TemplateError

from tunesmith.data.store import TokenStore
from tunesmith.data.types import Message
from tunesmith.errors import UserError
from tunesmith.export.engines import Engine, Peft, Scores, Vllm
from tunesmith.export.source import Progress, Source
from tunesmith.model.side_files import SAMPLE
from tunesmith.run.streamed import StreamedModel

SEQUENCES, LONGEST = 8, 96
"""Held-out examples that are compared, and how much of each."""
GREEDY = 24
"""Tokens of the greedy text."""
LIKELY = 1e-3
"""Tokens less likely than this count in no largest difference: nobody sees them, and rounding moves them most."""
ADDED = 64
"""Added tokens that are looked for in texts: all of most tokenizers, and the first of those with hundreds."""
CHANCE, AS_FAR = 2.0, 2.0
"""How many more places than where base + adapter are rounded alike may have another token (in standard errors of the
difference of two counts), and how many times as far an export may diverge: in q8_0 SmolLM2 went 0.8 times as far, the
tests' Llama 1.0 times, and 9.5 times with a norm off by a tenth."""
NOTICED = 1e-3
"""An adapter that moves log-probabilities by less has no share that could be measured."""
CONVERSATIONS = (
    ({"role": "user", "content": "What is 12345 + 678? Answer in Ünïcödé, please."},),
    (
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi, what can I do for you?"},
        {"role": "user", "content": "Count:\n\n 1, 2, 3"},
    ),
)


@dataclass(frozen=True)
class Bound:
    """How far an export may part from base + adapter."""

    agreement: float
    """Least share of places with the same likeliest token; ties within `tie` count as the same."""
    tie: float
    """A difference of log-probabilities that rounding may turn round."""
    largest: float | None = None
    """Of the differences of log-probabilities of likely tokens."""
    divergence: float | None = None
    """Mean Kullback-Leibler divergence, in nats."""
    share: float = 0.1
    """How far the adapter's share may be from 1."""


BOUNDS = {
    "fp32": Bound(1.0, tie=5e-3, largest=1e-2, share=0.02),
    "fp16": Bound(1.0, tie=0.05, largest=0.1, share=0.05),
    "bf16": Bound(1.0, tie=0.3, largest=0.6, share=0.1),
    "8 bits": Bound(0.98, tie=0.1, divergence=0.02, share=0.1),
    "fp8": Bound(0.9, tie=0.1, divergence=0.1, share=0.1),
    "4 bits": Bound(0.6, tie=0.1, divergence=1.0, share=0.35),
    "2 bits": Bound(0.4, tie=0.1, divergence=2.0, share=0.6),
}
"""By precision. In fp8 engines round activations, too, to three bits of mantissa."""


@dataclass(frozen=True)
class Sample:
    ids: list[int]
    asked: int
    """Tokens before the first target: what the model is given."""


@dataclass
class Proof:
    engine: str
    precision: str
    reference: str = "base + adapter"
    """What it is compared with."""
    data: str = "held-out"
    """The kind of data that it is compared on."""
    places: int = 0
    agreement: float = 0.0
    """Share of places with the same likeliest token, no ties forgiven."""
    agreement_without_ties: float = 0.0
    """The same where a token that base + adapter find as likely, within the bound's `tie`, counts as the same."""
    rounded_agreement: float | None = None
    """The same of base + adapter rounded alike in place of the export, where that had to be asked."""
    largest: float = 0.0
    divergence: float = 0.0
    perplexity: float = 0.0
    reference_perplexity: float = 0.0
    adapter_share: float | None = None
    text: str = ""
    """That the engine made, greedily."""
    same_text: int = 0
    """Of its tokens, from the first on, that base + adapter would have made."""
    text_tokens: int = 0
    chat_template: str = "the same tokens"
    stops: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def samples_of(stores: Sequence[TokenStore], *, context: int) -> list[Sample]:
    """Some of each data set, the same ones each time."""
    found = []
    for number in range(SEQUENCES):
        for store in stores:
            if number < len(store) and len(found) < SEQUENCES:
                ids, weights, _ = store.example(number)
                asked = int((weights > 0).argmax()) or 1
                found.append(Sample(ids[: min(LONGEST, context)].tolist(), asked))
    return [sample for sample in found if len(sample.ids) > 1]


def prove(
    source: Source,
    engine: Engine,
    precision: str,
    samples: Sequence[Sample],
    progress: Progress,
    *,
    rounded_to: str | None = None,
    alike: str | Sequence[torch.Tensor] | None = None,
    data: str = "held-out",
) -> Proof:
    """UserError where the export parts from base + adapter, or from the model where there is no adapter, by more than
    `BOUNDS` allow. `rounded_to`: the type that the run was trained for, where it is this export's: then base + adapter
    are rounded as in training. `alike`: the type of this export, where its rounding can be computed here, or what was
    measured of the model rounded so: logits [T, V] of each sample. `data`: the kind of data that the samples are of."""
    if not samples:
        raise UserError("There is nothing to compare the export on; name some data with --data FILE.")
    own = "the run's model" if source.is_trained else "the full model"
    reference = "base + adapter" if source.weights.adapter else own
    bound, proof = BOUNDS[precision], Proof(engine.name, precision, reference, data)
    _compare_words(source, engine, proof)
    if not proof.failures:
        progress(f"Asking {engine.name.partition(' ')[0]}", 0, None)
        scores = engine.scores([sample.ids for sample in samples])
        asked = next((s for s in samples if 1 < s.asked < len(s.ids)), samples[0])
        prompt = asked.ids[: max(1, min(asked.asked, len(asked.ids) - 1))]
        made = engine.greedy(prompt, GREEDY)
        progress(f"Asking {reference}", 0, None)
        *expected, continued = _reference(source, [*(s.ids for s in samples), [*prompt, *made]], rounded_to)
        if any(rows.isnan().any() for rows in expected):
            raise UserError(
                f"The log-probabilities of {reference} are no numbers (nan): the weights of "
                f"{source.folder if source.is_trained else source.run.model} are damaged, or training diverged; export "
                "another run, or an earlier checkpoint by `tunesmith branch`. Nothing was written."
            )
        base = None
        if source.weights.adapter:
            base = _reference(source, [s.ids for s in samples], rounded_to, with_adapter=False)
        parted = _compare_scores(samples, scores, expected, base, bound, proof, source.tokenizer)
        _judge(proof, bound, parted)
        if not _agrees(proof, bound):
            unexplained = (
                _exceeds_rounding(source, samples, scores, expected, bound, proof, alike)
                if alike is not None and not proof.failures
                else ""
            )
            if unexplained is not None:
                proof.failures.insert(0, _disagreement(proof, bound, parted) + unexplained)
        _compare_text(made, continued[len(prompt) - 1 :], bound, proof, source.tokenizer)
        if isinstance(engine, Peft | Vllm) and engine.has_adapter:
            _check_influence(source, engine, samples, proof)
    if proof.failures:
        raise UserError(
            f"The export does not do what {reference} {'do' if source.weights.adapter else 'does'}, as {proof.engine} "
            f"runs it: {'; '.join(proof.failures)}. Nothing was written."
        )
    return proof


def _reference(
    source: Source,
    sequences: Sequence[Sequence[int]],
    rounded_to: str | None = None,
    *,
    with_adapter: bool = True,
    rounds_inputs: bool = False,
) -> list[torch.Tensor]:
    """Log-probabilities [T, V] of each sequence, in one pass over the model."""
    model = StreamedModel(source.weights, with_adapter=with_adapter, rounded_to=rounded_to, rounds_inputs=rounds_inputs)
    return [logits.log_softmax(-1) for logits in model.logits_of(sequences)]


def _compare_scores(
    samples: Sequence[Sample],
    scores: Sequence[Scores],
    expected: Sequence[torch.Tensor],
    base: Sequence[torch.Tensor] | None,
    bound: Bound,
    proof: Proof,
    tokenizer: Any,
) -> str:
    """Fills the figures of `proof` in; returns where the likeliest tokens part first."""
    sums = dict.fromkeys(("same", "forgiven", "divergence", "own", "reference", "targets", "along", "squares"), 0.0)
    weights, parted = 0.0, ""
    for number, (sample, found, rows_tv) in enumerate(zip(samples, scores, expected, strict=True)):
        near_tk = found.same_of(rows_tv)
        likely_tk = near_tk.exp()
        difference_tk = near_tk - found.logprobs_tk
        seen = likely_tk >= LIKELY
        proof.largest = max(proof.largest, difference_tk[seen].abs().max().item() if seen.any() else 0.0)
        sums["divergence"] += (likely_tk * difference_tk).sum().item() + _divergence_of_rest(near_tk, found)
        best_t, chosen_t = rows_tv.argmax(1), found.best_t
        gap_t = rows_tv.amax(1) - rows_tv.gather(1, chosen_t[:, None])[:, 0]
        sums["same"] += (best_t == chosen_t).sum().item()
        sums["forgiven"] += (gap_t <= bound.tie).sum().item()
        proof.places += len(sample.ids)
        if not parted and (gap_t > bound.tie).any():
            place = int((gap_t > bound.tie).nonzero()[0])
            mine, theirs = (tokenizer.convert_ids_to_tokens(int(one[place])) for one in (chosen_t, best_t))
            parted = f"first in example {number + 1} after {place + 1} tokens, {mine!r} instead of {theirs!r}"
        own, reference = _label_logprobs(sample.ids, found, rows_tv)
        sums["own"] += own
        sums["reference"] += reference
        sums["targets"] += len(sample.ids) - 1
        if base is not None:
            start_tk = found.same_of(base[number])
            moved_tk = near_tk - start_tk
            sums["along"] += (likely_tk * moved_tk * (found.logprobs_tk - start_tk)).sum().item()
            sums["squares"] += (likely_tk * moved_tk.square()).sum().item()
            weights += likely_tk.sum().item()
    proof.agreement, proof.divergence = sums["same"] / proof.places, sums["divergence"] / proof.places
    proof.perplexity, proof.reference_perplexity = (
        math.exp(min(50.0, -sums[name] / sums["targets"])) for name in ("own", "reference")
    )
    if base is not None and math.sqrt(sums["squares"] / weights) > NOTICED:
        proof.adapter_share = sums["along"] / sums["squares"]
    proof.agreement_without_ties = sums["forgiven"] / proof.places
    return parted


def _exceeds_rounding(
    source: Source,
    samples: Sequence[Sample],
    scores: Sequence[Scores],
    expected: Sequence[torch.Tensor],
    bound: Bound,
    proof: Proof,
    alike: str | Sequence[torch.Tensor],
) -> str | None:
    """Why what separates the export from base + adapter is more than rounding does to this model; None where it is
    not. Over many layers two computations of the same rounding part by about as much as each does from none, so that
    they are compared by how far they go, not place by place."""
    try:
        if isinstance(alike, str):
            rounded = _reference(source, [sample.ids for sample in samples], alike, rounds_inputs=True)
        else:
            rounded = [logits[: len(one.ids)].log_softmax(-1) for logits, one in zip(alike, samples, strict=True)]
    except UserError:  # a model whose rounding is not computed here, such as one with experts
        return ""
    again = Proof("rounded", proof.precision)
    told = [one.as_many_of(rows) for rows, one in zip(rounded, scores, strict=True)]
    _compare_scores(samples, told, expected, None, bound, again, source.tokenizer)
    proof.rounded_agreement = again.agreement_without_ties
    found, usual = (round((1 - one.agreement_without_ties) * one.places) for one in (proof, again))
    if found - usual <= CHANCE * math.sqrt(found + usual) and proof.divergence <= AS_FAR * again.divergence:
        return None
    return (
        f", nor is that what rounding does to this model: {proof.reference} rounded alike agree at "
        f"{again.agreement_without_ties:.1%} and diverge by {again.divergence:.2g} nats a token, it by "
        f"{proof.divergence:.2g}"
    )


def _agrees(proof: Proof, bound: Bound) -> bool:
    return proof.agreement_without_ties >= bound.agreement


def _disagreement(proof: Proof, bound: Bound, parted: str) -> str:
    return (
        f"at {proof.agreement_without_ties:.1%} of {proof.places} places the likeliest token is the same, and "
        f"{bound.agreement:.0%} are wanted ({parted})"
    )


def _judge(proof: Proof, bound: Bound, parted: str) -> None:
    """Of all but the share of equal tokens."""
    share = proof.adapter_share
    if bound.largest is not None and not proof.largest <= bound.largest:
        where = f" ({parted})" if parted and _agrees(proof, bound) else ""
        proof.failures.append(
            f"log-probabilities differ by up to {proof.largest:.2g}, more than the {bound.largest:g} that rounding to "
            f"{proof.precision} explains{where}"
        )
    if bound.divergence is not None and not proof.divergence <= bound.divergence:
        proof.failures.append(f"it diverges by {proof.divergence:.2g} nats a token, more than {bound.divergence:g}")
    if share is not None and not abs(share - 1) <= bound.share:
        proof.failures.append(f"{share:.0%} of what the adapter learned are in it (1 ± {bound.share:.0%} are wanted)")


def _divergence_of_rest(near_tk: torch.Tensor, found: Scores) -> float:
    """Of all tokens together that an engine does not tell of."""
    if found.ids_tk is None:
        return 0.0
    rest_t, own_t = ((1 - one.exp().sum(1)).clamp(min=1e-9) for one in (near_tk, found.logprobs_tk))
    return (rest_t * (rest_t / own_t).log()).sum().item()


def _label_logprobs(ids: Sequence[int], found: Scores, rows_tv: torch.Tensor) -> tuple[float, float]:
    """Sums over the tokens that come next. What an engine does not tell of is as likely as the least that it tells of,
    for both."""
    labels = torch.tensor(ids[1:])
    if found.ids_tk is None:
        own, reference = (rows.gather(1, labels[:, None]) for rows in (found.logprobs_tk[:-1], rows_tv[:-1]))
        return own.double().sum().item(), reference.double().sum().item()
    hits = found.ids_tk[:-1] == labels[:, None]
    floor = found.logprobs_tk[:-1, -1]
    own = torch.where(hits.any(1), (found.logprobs_tk[:-1].masked_fill(~hits, 0.0)).sum(1), floor)
    reference = rows_tv[:-1].gather(1, labels[:, None])[:, 0]
    reference = torch.where(hits.any(1), reference, floor)
    return own.double().sum().item(), reference.double().sum().item()


def _compare_text(made: list[int], rows_tv: torch.Tensor, bound: Bound, proof: Proof, tokenizer: Any) -> None:
    """A text is the same where base + adapter, given all before, find the same token likeliest."""
    proof.text, proof.text_tokens = tokenizer.decode(made), len(made)
    for place, token in enumerate(made):
        gap = (rows_tv[place].max() - rows_tv[place, token]).item()
        if gap > bound.tie:
            if bound.largest is not None:
                best = tokenizer.convert_ids_to_tokens(int(rows_tv[place].argmax()))
                mine = tokenizer.convert_ids_to_tokens(token)
                where = f"at token {place + 1}, which is less likely by {gap:.2g}"
                proof.failures.append(f"the greedy text goes on with {mine!r} instead of {best!r} {where}")
            return
        proof.same_text = place + 1


def _compare_words(source: Source, engine: Engine, proof: Proof) -> None:
    """Texts, the chat template and stop tokens: to be the same in every precision."""
    tokenizer, encoder = source.tokenizer, source.encoder
    added = [token for _, token in sorted(tokenizer.added_tokens_decoder.items())]
    texts = [SAMPLE, *(f"{SAMPLE[:20]}{token}{SAMPLE[:9]}" for token in added[:ADDED])]
    strips = [token for token in added if token.lstrip or token.rstrip]  # takes in the spaces beside it
    texts += [f"{SAMPLE[:20]} {token} {SAMPLE[:9]}" for token in strips[:ADDED]]
    for text in texts:
        expected, found = tokenizer(text, add_special_tokens=False)["input_ids"], engine.tokenize(text)
        if found != expected:
            proof.failures.append(
                f"the text {text!r} becomes other tokens{_first_difference(expected, found, tokenizer)}"
            )
            break
    if not encoder.has_template:
        proof.chat_template = "there is none"
    elif encoder.writes_date:
        proof.chat_template = "not compared, since it writes today's date"
    else:
        mode = encoder.mode_of(source.reasons)
        for messages in CONVERSATIONS:
            given = [Message(turn["role"], turn["content"]) for turn in messages]
            try:
                expected = encoder.prompt(given, reasons=source.reasons)
                wanted = encoder.as_wanted(list(messages))
                plain = tokenizer.apply_chat_template(wanted, add_generation_prompt=True, tokenize=False, **mode)
            except (UserError, ValueError, TypeError, TemplateError):
                continue  # no conversation for this template
            # As training asked, or as its tokenizer asks by itself; where these differ, the card says so.
            asked = (expected, tokenizer(plain, add_special_tokens=False)["input_ids"])
            found = engine.prompt(wanted, mode)
            if found is not None and found not in asked:
                where = _first_difference(expected, found, tokenizer)
                proof.failures.append(f"its chat template does not make the tokens of training{where}")
                break
    for end in source.ends:
        name = str(tokenizer.convert_ids_to_tokens(end))
        if engine.stops_at(end):
            proof.stops.append(name)
        else:
            proof.failures.append(f"it does not stop at {name}, which ends the answers it was trained on")


def _first_difference(expected: Sequence[int], found: Sequence[int], tokenizer: Any) -> str:
    place = next(
        (n for n, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found))
    )

    def shown(ids: Sequence[int]) -> str:
        return repr(tokenizer.convert_ids_to_tokens(int(ids[place]))) if place < len(ids) else "the end"

    return f" (token {place + 1} is {shown(found)} instead of {shown(expected)})"


def _check_influence(source: Source, engine: Peft | Vllm, samples: Sequence[Sample], proof: Proof) -> None:
    """That each tensor of an adapter changes what the engine says; one that is 0, or whose partner is, cannot."""
    files = source.weights.adapter
    assert files is not None
    zero = {name.removesuffix(".weight").rpartition(".")[0] for name, one in files.tensors.items() if not one.any()}
    silent = engine.without_influence(max((sample.ids for sample in samples), key=len))
    lost = [name for name in silent if name.split(".lora_")[0] not in zero]
    if lost:
        proof.failures.append(f"{len(lost)} tensors of the adapter change nothing, {lost[0]} among them")
