"""Refuse data that would train silently wrong, and warn about what looks wrong.

Three times: before anything is read (`check_encoder`), while examples are made (`Watch`), and when a data set is
complete (`check_dataset`, `missing_kinds`, `overlap_warnings`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from tunesmith.data.chat import TEMPLATE_DATE, Encoder
from tunesmith.data.convert import texts_of
from tunesmith.data.template import TemplateRefusal
from tunesmith.data.types import (
    Completion,
    Conversation,
    Document,
    Example,
    Message,
    Origin,
    Record,
    RecordError,
    Tokens,
)
from tunesmith.errors import UserError, listed


def check_encoder(encoder: Encoder, tokenizer: Any, vocab_size: int) -> list[str]:
    """Before any data is read: tokenizer, template and model fit together. Raises UserError; gives warnings."""
    _check_vocabulary(tokenizer, vocab_size)
    if not encoder.has_template:
        if tokenizer.eos_token_id is None:
            raise UserError(
                "the tokenizer has no end-of-text token (eos_token), so the model would never learn to stop; "
                "set one in the tokenizer, or give a `chat_template` that ends turns."
            )
        return []
    return _check_template(encoder, tokenizer)


@dataclass
class Watch:
    """What was seen while a data set was tokenized. Small, picklable; workers' watches are merged in order."""

    end_ids: frozenset[int]
    """`Encoder.end_ids`."""
    vocab_size: int
    examples: int = 0
    tokens: int = 0
    targets: int = 0
    first: Origin | None = None
    untargeted: Finding = field(default_factory=lambda: Finding())
    """Examples without any target."""
    expecting_end: int = 0
    """Examples whose targets should end with an end-of-turn token: all but those tokenized elsewhere."""
    ended: int = 0
    placeholders: dict[str, Finding] = field(default_factory=dict)
    markup: dict[str, Finding] = field(default_factory=dict)
    last: Origin | None = None
    written_out: dict[str, Finding] = field(default_factory=dict)
    """Special tokens that the texts write out, and that are plain text therefore."""
    tools_as_text: Finding = field(default_factory=lambda: Finding())
    joined: Finding = field(default_factory=lambda: Finding())
    """Conversations with messages of one role one after the other, where the template must have them alternate."""
    unranked: Finding = field(default_factory=lambda: Finding())
    """Pairs with scores, of which that of the chosen answer is not above the other's."""
    repeated: Finding = field(default_factory=lambda: Finding())
    """Answers that begin with their question."""
    bad: list[RecordError] = field(default_factory=list)
    """Records that were left out."""

    def see(
        self,
        record: Record,
        item: Conversation | Document | Completion | Tokens,
        example: Example,
        encoder: Encoder | None = None,
    ) -> None:
        """Look at one example before it is cut to length; raises RecordError for an id out of the vocabulary."""
        ids, is_target = example.ids, example.weights > 0
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
            bad = next(int(i) for i in ids if not 0 <= i < self.vocab_size)
            raise RecordError(
                "token id out of range",
                record.origin,
                f"the token id {bad} is out of the model's vocabulary of {self.vocab_size}; was the data tokenized "
                "for another model?",
            )
        self.examples += 1
        self.tokens += len(ids)
        self.targets += int(is_target.sum())
        self.first = self.first or record.origin
        if not is_target.any():
            self.untargeted.add(record.origin)
        if not isinstance(item, Tokens):
            self.expecting_end += 1
            self.ended += bool(np.isin(ids[is_target], list(self.end_ids)).any())
        if record.origin != self.last:  # one record may give several examples
            self.last = record.origin
            self._look_at_text(texts_of(item), record.origin, encoder)
            if _is_unranked(record.fields):
                self.unranked.add(record.origin)
            if _repeats_question(item):
                self.repeated.add(record.origin)
            if encoder and isinstance(item, Conversation) and encoder.writes_tools_as_text(item.messages, item.tools):
                self.tools_as_text.add(record.origin)
            if encoder and isinstance(item, Conversation) and encoder.joins_messages(item.messages, item.tools):
                self.joined.add(record.origin)

    def merge(self, other: Watch) -> None:
        """Add what another watch saw in later records of the same data set."""
        for name in ("examples", "tokens", "targets", "expecting_end", "ended"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first, self.last = self.first or other.first, other.last or self.last
        self.untargeted.merge(other.untargeted)
        self.bad += other.bad
        self.tools_as_text.merge(other.tools_as_text)
        self.joined.merge(other.joined)
        self.unranked.merge(other.unranked)
        self.repeated.merge(other.repeated)
        for mine, theirs in (
            (self.placeholders, other.placeholders),
            (self.markup, other.markup),
            (self.written_out, other.written_out),
        ):
            for text, finding in theirs.items():
                mine.setdefault(text, Finding()).merge(finding)

    def warnings(self) -> list[str]:
        found = []
        for text, finding in sorted(self.placeholders.items(), key=lambda entry: -entry[1].count)[:5]:
            found.append(
                f"{finding.first}: the placeholder {text} is left in the text ({_records(finding.count)}); "
                "the model will learn to say it."
            )
        for text, finding in sorted(self.markup.items(), key=lambda entry: -entry[1].count)[:5]:
            found.append(
                f"{finding.first}: the text holds {text}, which chat templates write themselves "
                f"({_records(finding.count)}); give the bare text."
            )
        for text, finding in sorted(self.written_out.items(), key=lambda entry: -entry[1].count)[:5]:
            found.append(
                f"{finding.first}: the text holds the special token {text}, which is encoded as plain text "
                f"({_records(finding.count)}); say `special_tokens: [{text!r}]` where it is meant."
            )
        if self.tools_as_text.count:
            found.append(
                f"{self.tools_as_text.first}: the chat template has no place for tools: they are described in the "
                "system message, and their calls and results written as <tool_call> and <tool_response> "
                f"({_records(self.tools_as_text.count)})."
            )
        if self.joined.count:
            found.append(
                f"{self.joined.first}: the chat template refuses two messages of one role one after the other: they "
                f"are written as one, with a blank line between them ({_records(self.joined.count)})."
            )
        if self.unranked.count:
            found.append(
                f"{self.unranked.first}: the score of the chosen answer is not above that of the rejected one "
                f"({_records(self.unranked.count)}), so the data do not say which is better; leave such pairs out, or "
                "turn them round."
            )
        if self.repeated.count:
            found.append(
                f"{self.repeated.first}: the answer begins with the whole question ({_records(self.repeated.count)}), "
                "so the model will learn to repeat it; give the answer alone."
            )
        if self.untargeted.count and self.targets:
            share = f"{self.untargeted.count} of {self.examples} examples have no target token"
            found.append(f"{self.untargeted.first}: nothing is learned from this record ({share}).")
        return found

    def _look_at_text(self, texts: list[str], origin: Origin, encoder: Encoder | None) -> None:
        plain: set[str] = set()
        for pattern, hints, findings in (
            (encoder.controls if encoder else None, ("",), self.written_out),
            (_PLACEHOLDER, ("{{",), self.placeholders),
            (_MARKUP, ("<", "[/INST]"), self.markup),
        ):
            if pattern is None:
                continue
            suspects = [text for text in texts if any(hint in text for hint in hints)]
            seen = {match for text in suspects for match in pattern.findall(text)} - plain
            plain |= seen if findings is self.written_out else set()
            for match in sorted(seen):
                if match in findings or len(findings) < 1000:
                    findings.setdefault(match, Finding()).add(origin)


def check_dataset(title: str, watch: Watch) -> None:
    """Raises UserError when the data set has no examples, no targets or never an end-of-turn target."""
    if not watch.examples:
        raise UserError(f"{title}: no examples are left.")
    if not watch.targets:
        raise UserError(
            f"{title}: none of its {watch.examples} examples has a target token (the first is {watch.first}), so "
            "nothing would be learned; check the weights of the messages, the labels and `train_on`."
        )
    if watch.expecting_end and not watch.ended:
        raise UserError(
            f"{title}: the end-of-turn token is a target in none of its {watch.examples} examples (the first is "
            f"{watch.first}), so the model would never learn to stop; check the chat template."
        )


def example_hash(example: Example) -> int:
    """64 bits that identify the example's tokens."""
    data = np.ascontiguousarray(example.ids, dtype=np.int32).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def missing_kinds(objective: str, labels: Sequence[str], values: Sequence[np.ndarray]) -> list[str]:
    """Warnings about kinds of records that training lacks: good or bad answers, a label, different scores. `values`
    says of which kind each record is."""
    if objective == "reward":
        scores = {float(value) for one in values for value in np.unique(one)}
        if len(scores) != 1 or sum(map(len, values)) < 2:
            return []
        return [
            f"All training records have the score {scores.pop():g}, so the model learns to give it to any answer; give "
            "scores that differ."
        ]
    if objective == "kto":
        found, names = {int(value > 0.5) for one in values for value in np.unique(one)}, ("unwanted", "wanted")
    elif objective == "classify":
        found, names = {int(value) for one in values for value in np.unique(one)}, tuple(labels)
    else:
        return []
    missing = [name for number, name in enumerate(names) if number not in found]
    if not missing:
        return []
    if objective == "kto":
        (only,) = (name for name in names if name not in missing)
        return [
            f"All training answers are {only} ones, so KTO has nothing to tell them from; add {missing[0]} ones"
            + (", or use `objective: sft`." if only == "wanted" else ".")
        ]
    if len(found) == 1:
        return [
            f"All training records have the label {names[found.pop()]}, so the model learns to give it to any text."
        ]
    return [f"No training record has the label {listed(missing)}, so the model learns never to give it."]


def overlap_warnings(train: Mapping[str, np.ndarray], held_out: Mapping[str, np.ndarray]) -> list[str]:
    """Data set title -> uint64 example hashes, for training and held-out data: what is in both."""
    found = []
    for title, hashes in held_out.items():
        for other, trained in train.items():
            shared = int(np.isin(hashes, trained).sum())
            if shared:
                found.append(
                    f"{shared} of the {len(hashes)} examples of {title} (held out) are also in {other} (training), so "
                    "their loss says little about new data."
                )
    return found


@dataclass
class Finding:
    """How often something was seen, and where first."""

    count: int = 0
    first: Origin | None = None

    def add(self, origin: Origin) -> None:
        self.count += 1
        self.first = self.first or origin

    def merge(self, other: Finding) -> None:
        self.count += other.count
        self.first = self.first or other.first


SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"))
"""Fields of pairs in which people keep what each answer was given."""
LONG = 16
"""Characters."""
_PLACEHOLDER = re.compile(r"\{\{\s*[A-Za-z_][\w .-]{0,40}\s*\}\}")
_MARKUP = re.compile(r"<\|[A-Za-z_]+\|>|</?s>|\[/INST\]|<(?:start|end)_of_turn>|<(?:bos|eos)>")


def _repeats_question(item: Conversation | Document | Completion | Tokens) -> bool:
    """Whether an answer begins with all of its question, where that is too long to be a manner of speaking."""
    if isinstance(item, Completion):
        pairs = [(item.prompt, item.completion)]
    elif isinstance(item, Conversation):
        turns = pairwise(item.messages)
        pairs = [(one.content, two.content) for one, two in turns if (one.role, two.role) == ("user", "assistant")]
    else:
        return False
    return any(len(asked.strip()) >= LONG and said.strip().startswith(asked.strip()) for asked, said in pairs)


def _is_unranked(fields: Mapping[str, Any]) -> bool:
    if "chosen" not in fields or "rejected" not in fields:
        return False
    for chosen, rejected in SCORES:
        both = fields.get(chosen), fields.get(rejected)
        if all(isinstance(one, int | float) and not isinstance(one, bool) for one in both):
            return not both[0] > both[1]  # pyright: ignore[reportOptionalOperand]
    return False


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count} records"


def _check_vocabulary(tokenizer: Any, vocab_size: int) -> None:
    token, highest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1], default=("", -1))
    if highest >= vocab_size:
        raise UserError(
            f"the tokenizer knows {highest + 1} tokens (the last is {token!r}), but the model has embeddings for only "
            f"{vocab_size}; give the model its own tokenizer, or, where tokens were added to that, name them in "
            "new_tokens."
        )
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        number = getattr(tokenizer, f"{name}_id", None)
        if number is not None and not 0 <= number < vocab_size:
            raise UserError(
                f"the tokenizer's {name} has the id {number}, but the model has embeddings for only {vocab_size}."
            )


def _check_template(encoder: Encoder, tokenizer: Any) -> list[str]:
    words = ("vwkya", "qxzja", "vwkyb", "qxzjb")
    messages = [Message("assistant" if n % 2 else "user", word) for n, word in enumerate(words)]
    dicts = [{"role": message.role, "content": message.content} for message in messages]
    try:
        text = encoder.render(dicts)
        asked = encoder.render(dicts[:3], generation=True)
        unasked = encoder.render(dicts[:3])
    except TemplateRefusal as error:
        raise UserError(f"the chat template refuses a plain conversation of two questions: {error}.") from error

    places = [text.find(word) for word in words]
    for message, place in zip(dicts, places, strict=True):
        if place < 0:
            raise UserError(f"the chat template drops messages of the {message['role']}; give another `chat_template`.")
    if places != sorted(places):
        raise UserError("the chat template writes the messages in another order; give another `chat_template`.")
    bos = tokenizer.bos_token_id
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    if bos is not None and ids[:2] == [bos, bos]:
        raise UserError(f"the chat template begins with {tokenizer.bos_token} twice; give one that writes it once.")

    examples, always_thinks = _examples_of(encoder, messages)
    last = examples[0]
    if not np.isin(last.ids[last.weights > 0], list(encoder.end_ids)).any():
        raise UserError(
            "the chat template ends the assistant's turn without an end-of-turn token among the targets, so the model "
            "would never learn to stop; give a `chat_template` that ends it with one, such as the eos_token."
        )
    has_no_prompt = asked == unasked and text.startswith(asked)
    header = text[len(asked) : places[3]] if has_no_prompt else ""
    opened = asked.rstrip().endswith("<think>")
    writes_bos = encoder.bos_id is None or ids[:1] == [encoder.bos_id]
    found = (
        (
            always_thinks,
            "the chat template always lets the model think: answers need their `reasoning_content`, or begin with "
            "their reasoning and `</think>`.",
        ),
        (
            encoder.opens_thoughts or (opened and not always_thinks and not encoder.mode),
            "the chat template opens every answer for thoughts: answers without `reasoning_content` teach the model to "
            "close them at once.",
        ),
        (
            encoder.folds_system,
            "the chat template has no system role: system messages are put in front of the first user message.",
        ),
        (
            len(examples) > 1,
            "the chat template writes earlier turns differently from the last one (it may drop reasoning): each turn "
            "of a longer conversation becomes an example of its own.",
        ),
        (
            bool(encoder.mode),
            "answers without reasoning are trained in the chat template's mode without thinking "
            f"({_shown(encoder.mode)}); ask for answers in that mode too.",
        ),
        (
            bool(header.strip()),
            f"the chat template has no generation prompt: what opens the assistant's turn ({header!r}) is trained as "
            "part of the answer.",
        ),
        (
            not writes_bos,
            f"the tokenizer begins texts with {tokenizer.bos_token}, but the chat template does not write it.",
        ),
        (
            encoder.writes_date,
            f"the chat template writes today's date: training always uses {TEMPLATE_DATE:%d %b %Y}, so that a run can "
            "be repeated.",
        ),
    )
    return [warning for is_so, warning in found if is_so]


def _shown(mode: Mapping[str, Any]) -> str:
    """The first of the variables: the others are other templates' names for it."""
    name, value = next(iter(mode.items()), ("", ""))
    return f"`{name}: {str(value).lower()}`"


def _examples_of(encoder: Encoder, messages: Sequence[Message]) -> tuple[list[Example], bool]:
    """The examples of a plain conversation; and whether its answers need thoughts to become examples."""
    origin = Origin("a test conversation for the chat template", 1, "record")
    try:
        return encoder.encode_all(Conversation(tuple(messages)), origin), False
    except UserError:
        apart = [replace(m, extra={"reasoning_content": "vwkyc"}) for m in messages]
        inside = [replace(m, content=f"vwkyc\n</think>\n\n{m.content}") for m in messages]
        for thoughtful in (apart, inside):
            answered = [t if t.role == "assistant" else m for m, t in zip(messages, thoughtful, strict=True)]
            try:
                return encoder.encode_all(Conversation(tuple(answered)), origin), True
            except UserError:
                continue
        raise
