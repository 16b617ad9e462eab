"""The shapes data has on its way from a file to the model; types only.

    file --source--> Record --convert--> Conversation | Document | Tokens | Preference | Judged --chat--> Example
         --store--> TokenStore --loader--> MicroBatch

Legend: T tokens of a micro-batch, D documents in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tunesmith.errors import UserError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a record came from, for messages to people."""

    file: str
    line: int
    """Line of a .jsonl, .csv or .txt file; otherwise the record's number. Counted from 1."""
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.line}"


@dataclass(frozen=True, slots=True)
class Record:
    """One record as it stands in the file."""

    fields: dict[str, Any]
    origin: Origin
    size: int = 0
    """About how many bytes it has in its file, where that is known."""
    is_filled: bool = False
    """From columns (Parquet): fields that only other records have stand here as null."""


class RecordError(UserError):
    """A record that cannot be trained on: what kind of fault it has, where it stands, and what is wrong."""

    def __init__(self, kind: str, origin: Origin, reason: str):
        self.kind, self.origin, self.reason = kind, origin, reason
        self.is_read = False
        """It was read, and is faulty all the same."""
        super().__init__(f"{origin}: {reason}.".replace("\n", "\\n"))  # of the record's own words

    def __reduce__(self) -> Any:
        return RecordError, (self.kind, self.origin, self.reason), {"is_read": self.is_read}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `extra` holds what templates may use besides: tool_calls, name, tool_call_id, thinking..."""

    role: str
    content: str
    weight: float | None = None
    """Weight of this turn's target tokens; None leaves it to `train_on`."""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text without turns; every token is a target."""

    text: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its continuation for models without a chat template; the continuation is the target."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """A record that was tokenized elsewhere."""

    ids: tuple[int, ...]
    is_target: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to the same prompt, of which the first is the better one."""

    chosen: Conversation | Completion
    rejected: Conversation | Completion
    margin: float = 0.0
    """How much better it is, where the data say so."""


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer that is wanted, or one that is not."""

    answer: Conversation | Completion
    is_desirable: bool


@dataclass(frozen=True, slots=True)
class Labelled:
    """A text or conversation with what is to be said of it: a label's name or number, or a score."""

    text: Conversation | Document | Completion
    label: str | float
    name: str | None = None
    """The name of a label that is a number, where the record says it beside."""


@dataclass(frozen=True, slots=True)
class Related:
    """A text with others that belong to it, and such as do not; or, with a score, two texts that are so much alike."""

    anchor: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...] = ()
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Tagged:
    """Words, each with the name or number of its label, or None where it has none."""

    words: tuple[str, ...]
    tags: tuple[str | int | None, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt that the model itself will answer, and all that its record says besides, for those who check answers."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenized example: `ids[i]` is a target with weight `weights[i]`, where that is above 0.

    A weight says how much the prediction *of this token* counts; the shift by one happens in the loader. An example is
    one document, or several end to end that must be seen together, such as the two answers of a pair.
    """

    ids: np.ndarray
    """int32 [tokens]"""
    weights: np.ndarray
    """float32 [tokens]"""
    origin: Origin
    sizes: tuple[int, ...] = ()
    """Tokens of each of its documents, where it has several."""
    values: tuple[float, ...] = ()
    """What the record says of each of its documents: 1 for an answer that is wanted, 0 for one that is not, or the
    number of its label, its score, or the margin of a pair. 1 where it says nothing."""
    facts: str = ""
    """What the record of a prompt says besides; as JSON."""
    is_tagged: bool = False
    """Tokens have labels of their own: a weight is the number of the label and 1 more, or 0 where there is none."""
    is_whole: bool = False
    """It is scored, embedded or answered as a whole, so that one token is enough, though nothing predicts it."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Where the queries of a cut micro-batch lie and, in the row of all tokens, the keys they may see, as int32
    [2, P+1]: a row for each of its two chunks; a piece is a document, or what of one lies in the chunk."""

    queries: Any
    keys: Any


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Documents laid end to end; what one forward pass sees. Arrays are CPU torch tensors.

    Position i predicts `labels[i]`, the next token of the same document, and counts `weights[i]` in the loss.
    The last position of a document predicts nothing: weight 0.
    """

    tokens: Any
    """int64 [T]"""
    labels: Any
    """int64 [T]; 0 where the weight is 0"""
    weights: Any
    """float32 [T]"""
    positions: Any
    """int64 [T], restarting at 0 in each document"""
    boundaries: Any
    """int32 [D+1]: document d is tokens[boundaries[d]:boundaries[d+1]]"""
    longest: int
    """Length of the longest document."""
    sources: Any
    """int64 [D]: the data set each document came from"""
    origins: tuple[str, ...]
    """[D]: where each document came from, for messages to people"""
    pieces: Pieces | None = None
    """The pieces of this rank, where it is one rank's part of a micro-batch that several compute
    (`parallel.context`)."""
    parts: Any = None
    """int64 [D]: the number of each document within its example; -1 where it counts nothing"""
    values: Any = None
    """float64 [D]: what the data say of each document (`Example.values`)"""
    references: Any = None
    """float64 [D]: the log-probability that the reference gives each document's targets, where there is a reference"""
    numbers: Any = None
    """int64 [D]: the number of each document within its data set"""
    records: Any = None
    """int64 [D]: the number of the whole example each document is of, in its token store, where it is of one"""
    answers: Any = None
    """float32 [T]: the weights of the answers alone, where `weights` counts prompts too; None where both are one"""
    advantages: Any = None
    """float64 [D]: by how much each answer is better than others to its prompt, where they are the model's own"""
    compared: Any = None
    """float64 [N]: the log-probability that the reference gives each target token, where ratios are by tokens"""
    sampler: Any = None
    """float64 [N]: the log-probability with which each target token was drawn, where another engine has answered"""
    is_sampled: bool = False
    """Its targets are the model's own answers, and not the data's."""
    keys: Any = None
    """int32 [D+1]: the boundaries of what each document's tokens see, where some begin with tokens of others"""
    key_places: Any = None
    """int64 [S]: the tokens that these are"""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything one rank needs for one optimizer step."""

    step: int
    """Counted from 0."""
    epoch: float
    """Passes over the data when this step is done."""
    micro_batches: tuple[MicroBatch, ...]
    target_weight: float
    """Sum of the target weights of the whole step, over all micro-batches of all ranks: the loss's divisor."""
    tokens: int
    """Tokens of the whole step, over all ranks."""
    divisors: Mapping[str, float] = field(default_factory=dict)
    """What losses that are no sum over target tokens are divided by: all that the whole step has of each."""
    mismatched: tuple[MicroBatch, ...] = ()
    """Prompts with answers to other prompts, for objectives that compare with such (`Objective.has_baseline`)."""
    updates: int = 1
    """Optimizer updates with these micro-batches."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What is known of the step before it is computed: rewards of the answers it has."""
    figures_of: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """`figures` by data set."""
