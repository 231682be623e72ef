"""A run such as an audit of two small models yields; `python sample_run.py PAGE.html` draws it."""

from __future__ import annotations

import math
import random
import sys
from xml.etree import ElementTree

from ampcheck.core.run import Band, Chart, Coverage, Finding, Run, Series, Table, Verdict, Where

FLOAT16 = (Band("float16 subnormal", -24, -14), Band("float16 normal", -14, 16))
BFLOAT16 = (Band("bfloat16 subnormal", -133, -126), Band("bfloat16 normal", -126, 128))
CHECKS = ("overflow", "flush", "headroom", "precision-loss", "low-precision-error", "loss-dtype", "coverage")
MODES = ("float16", "float16, compiled", "bfloat16", "bfloat16, compiled")

PROBLEMS = {
    ("tiny-gpt (float16)", "overflow"): Finding(
        "overflow", Verdict.FAIL, "tiny-gpt (float16)",
        "no op may turn finite inputs into inf or NaN: aten::mul in blocks.3.mlp.act gave inf for 12 of 16,384 values; "
        "the largest input was 5.21e4 and float16 ends at 65,504",
        Where("forward", "blocks.3.mlp.act", "aten::mul.Tensor", "models/tiny_gpt.py", 118),
        observed=math.inf, limit=65504.0,
        hint="compute the activation under torch.autocast(enabled=False) in float32, or scale the input down",
    ),
    ("tiny-gpt (float16, compiled)", "overflow"): Finding(
        "overflow", Verdict.FAIL, "tiny-gpt (float16, compiled)",
        "no op may turn finite inputs into inf or NaN: the fused kernel of blocks.3.mlp.act gave inf for 12 values",
        Where("forward", "blocks.3.mlp.act", "aten::mul.Tensor", "models/tiny_gpt.py", 118),
        observed=math.inf, limit=65504.0, hint="as in eager: the graph keeps the overflow",
    ),
    ("tiny-gpt (float16)", "flush"): Finding(
        "flush", Verdict.WARN, "tiny-gpt (float16)",
        "at most 1 % of the non-zero gradients may fall below the smallest subnormal; 3.2 % of tok_emb.weight did",
        Where("backward", "tok_emb", "aten::embedding_dense_backward", "models/tiny_gpt.py", 61),
        observed=3.17, limit=1.0, unit="%", hint="raise the loss scale by at least 2^5, or use bfloat16",
    ),
    ("resnet-mini (bfloat16)", "low-precision-error"): Finding(
        "low-precision-error", Verdict.FAIL, "resnet-mini (bfloat16)",
        "the error against float64 may be at most 4 times that of rounding; it was 11.4 times in layer4.1.bn2",
        Where("forward", "layer4.1.bn2", "aten::native_batch_norm", "models/resnet.py", 87),
        observed=11.43, limit=4.0, unit="×", hint="keep batch norm in float32: do not call model.bfloat16()",
    ),
    ("resnet-mini (float16, compiled)", "headroom"): Finding(
        "headroom", Verdict.WARN, "resnet-mini (float16, compiled)",
        "the largest value should stay 2 powers of two below the maximum; layer3.0.conv2 left 1.1",
        Where("forward", "layer3.0.conv2", "aten::convolution", "models/resnet.py", 44, step=3),
        observed=1.1, limit=2.0, unit="powers of two", hint="normalise before the convolution",
    ),
    ("resnet-mini (bfloat16, compiled)", "precision-loss"): Finding(
        "precision-loss", Verdict.UNDECIDED, "resnet-mini (bfloat16, compiled)",
        "the interval of the error, 1.9e-3 to 6.1e-3, contains the limit: run more samples",
        Where("forward"), observed=3.9e-3, limit=4e-3,
    ),
}  # fmt: skip


def parsed(drawing: str) -> ElementTree.Element:
    """A drawn chart as elements."""
    return ElementTree.fromstring(f"<div>{drawing}</div>")


def texts(drawing: str) -> list[str]:
    """The texts of a chart."""
    return [element.text for element in parsed(drawing).iter() if element.text]


def sample_run() -> Run:
    """Two models in two formats, eager and compiled: failures, warnings, evidence; the same at every call."""
    rng = random.Random(7)
    findings = []
    for model in ("tiny-gpt", "resnet-mini"):
        for mode in MODES:
            subject = f"{model} ({mode})"
            findings += [PROBLEMS.get((subject, check)) or _plain_finding(check, subject) for check in CHECKS]
    return Run(
        title="nightly audit",
        environment={
            "ampcheck": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.2", "device": "cpu (emulating cuda)",
            "torch.backends.cuda.matmul.allow_tf32": False, "torch.backends.cudnn.allow_tf32": True,
            "float32 matmul precision": "highest", "threads": 2, "flush to zero": False, "triton": None,
        },
        findings=tuple(findings),
        coverage=Coverage(
            {"ops": 48213, "tensors": 9120, "elements": 1204331520, "graphs": 4, "steps": 12},
            {"inside a custom Triton kernel": 3, "output of a C++ extension without a meta kernel": 1},
        ),
        tables=(_module_outputs(rng), _losses()),
        charts=(_ranges(rng), _bfloat16_ranges(rng), _loss_scale(rng)),
    )  # fmt: skip


def _plain_finding(check: str, subject: str) -> Finding:
    if check == "loss-dtype" and "compiled" in subject:
        return Finding(check, Verdict.SKIP, subject, "the compiled step returns no loss: nothing to judge")
    observed = {"headroom": (3.4, 2.0, "powers of two"), "flush": (0.021, 1.0, "%")}.get(check, (None, None, ""))
    return Finding(
        check, Verdict.PASS, subject, f"{check} within its limit in 214 tensors", Where("forward"),
        observed=observed[0], limit=observed[1], unit=observed[2],
    )  # fmt: skip


def module_names(count: int) -> list[str]:
    parts = (
        "ln_1",
        "attn.qkv_projection",
        "attn.softmax",
        "attn.output_projection",
        "ln_2",
        "mlp.up",
        "mlp.act",
        "mlp.down",
    )
    return [f"transformer.blocks.{index // len(parts)}.{parts[index % len(parts)]}" for index in range(count)]


def _module_outputs(rng: random.Random) -> Table:
    rows = []
    for index, name in enumerate(module_names(30)):
        amax = 2.0 ** rng.uniform(-3, 15.9)
        rows.append((
            name, "forward", "float16", 16384 * (1 + index % 4), amax, rng.uniform(0, 0.4),
            math.inf if index == 6 else 0.0, 65504 / amax, index != 6,
        ))  # fmt: skip
    columns = ("module", "phase", "dtype", "elements", "amax", "subnormal %", "non-finite", "headroom", "well")
    return Table("module outputs", columns, rows, "overflow", "Largest absolute value of each module's output.")


def _losses() -> Table:
    rows = [("eager", 4.1718, None), ("compiled", 4.1722, 9.6e-5), ("float64", math.nan, -math.inf)]
    return Table("losses", ("run", "loss", "relative difference"), rows)


def _ranges(rng: random.Random) -> Chart:
    series = []
    for index, name in enumerate(module_names(40)):
        for phase, centre, spread in (("forward", rng.uniform(-4, 3), 1.0), ("backward", rng.uniform(-20, -10), 1.4)):
            top = centre + spread * rng.uniform(5, 9)
            x = [centre - spread * 9, centre - spread * 3, centre, centre + spread * 2.5, top]
            if index == 6 and phase == "forward":
                x[4] = math.inf
            if index in (0, 8) and phase == "backward":
                x[0] = -math.inf
            if index == 21 and phase == "backward":
                x = [math.nan] * 5
            series.append(Series(name, x, group=phase))
    return Chart(
        "range", "Values of each module, tiny-gpt (float16)", "absolute value", "", series, FLOAT16 + BFLOAT16,
        "overflow",
        "Thin line: smallest to largest; thick line: 5th to 95th percentile; dot: median. Zero, inf: at the edge.",
    )  # fmt: skip


def _bfloat16_ranges(rng: random.Random) -> Chart:
    series = [
        Series(f"layer{i}.conv", [c - 20, c - 4, c, c + 3, c + 6], group="forward")
        for i, c in ((i, rng.uniform(-6, 0)) for i in range(1, 5))
    ]
    return Chart(
        "range", "Values of each module, resnet-mini (bfloat16)", "absolute value", "", series, BFLOAT16, "flush"
    )


def _loss_scale(rng: random.Random) -> Chart:
    steps = list(range(200))
    scale = [65536.0 / 2 ** (step // 25 % 4) for step in steps]
    loss = [4.2 * math.exp(-step / 80) + rng.uniform(0, 0.1) for step in steps]
    loss[60] = math.nan
    series = (Series("loss scale", steps, scale, "eager"), Series("loss", steps, loss, "eager"))
    return Chart("line", "Loss and loss scale", "step", "value", series)


if __name__ == "__main__":
    from ampcheck.report import write_html

    write_html(sample_run(), sys.argv[1])
