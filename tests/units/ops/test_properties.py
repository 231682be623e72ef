"""Promise: ops do what their traits say, by float64 runs of the calls that the samples of OpInfo make."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from recorded import Recorded, calls, calls_by_operator, copied, is_dense
from torch.utils._pytree import tree_leaves

from ampcheck.ops.table import ROWS
from ampcheck.ops.traits import traits

pytestmark = pytest.mark.filterwarnings("ignore")

UNKNOWN = set(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _batch_norm_with_update _chunk_cat _ctc_loss
    _embedding_bag_forward_only _fft_c2c _fft_c2r _fft_r2c _histogramdd_bin_edges _linalg_check_errors _linalg_det
    _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd _native_batch_norm_legit _pdist_forward _safe_softmax
    _softmax_backward_data _sparse_mm_reduce_impl _to_sparse _trilinear _unsafe_masked_index
    _unsafe_masked_index_put_accumulate _upsample_bilinear2d_aa _upsample_nearest_exact1d adaptive_max_pool2d
    adaptive_max_pool3d allclose avg_pool2d avg_pool3d binary_cross_entropy binary_cross_entropy_with_logits
    bincount block_diag cholesky cholesky_inverse cholesky_solve complex cummax cummin dist embedding_renorm eye
    fractional_max_pool2d fractional_max_pool3d gcd geqrf glu grid_sampler_2d grid_sampler_3d hardswish hash_tensor
    histc huber_loss im2col index_reduce lcm linalg_cholesky_ex linalg_cross linalg_eig linalg_householder_product
    linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_lu_solve
    linalg_matrix_exp linalg_pinv linalg_qr linalg_solve_triangular log_sigmoid_forward logspace lu_unpack
    max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices max_unpool2d max_unpool3d mish
    mode mse_loss multi_margin_loss multilabel_margin_loss_forward nanmedian nll_loss2d_forward nll_loss_forward
    nonzero_static ormqr polar put renorm repeat_interleave scatter_reduce segment_reduce smooth_l1_loss
    soft_margin_loss sparse_sampled_addmm threshold torch_nn::_linear_cross_entropy_batch_chunked
    torch_nn::_linear_cross_entropy_batch_chunked_no_reduction trace triangular_solve tril_indices triu_indices
    unfold_backward unsafe_split upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
    upsample_nearest2d upsample_trilinear3d vdot
    """.split()
)
"""Ops of OpInfo, in place or not, of which neither schema, tags nor table say anything."""


def test_every_op_of_opinfo_has_traits_or_is_unknown() -> None:
    bases = {traits(op).base: traits(op) for by_op in calls_by_operator().values() for op in by_op}
    derived = {n for n, t in bases.items() if t.view or t.pointwise or t.reduces or t.random or t.moves or t.shaped}
    unknown = {name for name, t in bases.items() if name not in derived and name not in ROWS and not t.contracts}
    assert unknown - UNKNOWN == set()
    assert UNKNOWN & derived == UNKNOWN & ROWS.keys() == set()


def broken(holds: Callable[[Recorded], Iterator[bool]]) -> tuple[set[str], set[str]]:
    """The ops for which a property was asked, and those for which it does not hold for some call."""
    asked, wrong = set(), set()
    for call in calls():
        try:
            answers = list(holds(call))
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue  # such values are refused
        if answers:
            asked.add(call.traits.base)
        if not all(answers):
            wrong.add(call.traits.name)
    return asked, wrong


def equal(a: Any, b: Any) -> bool:
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(torch.allclose(x, y, rtol=1e-9, atol=1e-9, equal_nan=True) for x, y in pairs)


def floats_of(call: Recorded) -> list[int]:
    return [i for i, value in enumerate(call.args) if is_dense(value)]


def functional(call: Recorded) -> bool:
    return not (call.traits.writes or call.traits.foreach)


def test_a_pointwise_op_commutes_with_a_permutation_of_the_elements() -> None:
    def holds(call: Recorded) -> Iterator[bool]:
        at = [i for i, value in enumerate(call.args) if isinstance(value, torch.Tensor) and value.numel() != 1]
        shapes = {call.args[i].shape for i in at}
        if not call.traits.pointwise or not functional(call) or len(shapes) != 1:
            return
        out, order = call.run(), torch.randperm(call.args[at[0]].numel())
        if isinstance(out, torch.Tensor) and {out.shape} == shapes:
            permuted = call.run(**{f"_{i}": call.args[i].reshape(-1)[order].view(out.shape) for i in at})
            yield equal(permuted, out.reshape(-1)[order].view(out.shape))

    asked, wrong = broken(holds)
    assert len(asked) > 80
    assert wrong == set()


def test_what_moves_has_no_other_elements_than_its_arguments_and_constants() -> None:
    def holds(call: Recorded) -> Iterator[bool]:
        adds = call.argument("accumulate", False) or call.argument("reduce", None)
        if not call.traits.moves or adds or not all(is_dense(t) for t in tree_leaves(call.run())):
            return
        known = torch.cat([torch.zeros(1), torch.ones(1)]).double()
        for value in tree_leaves((call.args, call.kwargs)):
            if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and not value.is_complex()):
                known = torch.cat([known, torch.as_tensor(value, dtype=torch.float64).abs().reshape(-1)])
        yield from (bool(torch.isin(t.abs(), known).all()) for t in tree_leaves(call.run()))

    asked, wrong = broken(holds)
    assert len(asked) > 40
    assert wrong == set()


def test_whole_numbers_give_whole_numbers() -> None:
    def holds(call: Recorded) -> Iterator[bool]:
        numbers = [v for v in tree_leaves((call.args, call.kwargs)) if isinstance(v, float)]
        if not call.traits.whole or not all(v.is_integer() or not math.isfinite(v) for v in numbers):
            return
        whole = {f"_{i}": torch.randint(1, 9, call.args[i].shape).double() for i in floats_of(call)}
        out = [t for t in tree_leaves(call.run(**whole)) if is_dense(t)]
        lists = any(isinstance(v, (list, tuple)) and any(map(is_dense, v)) for v in call.args)
        yield from (bool((t == t.round()).all()) for t in out if whole and not lists)

    asked, wrong = broken(holds)
    assert len(asked) > 50
    assert wrong == set()


def factor_of(call: Recorded, name: str, position: int) -> Any:
    """What a factor of `Traits.linear` stands for in a call."""
    if name in ("alpha", "-alpha", "beta"):
        value = call.argument(name.removeprefix("-"), 1)
        return -value if name[0] == "-" else value
    if name in ("other", "1/other"):
        other = torch.as_tensor(call.args[1 - position], dtype=torch.float64)
        return other if name == "other" else 1 / other
    if name in ("weight", "1-weight"):
        return call.args[2] if name == "weight" else 1 - call.args[2]
    return float(name)


def test_arguments_enter_with_their_factor_at_the_same_place() -> None:
    def holds(call: Recorded) -> Iterator[bool]:
        selects = call.traits.accumulates and not call.argument("accumulate", False)
        if not functional(call) or selects or call.argument("rounding_mode", None):
            return
        for position, name in enumerate(call.traits.linear):
            value, out = call.args[position], call.run()
            if is_dense(value) and is_dense(out) and value.shape == out.shape and name != "0":
                more = torch.randn(value.shape, dtype=value.dtype)
                grown = call.run(**{f"_{position}": value + more})
                yield equal(grown - out, factor_of(call, name, position) * more)

    asked, wrong = broken(holds)
    linear = {name for name, row in ROWS.items() if "linear" in row}
    assert asked >= linear - {"copy", "_to_copy"}  # OpInfo has no functional copy, and casts that change no dtype
    assert wrong == set()


def test_a_product_is_linear_in_each_factor() -> None:
    def holds(call: Recorded) -> Iterator[bool]:
        for position in call.traits.factors if functional(call) else ():
            value = call.args[position]
            if is_dense(value):
                other = torch.randn(value.shape, dtype=value.dtype)
                none, first, second, both = (
                    call.run(**{f"_{position}": v}) for v in (value * 0, value, other, value + other)
                )
                yield equal(both - none, first - none + second - none)

    asked, wrong = broken(holds)
    assert asked == {name for name, row in ROWS.items() if "factors" in row} - {"_scaled_mm"}
    assert wrong == set()


def test_zero_makes_what_divides_infinite_or_nan() -> None:
    def holds(call: Recorded) -> Iterator[bool]:
        names = [argument.name for argument in call.op._schema.arguments]
        for position in (names.index(name) for name in call.traits.divides if functional(call)):
            if is_dense(call.args[position]):
                yield not bool(call.run(**{f"_{position}": call.args[position] * 0}).isfinite().any())

    asked, wrong = broken(holds)
    assert asked == {"div", "addcdiv", "reciprocal", "rsqrt"}
    assert wrong == set()


def test_a_copy_has_the_values_of_what_it_copies() -> None:
    def holds(call: Recorded) -> Iterator[bool]:
        position = call.traits.copies
        if position is not None and not call.traits.foreach and is_dense(out := call.run()):
            yield equal(out, call.args[position].to(out.dtype).expand(out.shape))

    asked, wrong = broken(holds)
    assert asked == {"clone", "_to_copy", "copy"}
    assert wrong == set()


def test_what_fills_writes_a_constant() -> None:
    def holds(call: Recorded) -> Iterator[bool]:
        if call.traits.fills in ("units", "number"):
            out = call.run()
            yield out.numel() == 0 or bool((out == out.reshape(-1)[0]).all())
            yield call.traits.fills != "units" or bool(((out == 0) | (out == 1)).all())

    asked, wrong = broken(holds)
    assert asked >= {"zeros_like", "ones_like", "new_zeros", "new_full", "full_like", "fill", "zero"}
    assert wrong == set()


def test_what_is_shaped_does_not_read_values() -> None:
    def holds(call: Recorded) -> Iterator[bool]:
        if call.traits.shaped and not call.traits.unset and is_dense(call.args[0]):
            yield equal(call.run(), call.run(_0=call.args[0] + 1))

    asked, wrong = broken(holds)
    assert len(asked) > 4
    assert wrong == set()


def test_what_resets_does_not_build_on_the_values_before() -> None:
    def holds(call: Recorded) -> Iterator[bool]:
        if call.traits.resets and call.traits.writes and is_dense(call.args[0]):
            yield equal(call.run(), call.run(_0=call.args[0] + 1))

    asked, wrong = broken(holds)
    assert asked >= {"copy", "fill", "zero"}
    assert wrong == {"masked_fill_"}  # but for the elements that its mask leaves alone


def test_no_other_arguments_change_than_those_that_are_written() -> None:
    asked = set()
    for call in calls():
        args = list(copied(call.args))
        before = copied(args)
        try:
            call.op(*args, **copied(call.kwargs))
        except (RuntimeError, TypeError, ValueError):
            continue
        written = {position for position, _ in call.traits.writes}
        for position, (old, new) in enumerate(zip(before, args, strict=True)):
            same = partial(torch.allclose, equal_nan=True)
            changed = is_dense(old) and old.shape == new.shape and not same(old, new)
            assert not changed or position in written, call.op
            asked.add((call.traits.base, position) if changed else None)
    assert {("native_batch_norm", 3), ("native_batch_norm", 4), ("copy", 0), ("mul", 0)} <= asked


@pytest.mark.parametrize("name", "mm bmm mv dot addmm addmv baddbmm".split())
def test_the_last_dimension_is_the_length_of_the_sums(name: str) -> None:
    shapes = {"mm": ((2, 5), (5, 3)), "bmm": ((4, 2, 5), (4, 5, 3)), "mv": ((2, 5), (5,)), "dot": ((5,), (5,))}
    product = name.removeprefix("add").removeprefix("badd")
    operands = [torch.ones(shape) for shape in shapes[product]]
    op = getattr(torch.ops.aten, name).default
    assert traits(op).terms == "last"
    args = operands if product == name else [torch.zeros(()), *operands]
    assert bool((op(*args) == operands[0].shape[-1]).all())
