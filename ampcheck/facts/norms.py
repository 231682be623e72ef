"""Norms of tensors, of their groups, and of one beside another; complex tensors as real ones, what is not finite as
zero."""

from __future__ import annotations

import torch


def real_parts(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its graph, of a complex one its real and imaginary parts."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def finite_parts(tensor: torch.Tensor) -> torch.Tensor:
    """The same in float64, zero for what is not finite."""
    return real_parts(tensor).double().nan_to_num(0.0, 0.0, 0.0)


def norm(tensor: torch.Tensor) -> float:
    """The Euclidean norm of what is finite."""
    return float(torch.linalg.vector_norm(finite_parts(tensor)))


def group_norms(tensor: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The norms of the groups that span these dimensions, flat; the magnitudes of the elements where there are none."""
    return (torch.linalg.vector_norm(tensor, dim=dims) if dims else tensor.abs()).reshape(-1)


def ratio(part: torch.Tensor, whole: torch.Tensor) -> float:
    """The norm of one tensor relative to that of another."""
    return float(torch.linalg.vector_norm(part)) / max(float(torch.linalg.vector_norm(whole)), 1e-300)


def distance(value: torch.Tensor, reference: torch.Tensor) -> float:
    """The Euclidean distance of two tensors in float64, relative to the reference, absolute where that is zero."""
    reference = reference.detach().double()
    off, size = (float(torch.linalg.vector_norm(t)) for t in (value.detach().to(reference) - reference, reference))
    return off / size if size else off
