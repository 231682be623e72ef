"""Codes of a quantizer as bits and as indices."""

import torch


def to_index(bits: torch.Tensor) -> torch.Tensor:
    """The index of each row of bits, the lowest first."""
    return (bits @ 2.0 ** torch.arange(bits.shape[-1])).long()
