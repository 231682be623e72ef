"""The table of traits: what neither the schemas nor the tags of PyTorch say, one row per op or group of like ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _value(trait: str, text: str) -> Any:
    """The value of a word such as `linear=1,alpha`."""
    kind = {"copies": int, "factors": int, "degree": float}.get(trait, str)
    values = tuple(map(kind, text.split(",")))
    return values if trait in ("divides", "factors", "linear", "updates") else values[0]


TABLE = """
# Sums, multiples and copies ----
add                            | adds linear=1,alpha whole rescues
sub                            | adds linear=1,-alpha whole rescues
rsub                           | adds linear=-alpha,1 whole
lerp                           | adds linear=1-weight,weight
addcmul                        | adds linear=1
addcdiv                        | adds linear=1 divides=tensor2
index_add scatter_add          | linear=1 degree=1
addr                           | linear=beta
mul                            | linear=other,other factors=0,1 whole
div                            | linear=1/other divides=other
reciprocal                     | divides=self degree=-1
rsqrt                          | divides=self degree=-0.5
sqrt                           | degree=0.5
square                         | degree=2
neg                            | linear=-1 moves
clone                          | linear=1 copies=0 places
_to_copy                       | linear=1 copies=0 whole decides=cast
copy                           | linear=0,1 copies=1 whole pointwise resets
# Contractions, and the dimension that is the length of their sums ----
mm bmm mv dot                  | contracts terms=last factors=0,1 whole
addmm baddbmm                  | contracts terms=last factors=1,2 whole linear=beta
addmv                          | contracts terms=last factors=1,2 linear=beta
addbmm                         | contracts factors=1,2 linear=beta keeps
_scaled_mm                     | contracts terms=last factors=0,1
_grouped_mm                    | contracts
convolution                    | contracts terms=kernel factors=0,1 autocast=conv2d
convolution_backward           | contracts
_scaled_dot_product_flash_attention_for_cpu | autocast=scaled_dot_product_attention
_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention | autocast=scaled_dot_product_attention
# Reductions ----
sum                            | reduces sums whole degree=1
mean nansum                    | reduces sums degree=1
aminmax linalg_vector_norm norm std std_mean | reduces degree=1
var                            | reduces degree=2
all any count_nonzero powsum prod var_mean | reduces
logsumexp                      | reduces promotes
amax amin                      | reduces whole degree=1
cumsum                         | terms=dim whole degree=1
cumprod logcumsumexp           | terms=dim
_softmax                       | terms=dim autocast=softmax.int
_log_softmax                   | terms=dim autocast=log_softmax.int
# Decisions, and where a derivative jumps ----
lt le gt ge                    | decides=order
eq ne                          | decides=equality
isnan isinf isfinite isposinf isneginf | decides=finite
_unique _unique2 unique_dim unique_consecutive isin | decides=identity
searchsorted bucketize         | decides=bin
argmax argmin                  | reduces decides=best
max                            | reduces decides=extreme whole rescues degree=1
min                            | reduces decides=extreme whole degree=1
topk sort                      | decides=selection whole degree=1
kthvalue median                | decides=selection degree=1
nonzero                        | decides=support
floor ceil round trunc         | decides=integer jumps whole
floor_divide                   | decides=quotient jumps whole
sign                           | jumps kink=zero
sgn                            | kink=zero
fix heaviside nextafter histogram _histogramdd_from_bin_cts _histogramdd_from_bin_tensors _amp_update_scale | jumps
dequantize choose_qparams_optimized _dyn_quant_matmul_4bit fake_quantize_per_tensor_affine_cachemask | jumps
fake_quantize_per_channel_affine_cachemask _fake_quantize_learnable_per_tensor_affine quantized::linear | jumps
_fake_quantize_learnable_per_channel_affine _fake_quantize_per_tensor_affine_cachemask_tensor_qparams | jumps
_fused_moving_avg_obs_fq_helper _fused_moving_avg_obs_fq_helper_functional quantized::linear_dynamic | jumps
quantized::linear_relu_dynamic quantized::linear_dynamic_fp16 quantized::conv2d quantized::batch_norm2d | jumps
abs                            | moves kink=zero degree=1
threshold_backward             | moves kink=zero
leaky_relu_backward hardtanh_backward | kink=zero
grid_sampler_2d_backward grid_sampler_3d_backward | kink=pixel
remainder fmod frac            | keeps
# Limits ----
clamp clamp_min                | whole rescues keeps limits
maximum                        | whole rescues limits
clamp_max                      | whole keeps limits
minimum                        | whole limits
exp exp2 sigmoid cos cosh      | lifts
where                          | moves rescues limits
relu                           | moves degree=1
leaky_relu                     | degree=1
hardtanh                       | moves limits
copysign                       | moves
# Elements in other places ----
cat stack index index_select gather take repeat flip roll rot90 embedding masked_select _unsafe_index | places
constant_pad_nd                | places fills=part
reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d | places
slice_scatter select_scatter diagonal_scatter as_strided_scatter slice_backward select_backward | places
split_copy unbind_copy _reshape_copy _unsafe_view contiguous pixel_shuffle pixel_unshuffle channel_shuffle | places
scatter masked_scatter _unsafe_index_put index_copy tril triu diag_embed | moves
index_put                      | moves linear=1
# Constants, and memory without values ----
fill                           | moves fills=number pointwise resets
zero                           | moves fills=units pointwise resets
masked_fill                    | moves fills=part resets
index_fill                     | moves fills=part
zeros zeros_like new_zeros ones ones_like new_ones | moves fills=units
full full_like new_full scalar_tensor | whole fills=number
arange linspace range          | whole fills=range
empty empty_like empty_strided new_empty new_empty_strided empty_permuted | unset
resize                         | unset resets
set normal uniform             | resets
# Other facts ----
_local_scalar_dense is_nonzero equal | leaves
_add_relu                      | promotes
native_layer_norm              | autocast=layer_norm
native_group_norm              | autocast=group_norm
_fused_rms_norm                | autocast=rms_norm
_prelu_kernel                  | autocast=prelu
_cdist_forward                 | autocast=cdist
native_batch_norm cudnn_batch_norm miopen_batch_norm batch_norm_update_stats | updates=running_mean,running_var
_fused_adam _fused_adamw       | divides=exp_avg_sqs,max_exp_avg_sqs
_fused_adagrad                 | divides=state_sums
"""
"""Names of ops without `_foreach_` and `_`, and the traits of all their overloads, which `Traits` explains."""


def rows_of(table: str) -> Mapping[str, Mapping[str, Any]]:
    """The rows by the names of the ops; a word without a value is a fact."""
    rows: dict[str, Mapping[str, Any]] = {}
    for line in table.splitlines():
        names, _, words = line.partition("|")
        row: dict[str, Any] = {}
        for word in words.split():
            trait, _, text = word.partition("=")
            row[trait] = _value(trait, text) if text else True
        rows |= dict.fromkeys(names.split() if row else (), row)
    return rows


ROWS = rows_of(TABLE)
