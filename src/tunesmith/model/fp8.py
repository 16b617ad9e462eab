"""Matmuls in fp8: all three of a trained linear, one of a frozen output head; the weights stay what they are."""

from __future__ import annotations

from torch import nn

from tunesmith.kernels.fp8 import FP8_MULTIPLE, fp8_linear, quantize_transposed


class Fp8Linear(nn.Linear):
    """An `nn.Linear` by another way of multiplying; takes over the parameters of the one it replaces."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x):
        y = fp8_linear(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def use_fp8_linears(model: nn.Module) -> int:
    """Swap the trained linears of the decoder layers; the output head is left out, where rounding costs most."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # a layer has none
    swapped = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fits = type(child) is nn.Linear and child is not head
            if fits and all(size % FP8_MULTIPLE == 0 for size in child.weight.shape):
                setattr(parent, name, Fp8Linear(child))
                swapped += 1
    return swapped


def use_fp8_head_gradient(model: nn.Module) -> bool:
    """Keep a frozen head's weight in fp8 besides, for the gradient of what enters it; its logits stay in full
    precision, since rounding costs most there. False where sizes do not allow it."""
    head = model.get_output_embeddings()
    if head.weight.requires_grad or head.weight.shape[1] % FP8_MULTIPLE:
        return False
    values8_hw, scale_h1 = quantize_transposed(head.weight.detach(), None)
    head.register_buffer("values8_hw", values8_hw, persistent=False)
    head.register_buffer("scale_h1", scale_h1, persistent=False)
    return True
