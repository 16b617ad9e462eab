"""Continuous batching: one thread decodes all requests, a token each at every step; they join and leave between steps.

Requests for the same adapter are one batch. A prompt is read, on a GPU with others of about its length, and its row
then joins the batch of its adapter. What a request may take of the cache in the end is reserved when it joins, so that
memory stays within `Limits.cache_tokens` whatever comes; until there is room it waits, first come, first served.

Where a model allows it, steps are speculative: tokens that a request may well have next are read along with its last
one (`infer.speculate`), as long as that makes more tokens a second.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import psutil
import torch
from torch import nn

from tunesmith.infer.cache import Row, cut, regroup
from tunesmith.infer.call import Call, Tried
from tunesmith.infer.decoding import PLAIN, Decoding, History
from tunesmith.infer.sampling import Choice, Token, choose
from tunesmith.infer.speculate import MOST, Draft, Drafted, Lookup, Pace

PROMPT_TOKENS_A_STEP = 2048
"""Prompts are read until they have so many tokens together; then those that wait for their next token have it."""
SHARE = {"cuda": 0.4, "cpu": 0.25}
"""Share of the memory that is free once the model is loaded, for the cache: rows that join or leave have it copied."""
QUIET = 8
"""Steps without proposals after which the next step is begun before its tokens are read: proposals undo that."""
LONGEST = 8192
"""Tokens of a prompt and its answer, where the model's files name no limit."""
Reason = Literal["stop", "length", "cancelled", "timeout", "failed", "not followed"]
log = logging.getLogger("tunesmith.serve")


@dataclass(frozen=True)
class Limits:
    batch: int
    """Requests that are decoded at once."""
    queue: int
    """Requests that wait."""
    length: int
    """Tokens of a prompt and its answer."""
    cache_tokens: int
    """Tokens that the cache may hold, padding included."""
    cache_bytes: int | None = None
    """Bytes of these tokens in the cache, where that is known."""


class Busy(Exception):
    """The queue is full, or the server is going away."""


class NotFollowedError(Exception):
    """What an answer must spell is too intricate to be followed any further."""


class Grammar(Protocol):
    """What the tokens of an answer must spell."""

    def allowed(self) -> torch.Tensor:
        """The tokens that may come next [V], bool; stop tokens among them where the answer may end."""
        ...

    def take(self, token: int) -> bool:
        """The token has come; whether the answer is complete with it."""
        ...


@dataclass(eq=False)
class Job:
    """One request, from its prompt's tokens to the tokens of its answer."""

    model: Hashable
    """What `select` of the engine is given."""
    prompt: list[int]
    max_tokens: int
    stop_ids: frozenset[int]
    take: Callable[[Token], bool]
    """Given each token but a stop token; True ends the answer (a stop string). Called in the engine's thread."""
    end: Callable[[Reason], None]
    """Called once, whatever happens."""
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    top_logprobs: int | None = None
    deadline: float = float("inf")
    """When it must have ended, by `time.monotonic`."""
    grammar: Grammar | None = None
    decoding: Decoding = PLAIN
    history: History | None = None
    """The tokens so far, once its prompt is read, where `decoding` asks for more than plain sampling."""
    generated: int = 0
    is_cancelled: bool = False
    fault: Reason | None = None
    """Why it ends, where its own text or grammar has failed."""
    is_ended: bool = False
    chance: random.Random = field(init=False)
    lookup: Lookup = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)  # None: seeded by the system
        self.lookup = Lookup(())
        if self.temperature <= 0:
            self.decoding = self.decoding.without_sampling()

    @property
    def needs(self) -> int:
        """Tokens of the cache, in the end."""
        return len(self.prompt) + self.max_tokens

    @property
    def is_greedy(self) -> bool:
        """Whether it goes on with the likeliest token each time."""
        is_told = self.top_logprobs is not None
        return self.temperature <= 0 and not is_told and self.grammar is None and self.decoding.is_plain

    def begin(self, device: torch.device) -> None:
        """Its prompt is read."""
        self.lookup = Lookup(self.prompt)
        if not self.decoding.is_plain:
            self.history = History(self.decoding, self.prompt, ends=self.stop_ids, most=self.max_tokens, device=device)

    def push(self, token: int) -> None:
        self.generated += 1
        self.lookup.push(token)
        if self.history is not None:
            self.history.push(token)

    def finish(self, reason: Reason) -> None:
        if not self.is_ended:
            self.is_ended = True
            self.end(reason)
            # What it held goes now, not when the garbage collector comes by: whoever asked holds the job, too.
            self.take, self.end, self.lookup = lambda _: True, lambda _: None, Lookup(())
            self.grammar = self.history = None

    def choice(self) -> Choice:
        allowed = self.grammar.allowed() if self.grammar is not None else None
        drawn = self.chance.random()
        return Choice(self.temperature, self.top_p, drawn, self.top_logprobs, allowed, self.history)


@dataclass
class Stats:
    """What the engine counts; read from other threads."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cancelled: int = 0
    failed: int = 0
    steps: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(eq=False)
class Group:
    """Rows that are decoded together. `lengths` are their tokens in the cache, `last` the token each goes on with."""

    model: Hashable
    cache: Any
    jobs: list[Job]
    lengths: list[int]
    last: list[int]
    drafted: Drafted = field(default_factory=Drafted)
    quiet: int = 0
    """Steps since tokens were proposed."""

    def reserved(self, joining: Sequence[int] = ()) -> int:
        """Tokens that the cache of this group may come to hold, with some more that need so many each."""
        needs = [*(job.needs for job in self.jobs), *joining]
        return len(needs) * max(needs, default=0)


class Engine:
    """`select(name)` puts the adapter of this name on the model. `model` is called by the engine's thread alone.
    `is_wide`: it may be given several tokens at once (`Tried.is_wide`); then steps are speculative. `compiles`:
    decoding steps are compiled on a GPU."""

    def __init__(
        self,
        model: nn.Module,
        select: Callable[[Any], None],
        limits: Limits,
        *,
        is_shared: bool,
        is_wide: bool = False,
        compiles: bool = False,
        draft: Draft | None = None,
    ):
        self.model, self.limits, self.stats = model, limits, Stats()
        self._select, self._is_shared = select, is_shared
        self._speculates, self._draft, self._pace = is_wide and is_shared, draft, Pace()
        self._call = Call(model, is_shared=is_shared, limit=limits.cache_bytes, compiles=compiles)
        self._reads_batches = is_shared and self._call.device.type == "cuda"
        self._groups: list[Group] = []
        self._waiting: deque[Job] = deque()
        self._errands: deque[tuple[Callable[[], Any], Future]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def warm_up(self, name: Hashable) -> None:
        """Before the start: what takes long the first time is done with this adapter on the model."""
        self._select(name)
        self._call.warm_up(name, self.limits.batch)

    def submit(self, job: Job) -> None:
        """Raises Busy. The job must fit within `limits`."""
        assert job.prompt
        assert job.needs <= min(self.limits.length, self.limits.cache_tokens)
        with self._changed:
            if self._is_closed or len(self._waiting) >= self.limits.queue:
                raise Busy
            self._waiting.append(job)
            self._changed.notify()

    def between_steps(self, work: Callable[[], Any]) -> Future:
        """Have the engine's thread do this between two steps: what needs the model besides decoding. Raises Busy."""
        done: Future = Future()
        with self._changed:
            if self._is_closed or len(self._errands) >= self.limits.queue:
                raise Busy
            self._errands.append((work, done))
            self._changed.notify()
        return done

    def cancel(self, job: Job) -> None:
        """It leaves the queue at once, or the batch before its next step."""
        with self._changed:
            job.is_cancelled = True
            self._changed.notify()

    def close(self) -> None:
        """Ends all that is under way."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return sum(len(group.jobs) for group in list(self._groups))

    @property
    def cached_tokens(self) -> int:
        """Tokens in the cache now, padding included."""
        return sum(len(group.lengths) * max(group.lengths, default=0) for group in list(self._groups))

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # The thread

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                with self._changed:
                    while not (self._waiting or self._groups or self._errands or self._is_closed):
                        self._changed.wait()
                    if self._is_closed:
                        break
                self._drop_ended()
                self._run_errand()
                self._admit()
                for group in list(self._groups):
                    self._guarded(list(group.jobs), lambda group=group: self._step(group), group)
        for job in [*self._waiting, *(job for group in self._groups for job in group.jobs)]:
            job.finish("cancelled")
        for _, done in self._errands:
            done.cancel()
        self._waiting.clear()
        self._groups.clear()
        self._errands.clear()

    def _run_errand(self) -> None:
        """One at a time: those who wait for their next token have it in between."""
        with self._changed:
            if not self._errands:
                return
            work, done = self._errands.popleft()
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(work())
        except Exception as error:  # of whoever asked for it; the engine goes on
            done.set_exception(error)

    def _guarded(self, jobs: list[Job], work: Callable[[], None], group: Group | None = None) -> None:
        """What fails, fails for these jobs alone; others go on."""
        try:
            work()
        except Exception as error:  # the message may quote a prompt
            log.error("a step failed: %s at %s", type(error).__name__, _place_of(error))
            if group in self._groups:
                self._groups.remove(group)
            for job in jobs:
                self.stats.failed += not job.is_ended
                job.finish("failed")

    def _drop_ended(self) -> None:
        now = time.monotonic()

        def reason(job: Job) -> Reason | None:
            return "cancelled" if job.is_cancelled else "timeout" if now > job.deadline else None

        with self._changed:
            ended = [(job, why) for job in self._waiting if (why := reason(job))]
            self.stats.cancelled += len(ended)  # who sees that nothing runs any more finds them counted
            for job, _ in ended:
                self._waiting.remove(job)
        for group in list(self._groups):
            leaving = [(job, why) for job in group.jobs if (why := reason(job))]
            if leaving:
                self.stats.cancelled += len(leaving)
                gone = {job for job, _ in leaving}
                kept = [place for place, job in enumerate(group.jobs) if job not in gone]
                staying = [group.jobs[place] for place in kept]
                self._guarded(staying, lambda group=group, kept=kept: self._keep(group, kept), group)
                ended += leaving
        for job, why in ended:
            job.finish(why)

    def _admit(self) -> None:
        admitted: list[Job] = []
        while sum(len(job.prompt) for job in admitted) < PROMPT_TOKENS_A_STEP:
            with self._changed:
                if not self._waiting or not self._has_room(self._waiting[0], admitted):
                    break
                admitted.append(self._waiting.popleft())
        for jobs in self._read_together(admitted):
            self._guarded(jobs, lambda jobs=jobs: self._begin(jobs))

    def _has_room(self, job: Job, admitted: Sequence[Job]) -> bool:
        own = self._group_of(job.model)
        others = sum(group.reserved() for group in self._groups if group is not own)
        others += sum(one.needs for one in admitted if one.model != job.model or not self._is_shared)
        joining = [one.needs for one in admitted if one.model == job.model and self._is_shared] + [job.needs]
        mine = (own or Group(job.model, None, [], [], [])).reserved(joining)
        return self.running + len(admitted) < self.limits.batch and others + mine <= self.limits.cache_tokens

    def _group_of(self, model: Hashable) -> Group | None:
        return next((group for group in self._groups if group.model == model), None) if self._is_shared else None

    def _read_together(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """On a GPU, prompts of about the same length: alone, short ones leave it idle."""
        if not self._reads_batches:
            return [[job] for job in jobs]
        found: list[list[Job]] = []
        for job in sorted(jobs, key=lambda job: (id(job.model), len(job.prompt))):
            first = found[-1][0] if found else None
            if first is not None and first.model == job.model and len(job.prompt) <= 2 * len(first.prompt):
                found[-1].append(job)
            else:
                found.append([job])
        return found

    def _begin(self, jobs: Sequence[Job]) -> None:
        """Read prompts for the same model; their rows join the batch unless the first token ends the answer."""
        self._select(jobs[0].model)
        prompts = [job.prompt for job in jobs]
        logits_bv, cache = self._call.read(prompts[0]) if len(jobs) == 1 else self._call.read_all(prompts)
        rows: list[tuple[Job, int, Row]] = []
        for place, job in enumerate(jobs):
            job.begin(self._call.device)
            self.stats.prompt_tokens += len(job.prompt)
            if (choice := self._choice(job)) is None:
                job.finish(job.fault or "failed")
                continue
            token = choose(logits_bv[place : place + 1], [choice])[0]
            if why := self._given(job, token):
                job.finish(why)
                continue
            assert token is not None
            rows.append((job, token.id, Row(cache, place, len(job.prompt))))
        if rows:
            self._join(jobs[0].model, cache, rows, is_all=len(rows) == len(jobs))

    def _join(self, model: Hashable, cache: Any, rows: Sequence[tuple[Job, int, Row]], *, is_all: bool) -> None:
        """`is_all`: the cache has these rows and no others."""
        group = self._group_of(model)
        if group is None:
            cache = cache if is_all else regroup([row for _, _, row in rows])
            self._groups.append(Group(model, cache, [], [], []))
            group = self._groups[-1]
        else:
            before = [Row(group.cache, place, length) for place, length in enumerate(group.lengths)]
            group.cache = regroup([*before, *(row for _, _, row in rows)])
        for job, token, row in rows:
            group.jobs.append(job)
            group.lengths.append(row.length)
            group.last.append(token)

    def _step(self, group: Group) -> None:
        began = time.perf_counter()
        rows = len(group.jobs)
        self._select(group.model)
        proposed = self._proposed(group)
        tokens = [[last, *more] for last, more in zip(group.last, proposed, strict=True)]
        width = max(map(len, tokens))
        group.quiet = group.quiet + 1 if width == 1 else 0
        runs_ahead = all(job.is_greedy for job in group.jobs) and (not self._speculates or group.quiet > QUIET)
        logits_bwv = self._call.go_on_with(group.cache, tokens, group.lengths, group.model, runs_ahead=runs_ahead)
        self.stats.steps += 1
        made, ended = self._choose(group, proposed, logits_bwv)
        beyond = [width - count for count in made]
        group.lengths = [length + count for length, count in zip(group.lengths, made, strict=True)]
        kept = [place for place, job in enumerate(group.jobs) if job not in ended]
        staying = [group.jobs[place] for place in kept]
        if ended or any(beyond):  # the cache of those that ended is free before anyone hears of it
            self._guarded(staying, lambda: self._keep(group, kept, beyond), group)
        for job, why in ended.items():
            job.finish(why)
        self._pace.note(rows, sum(made), time.perf_counter() - began, is_wide=width > 1)

    def _proposed(self, group: Group) -> list[list[int]]:
        """Tokens that may come next, for each row; none where they do not pay."""
        room = min(MOST, self.limits.length - max(group.lengths) - 1)
        if not self._speculates or room < 1 or not self._pace.may_try(len(group.jobs)):
            return [[] for _ in group.jobs]
        most = [min(room, job.max_tokens - job.generated - 1) for job in group.jobs]
        made = [job.lookup.propose(count) if count > 0 else [] for job, count in zip(group.jobs, most, strict=True)]
        if self._draft is not None and any(count > 0 and not one for count, one in zip(most, made, strict=True)):
            texts = [job.lookup.tokens for job in group.jobs]
            drafted = self._draft.propose(group.drafted, group.jobs, texts, min(MOST // 2, max(most)))
            made = [one or more[:count] for one, more, count in zip(made, drafted, most, strict=True)]
        return made

    def _choose(
        self, group: Group, proposed: list[list[int]], logits_bwv: torch.Tensor
    ) -> tuple[list[int], dict[Job, Reason]]:
        """Tokens for each row, up to the first that was not proposed: how many, and who has ended."""
        made: list[int] = [0] * len(group.jobs)
        ended: dict[Job, Reason] = {}
        going = list(range(len(group.jobs)))
        for column in range(logits_bwv.shape[1]):
            if not going:
                break
            choices = {place: self._choice(group.jobs[place]) for place in going}
            failed = [group.jobs[place] for place, choice in choices.items() if choice is None]
            ended |= {job: job.fault or "failed" for job in failed}
            ready = {place: choice for place, choice in choices.items() if choice is not None}
            rows_bv = logits_bwv[:, column] if len(ready) == len(group.jobs) else logits_bwv[list(ready), column]
            known = self._call.likeliest if column == 0 and len(ready) == len(group.jobs) else None
            tokens, still = choose(rows_bv, list(ready.values()), known) if ready else [], []
            for place, token in zip(ready, tokens, strict=True):
                job = group.jobs[place]
                made[place] += 1
                if why := self._given(job, token):
                    ended[job] = why
                    continue
                assert token is not None
                group.last[place] = token.id
                if column < len(proposed[place]) and proposed[place][column] == token.id:
                    still.append(place)
            going = still
        for place, tried in enumerate(proposed):
            if tried:
                accepted = min(made[place] - 1, len(tried))
                self.stats.proposed_tokens += len(tried)
                self.stats.accepted_tokens += accepted
                group.jobs[place].lookup.learn(len(tried), accepted)
        return made, ended

    def _given(self, job: Job, token: Token | None) -> Reason | None:
        """Give the job its token; how it has ended with it, if it has."""
        if token is None:
            log.error("the model %s gave no numbers", job.model)
            self.stats.failed += 1
            return "failed"
        job.push(token.id)
        self.stats.generated_tokens += 1
        is_cut = job.generated >= job.max_tokens
        if token.id in job.stop_ids or self._takes_no_more(job, token):
            if job.fault is not None:
                return job.fault
            return "length" if is_cut and job.decoding.forces_end else "stop"
        return "length" if is_cut else None

    def _choice(self, job: Job) -> Choice | None:
        """None where its grammar cannot be followed any further."""
        try:
            return job.choice()
        except Exception as error:  # of this request's grammar; those beside it go on
            self._note_fault(job, error)
            return None

    def _takes_no_more(self, job: Job, token: Token) -> bool:
        try:
            is_stopped = job.take(token)
            return (job.grammar is not None and job.grammar.take(token.id)) or is_stopped
        except Exception as error:  # of this request's text; those beside it go on
            self._note_fault(job, error)
            return True

    def _note_fault(self, job: Job, error: Exception) -> None:
        log.error("an answer failed: %s at %s", type(error).__name__, _place_of(error))
        self.stats.failed += 1
        job.fault = "not followed" if isinstance(error, NotFollowedError) else "failed"

    def _keep(self, group: Group, places: list[int], beyond: list[int] | None = None) -> None:
        """Go on with these rows, each without the columns at its end that are not its own."""
        beyond = beyond or [0] * len(group.jobs)
        if not places:
            self._groups.remove(group)
            return
        if len(places) == len(group.jobs) and len(set(beyond)) == 1:
            cut(group.cache, beyond[0])
            return
        rows = [Row(group.cache, place, group.lengths[place], beyond[place]) for place in places]
        group.cache = regroup(rows)
        group.jobs = [group.jobs[place] for place in places]
        group.lengths = [group.lengths[place] for place in places]
        group.last = [group.last[place] for place in places]
        group.drafted.keep(group.jobs)


def cache_tokens(model: nn.Module, tried: Tried, draft: Tried | None = None) -> int | None:
    """Tokens that the memory which is free beside the model has room for; None where that is not known."""
    each = tried.bytes_per_token + (draft.bytes_per_token if draft else 0)
    if not tried.bytes_per_token:
        return None
    device = next(model.parameters()).device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return int(free * SHARE[device.type]) // each


def _place_of(error: BaseException) -> str:
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "an unknown place"
