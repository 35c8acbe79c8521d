"""The tropical layer for PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import _engram


def _array(tensor: Any) -> Any:
    return np.ascontiguousarray(tensor.detach().cpu().numpy(), dtype=np.float32)


class LayerFunction(torch.autograd.Function):
    """The layer as a function: ``LayerFunction.apply(batch, weights, biases)``."""

    @staticmethod
    def forward(ctx: Any, batch: Any, weights: Any, biases: Any) -> Any:
        values, winners = _engram.tropical_forward(_array(weights), _array(biases), _array(batch))
        ctx.winners, ctx.inputs = winners, weights.shape[0]
        return torch.from_numpy(values).to(batch.device)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        weights, biases, inputs = _engram.tropical_backward(ctx.inputs, ctx.winners, _array(upstream[0]))
        device = upstream[0].device
        return tuple(torch.from_numpy(gradient).to(device) for gradient in (inputs, weights, biases))


class Layer(torch.nn.Module):
    """``y[j] = max(max over i of (x[i] + W[i, j]), b[j])``; only the winner of each output receives a gradient.

    Runs on the CPU in float32. Input: samples x ``inputs``.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.randn(inputs, outputs) * 0.1)
        self.biases = torch.nn.Parameter(torch.full((outputs,), -1.0))

    def forward(self, batch: Any) -> Any:
        """Returns samples x outputs."""
        return LayerFunction.apply(batch, self.weights, self.biases)

    def extra_repr(self) -> str:
        """Returns the sizes."""
        return f"inputs={self.weights.shape[0]}, outputs={self.weights.shape[1]}"
