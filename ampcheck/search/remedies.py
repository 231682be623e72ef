"""What mends each kind of failure; for a value that is not finite, by the family of the op that made it so."""

from __future__ import annotations

from ampcheck.search import stats as kinds

_FLOAT32 = "or compute this part in float32"

_EPS = "use a larger eps, one that the format holds (at least torch.finfo(dtype).smallest_normal)"

_SUMS = "divide before summing"

_FAMILIES = {
    "take the logarithm in one step (logsigmoid, log_softmax)": "sigmoid _softmax",
    "subtract the largest before exp": "exp exp2 expm1 cosh sinh",
    "scale before squaring or multiplying": "pow square mul mul_ prod cumprod",
    _SUMS: "sum mean cumsum add add_ sub sub_ linalg_vector_norm norm addcmul",
    "keep what is divided by, or goes into the logarithm, away from zero by an eps that the format holds (at least "
    "torch.finfo(dtype).smallest_normal)": "div div_ reciprocal rsqrt log log2 log10 logit atanh addcdiv",
    "scale an operand before the product": "mm addmm bmm baddbmm addbmm mv dot convolution linear "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention",
    "scale before the cast, or cast to bfloat16": "_to_copy copy_",
    "take the lowest value of a mask from torch.finfo(x.dtype).min": "masked_fill masked_fill_ where",
}

_BY_OP = {op: text for text, ops in _FAMILIES.items() for op in ops.split()}

_BY_KIND = {
    kinds.RAISES: "make the operands' dtypes meet, and take constants from torch.finfo(x.dtype)",
    kinds.NONFINITE: "subtract the largest before exp, scale before squaring, use an eps that the format holds, "
    + _FLOAT32,
    kinds.RANGE: "declare smaller inputs, scale the result, or give it in float32 or bfloat16",
    kinds.ACCURACY: "use the stable form (log1p, expm1, logsumexp, a two-pass variance), or compute this part in "
    "float32",
    kinds.DECISION: "decide upon float32 values",
    kinds.COMPILED: (
        "run torch.compile(model, backend='aot_eager'): if the error remains, tracing makes it, otherwise Inductor"
    ),
}


def remedy(kind: str, op: str, *, vanished: bool = False) -> str:
    """One sentence; "" where nothing general helps.

    kind: of `ampcheck.search.stats.Problem`. op: the overload to blame (`aten::exp`), "" where it is not known.
    vanished: see `Problem`.
    """
    name = op.rpartition("::")[2].partition(".")[0]
    if kind == kinds.NONFINITE and name in _BY_OP:
        return f"{_EPS if vanished and _BY_OP[name] == _SUMS else _BY_OP[name]}, {_FLOAT32}"
    return _BY_KIND.get(kind, "")
