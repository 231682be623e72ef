"""LSTM layers of oneDNN, which has no float64."""

from __future__ import annotations

from typing import Any

import torch

from ampcheck.shadow.call import Call, Side
from ampcheck.shadow.rules.registry import rule


def _run(call: Call, side: Side) -> tuple[list[tuple[Any, ...]], torch.Tensor, torch.Tensor]:
    """The steps of a layer in one direction, its output and its last hidden state.

    Of each step: its time, the state and the cell that it starts from, its four gates and its new cell.
    """
    x, w_x, w_h, b_x, b_h, hx, cx = (side.of(t) for t in call.args[:7])
    biases = call.argument("has_biases")
    projected = torch.nn.functional.linear(x, w_x, b_x if biases else None)
    h, c = hx.reshape(hx.shape[-2:]), cx.reshape(cx.shape[-2:])
    times = range(len(x))
    steps: list[tuple[Any, ...]] = []
    outputs = [h] * len(x)
    for time in reversed(times) if call.argument("reverse") else times:
        i, f, g, o = (projected[time] + torch.nn.functional.linear(h, w_h, b_h if biases else None)).chunk(4, -1)
        gates = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        cell = gates[1] * c + gates[0] * gates[2]
        steps.append((time, h, c, gates, cell))
        h, c = gates[3] * cell.tanh(), cell
        outputs[time] = h
    return steps, torch.stack(outputs), h


@rule("mkldnn_rnn_layer")
def _forward(call: Call, side: Side) -> Any:
    """Outputs, the last hidden state and cell; the workspace is opaque."""
    steps, outputs, h = _run(call, side)
    results = (outputs, h, steps[-1][-1])
    return [*(new.reshape(real.shape) for new, real in zip(results, call.out, strict=False)), None]


@rule("mkldnn_rnn_layer_backward")
def _backward(call: Call, side: Side) -> Any:
    """The gradients of input, weights, biases, hidden state and cell."""
    x, w_x, w_h = (side.of(t) for t in call.args[:3])
    steps, outputs, _ = _run(call, side)
    into = [call.argument(name) for name in ("grad_output", "grad_hy", "grad_cy")]
    of_output, of_h, of_c = (side.of(t) if isinstance(t, torch.Tensor) else None for t in into)
    zero = torch.zeros_like(outputs[0])
    dh = zero if of_h is None else of_h.reshape(zero.shape)
    dc = zero if of_c is None else of_c.reshape(zero.shape)
    of_gates, of_w_h = [zero] * len(steps), torch.zeros_like(w_h)
    for time, h, c, (i, f, g, o), cell in reversed(steps):
        if of_output is not None:
            dh = dh + of_output[time]
        tanh = cell.tanh()
        dc = dc + dh * o * (1 - tanh * tanh)
        parts = dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * tanh * o * (1 - o)
        of_gates[time] = torch.cat(parts, -1)
        of_w_h += of_gates[time].t() @ h
        dh, dc = of_gates[time] @ w_h, dc * f
    gates = torch.stack(of_gates)
    of_bias = gates.sum((0, 1)) if call.argument("has_biases") else gates.new_zeros(gates.shape[-1])
    of_w_x = gates.flatten(0, 1).t() @ x.flatten(0, 1)
    results = (gates @ w_x, of_w_x, of_w_h, of_bias, of_bias.clone(), dh, dc)
    return [new.reshape(real.shape) for new, real in zip(results, call.out, strict=True)]
