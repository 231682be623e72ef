"""Values as code to paste: after `import torch` the text gives the same tensor, bit for bit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from hypothesis.vendor.pretty import RepresentationPrinter

PRINTED = 1024
"""Elements up to which Hypothesis prints a tensor in full; it warns of what is longer than some 30,000 characters."""


def as_code(value: object) -> str:
    """Python code that makes `value` again where torch is imported.

    Tensors keep dtype, shape, strides, memory format, device and `requires_grad`; numbers are as short as their dtype
    allows. Tuples, lists, dictionaries, numbers, strings, None, dtypes and devices are supported; anything else gives
    its `repr`.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "torch.nan" if math.isnan(value) else "torch.inf" if value > 0 else "-torch.inf"
    if isinstance(value, complex):
        return f"complex({as_code(value.real)}, {as_code(value.imag)})"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"({', '.join(map(as_code, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(as_code, value))}]"
    if type(value) is dict:
        return "{" + ", ".join(f"{as_code(key)}: {as_code(item)}" for key, item in value.items()) + "}"
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    return repr(value)


def print_tensors_as_code() -> None:
    """Make Hypothesis print tensors of a falsifying example as code; torch's `repr` has four digits and no strides.

    Tensors of more than `PRINTED` elements are named by dtype and shape alone. `hypothesis.vendor.pretty` looks up
    printers by the name of a type, so that torch need not be imported.
    """
    from hypothesis.vendor import pretty

    def show(tensor: torch.Tensor, printer: RepresentationPrinter, cycle: bool) -> None:
        large = tensor.numel() > PRINTED
        printer.text(f"<{tensor.dtype} of shape {tuple(tensor.shape)}>" if large else as_code(tensor))

    for module, name in (("torch", "Tensor"), ("torch.nn.parameter", "Parameter")):
        pretty.for_type_by_name(module, name, show)


def _tensor(tensor: torch.Tensor) -> str:
    import torch

    if tensor.requires_grad:
        return f"{_tensor(tensor.detach())}.requires_grad_()"
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return repr(tensor)
    size, dims = tuple(tensor.shape), tensor.dim()
    options = f"dtype={tensor.dtype}" + (f", device={str(tensor.device)!r}" if tensor.device.type != "cpu" else "")
    if not tensor.numel():
        return f"torch.empty({size}, {options})"
    if tensor.is_contiguous():
        return _dense(tensor, options)
    if dims >= 2 and tensor.transpose(-1, -2).is_contiguous():
        return f"{_dense(tensor.transpose(-1, -2), options)}.transpose(-1, -2)"
    for name, rank in (("channels_last", 4), ("channels_last_3d", 5)):
        if dims == rank and tensor.is_contiguous(memory_format=getattr(torch, name)):
            return f"{_dense(tensor.contiguous(), options)}.contiguous(memory_format=torch.{name})"
    last = sum((n - 1) * stride for n, stride in zip(size, tensor.stride(), strict=True))
    storage = tensor.as_strided((last + 1,), (1,)).clone()
    gaps = torch.ones(last + 1, dtype=torch.bool, device=tensor.device)  # elements that are no part of the tensor
    gaps.as_strided(size, tensor.stride()).fill_(False)
    if bool(gaps.any()):
        storage.masked_fill_(gaps, 0)
    return f"{_dense(storage, options)}.as_strided({size}, {tuple(tensor.stride())})"


def _dense(tensor: torch.Tensor, options: str) -> str:
    import torch

    flat = tensor.reshape(-1)
    if flat.numel() > 4 and not flat.is_complex():
        bits = flat.contiguous().view(torch.uint8).view(flat.numel(), -1)
        if bool((bits == bits[0]).all()):  # by bits: -0.0 equals 0.0, and NaN nothing
            number = _number(flat[0])
            if (
                flat.is_floating_point()
                and bool(flat[0].isfinite())
                and abs(float(number)) > torch.finfo(flat.dtype).max
            ):
                number = repr(float(flat[0].double()))  # torch.full refuses what would have to be rounded down
            return f"torch.full({tuple(tensor.shape)}, {number}, {options})"
    return f"torch.tensor({_nested(tensor)}, {options})"


def _nested(tensor: torch.Tensor) -> str:
    if tensor.dim() == 0:
        return _number(tensor)
    return f"[{', '.join(_nested(part) for part in tensor)}]"


def _number(element: torch.Tensor) -> str:
    """The shortest decimal that torch reads as the same element."""
    import torch

    value = element.double().item() if element.is_floating_point() else element.item()
    if isinstance(value, complex):
        real, imag = torch.view_as_real(element)
        return f"complex({_number(real)}, {_number(imag)})"
    if not isinstance(value, float):
        return repr(value)
    if not math.isfinite(value):
        return as_code(value)
    if value.is_integer() and abs(value) < 1e7:
        return repr(value)
    for digits in range(1, 18):
        text = repr(float(f"{value:.{digits}g}"))
        if torch.tensor(float(text), dtype=element.dtype).double().item() == value:
            return text
    return repr(value)
