"""What the routers of an MoE model do with the tokens of a micro-batch: how many tokens each expert gets, and the
gradient of the load-balancing loss of Switch Transformer as transformers computes it, over all layers together:

    loss = E sum_e f_e P_e      f_e: choices of expert e for each token and layer, P_e: its mean probability

Both are known when the forward pass is done, and only P_e has a gradient, so nothing of a layer has to be kept or
handed out for it but the router's logits: `routed` gives a router's weights on unchanged, and in the backward pass adds
the loss's gradient to that of the logits. It may stand in layers that are compiled and computed again.

Legend: T tokens (rows of the routers, padding among them), E experts, K experts of a token.
"""

from __future__ import annotations

import itertools
import weakref

import torch

from tunesmith.kernels.operator import operator

_keys = itertools.count()


class RoutingRecord:
    """Of one model: what its routers have noted in the present micro-batch."""

    def __init__(self, experts: int = 0, top_k: int = 0):
        """`experts` and `top_k` are those of the loss; 0 where there is none."""
        self.key = next(_keys)
        self.experts, self.top_k = experts, top_k
        self._is_open = self._counts_choices = False
        self._live_t: torch.Tensor | None = None
        self._counts: dict[int, torch.Tensor] = {}
        self._chosen: dict[int, torch.Tensor] = {}
        self._probabilities: dict[int, torch.Tensor] = {}
        self._pull_e: torch.Tensor | None = None
        _records[self.key] = self

    @property
    def has_loss(self) -> bool:
        return self.experts > 0

    def place_of(self, router: int) -> torch.Tensor:
        """What `routed` is given in the layer of this router, in host memory. As plain numbers they would be constants
        of the compiled layer, and each layer would be compiled anew."""
        return torch.tensor([self.key, router])

    def open(self, live_t: torch.Tensor, *, counts: bool) -> None:
        """Before a forward pass: which of its rows are tokens and no padding (1 or 0), and whether choices count."""
        self._is_open, self._counts_choices, self._live_t = True, counts, live_t

    def close(self, weight: float) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """After the forward pass, and before the backward pass: the loss, whose gradient counts `weight` there, and by
        router how many of its tokens' choices each expert got, [E]."""
        counts, chosen, probabilities = self._counts, self._chosen, self._probabilities
        self._counts, self._chosen, self._probabilities = {}, {}, {}
        self._is_open, self._pull_e = False, None
        if not chosen:
            return None, counts
        assert self._live_t is not None
        rows = (self._live_t.sum() * len(chosen)).clamp(min=1)
        chosen_e = torch.stack(list(chosen.values())).sum(0) / rows
        probabilities_e = torch.stack(list(probabilities.values())).sum(0) / rows
        self._pull_e = chosen_e * (self.experts * weight) / rows
        return self.experts * (chosen_e * probabilities_e).sum(), counts

    @torch.no_grad()
    def note(self, router: int, logits: torch.Tensor, choice: torch.Tensor) -> None:
        """What one router did. When layers are computed again in the backward pass, all is known already."""
        if not self._is_open:
            return
        assert self._live_t is not None
        logits_te = logits.reshape(-1, logits.shape[-1])
        assert logits_te.shape[0] == self._live_t.shape[0]
        if self._counts_choices:
            self._counts[router] = _histogram(choice, self._live_t, logits_te.shape[1])
        if self.has_loss:
            probabilities_te = logits_te.float().softmax(-1)
            chosen_tk = probabilities_te.topk(self.top_k, dim=-1).indices
            self._chosen[router] = _histogram(chosen_tk, self._live_t, self.experts)
            self._probabilities[router] = (probabilities_te * self._live_t[:, None]).sum(0)

    @torch.no_grad()
    def gradient(self, logits: torch.Tensor) -> torch.Tensor:
        if self._pull_e is None or self._live_t is None:
            return torch.zeros_like(logits)
        probabilities_te = logits.reshape(-1, logits.shape[-1]).float().softmax(-1)
        pulled_te = self._pull_e - (probabilities_te * self._pull_e).sum(-1, keepdim=True)
        return (probabilities_te * pulled_te * self._live_t[:, None]).view(logits.shape).to(logits.dtype)


_records: weakref.WeakValueDictionary[int, RoutingRecord] = weakref.WeakValueDictionary()


def routed(
    weights: torch.Tensor, logits: torch.Tensor, choice: torch.Tensor, place: torch.Tensor, *, has_loss: bool
) -> torch.Tensor:
    """`weights`, as a router gives them with these logits [T, E] and this choice [T, K]; the record is told, whose
    `place_of` this router it was."""
    return _routed(weights, logits, choice, place, has_loss)


@operator("routed")
def _routed(
    weights: torch.Tensor, logits: torch.Tensor, choice: torch.Tensor, place: torch.Tensor, has_loss: bool
) -> torch.Tensor:
    record, router = place.tolist()
    if (found := _records.get(record)) is not None:
        found.note(router, logits, choice)
    return weights.clone()


@torch.library.register_fake(_routed)
def _(weights, logits, choice, place, has_loss):
    return torch.empty_like(weights)


@operator("routed_backward")
def _gradient(logits: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    found = _records.get(place.tolist()[0])
    return torch.zeros_like(logits) if found is None else found.gradient(logits)


@torch.library.register_fake(_gradient)
def _(logits, place):
    return torch.empty_like(logits)


def _save(ctx, inputs, output):
    _, logits, _, place, ctx.has_loss = inputs
    if ctx.has_loss:
        ctx.save_for_backward(logits, place)


def _backward(ctx, d_weights):
    d_logits = _gradient(*ctx.saved_tensors) if ctx.has_loss else None
    return d_weights, d_logits, None, None, None


torch.library.register_autograd(_routed, _backward, setup_context=_save)


def _histogram(choice: torch.Tensor, live_t: torch.Tensor, experts: int) -> torch.Tensor:
    """How many of the live tokens' choices are each expert; whole numbers, so that their order does not matter."""
    choice_tk = choice.reshape(live_t.shape[0], -1)
    weights_tk = live_t[:, None].expand(choice_tk.shape)
    counts_e = torch.zeros(experts, device=choice.device)
    return counts_e.index_add_(0, choice_tk.reshape(-1), weights_tk.reshape(-1))
