"""Ten planted faults of ten classes, mended with nothing but `ampcheck guide`, `lint`, `audit`, `watch` and `show`.

    python benchmarks/agents.py --json reports/evidence/agents.json

Each fault is a file without its comments, its docstrings and what its mended twin alone needs. The first audit, what
`show` says of its first finding, the edit and the second audit, which is the same command, stand in
reports/evidence/agents.md. An agent made the edits that knew nothing of ampcheck, and read these files and what its
commands print, nothing else: ten edits, each with one audit before and one after. Most sources lie in ../shared.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _evidence import write_evidence

ROOT = Path(__file__).resolve().parents[1]


HINTS = ("fixed", "healthy", "manifests", "_count")
HANDWRITTEN = """
def enter(data, dtype):
    return data.to(dtype)

def wide(dtype):
    return torch.float32

def autocast(dtype):
    return torch.autocast('cpu', dtype)
"""
"""What stands for the package of the handwritten cases."""

WATCH = """
import ampcheck
import subject

with ampcheck.watch() as seen:
    subject.buggy()["run"]()
seen.run.save("run.json")
"""


@dataclass(frozen=True)
class Fault:
    """kind: the class. source: the file of the fault. edits: what replaces what. options: of the audit; with `watch` a
    script runs in its place. flags: what tells the fault from its mended twin. case: the function of a handwritten case
    and its dtype."""

    kind: str
    source: str
    edits: tuple[tuple[str, str], ...]
    options: str = ""
    watch: bool = False
    target: str = "buggy"
    flags: Mapping[str, bool] = field(default_factory=dict)
    case: tuple[str, str] = ("", "")

    @property
    def command(self) -> list[str]:
        """What judges it."""
        if self.watch:
            return [sys.executable, "watched.py"]
        options = [*self.options.split(), "--json", "run.json"]
        return [sys.executable, "-m", "ampcheck", "audit", f"subject.py:{self.target}", *options]


CORPUS, REPORTED = "../shared/corpus", "../shared/reported"
FAULTS = (
    Fault(
        "overflow",
        f"{CORPUS}/ovf_mask_finfo_min_plus_score.py",
        (
            (
                "        bias = causal.to(scores.dtype) * mn + pad[:, None, :].to(scores.dtype) * mn\n"
                "        return (scores + bias).softmax(-1)",
                "        mask = causal | pad[:, None, :]\n        return scores.masked_fill(mask, mn).softmax(-1)",
            ),
        ),
        flags={"where": False, "self.where": False},
    ),
    Fault(
        "vanished eps",
        "tests/handwritten/losses.py",
        ((".softmax(-1)", ".softmax(-1, dtype=wide(dtype))"),),
        case=("log_of_p_plus_1e8", "float16"),
    ),
    Fault(
        "cancellation",
        f"{CORPUS}/prec_cumsum_log_decay.py",
        (
            ("log_a.cumsum(-1)", "log_a.float().cumsum(-1)"),
            (".exp()", ".exp().to(log_a.dtype)"),
        ),
        flags={"upcast": False, "self.up": False},
    ),
    Fault(
        "positions in 16 bits",
        "tests/handwritten/positions.py",
        (
            (
                "        angle = position[:, None].to(self.inv_freq.dtype) @ self.inv_freq[None, :]",
                "        with torch.autocast(position.device.type, enabled=False):\n"
                "            angle = position[:, None].to(self.inv_freq.dtype) @ self.inv_freq[None, :]",
            ),
        ),
        case=("rotary_under_autocast", "bfloat16"),
    ),
    Fault(
        "average in 16 bits",
        f"{CORPUS}/bfs_ema_in_bf16.py",
        (("1.0, dtype=dtype)", "1.0, dtype=torch.float32)"), (".to(dtype), 0.001", ".to(ema.dtype), 0.001")),
    ),
    Fault(
        "order of scaler calls",
        f"{CORPUS}/gsc_unscale_update_each_microbatch.py",
        (
            (
                "        scaler.unscale_(opt)\n        if not last:\n            scaler.update()\n        if last:\n",
                "        if last:\n            scaler.unscale_(opt)\n",
            ),
        ),
        flags={"per_micro": True},
    ),
    Fault(
        "loop inside autocast",
        f"{CORPUS}/acm_train_loop_inside_autocast.py",
        (
            (
                "with contextlib.nullcontext():",
                "with torch.autocast('cpu', torch.bfloat16):",
            ),
            (
                "        with torch.autocast('cpu', torch.bfloat16):\n            return [inner()",
                "        return [inner()",
            ),
        ),
        watch=True,
        flags={"outer": True},
    ),
    Fault(
        "op banned on CUDA",
        f"{REPORTED}/scripts/banned_on_cuda.py",
        ((", nn.Sigmoid())", ")"), ("binary_cross_entropy(", "binary_cross_entropy_with_logits(")),
        options="--device cuda",
        target="main",
    ),
    Fault(
        "graph break",
        f"{CORPUS}/cmp_isinf_branch_graph_break.py",
        (
            (
                "        if torch.isinf(h).any():\n            h = h.clamp(-lim, lim)\n",
                "        h = torch.where(torch.isinf(h).any(), h.clamp(-lim, lim), h)\n",
            ),
        ),
        flags={"branch": True, "self.branch": True},
    ),
    Fault(
        "weights untied by a cast",
        f"{REPORTED}/training/c18_untied_by_cast.py",
        (
            (
                "    model.head.float()\n"
                "    model.head.weight = nn.Parameter(model.head.weight.detach().clone().float())\n"
                "    model.embed.weight = nn.Parameter(model.embed.weight.detach().bfloat16())\n"
                "    named['embed.weight'] = model.embed.weight\n",
                "",
            ),
            (
                "return self.head(h.to(self.head.weight.dtype))",
                "return nn.functional.linear(h.float(), self.head.weight.float())",
            ),
        ),
        flags={"untie": True, "self.wide": False},
    ),
)


class Folded(ast.NodeTransformer):
    """Replaces flags by their values, and removes the branches that are then never taken."""

    def __init__(self, flags: Mapping[str, bool]) -> None:
        self.flags = flags

    def visit_Name(self, node: ast.Name | ast.Attribute) -> ast.AST:
        """The value of a flag."""
        if isinstance(node.ctx, ast.Load) and (name := ast.unparse(node)) in self.flags:
            return ast.Constant(self.flags[name])
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """The value of a flag that an object has."""
        return self.visit_Name(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> Any:
        """The branch that is taken."""
        self.generic_visit(node)
        if not isinstance(node.test, ast.Constant):
            return node
        return node.body if node.test.value else node.orelse

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        """The side that is taken."""
        return self.visit_If(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """`not True or x` as `x`."""
        self.generic_visit(node)
        left = [value for value in node.values if ast.unparse(value) != "not True"]
        return left[0] if len(left) == 1 else node


def planted(fault: Fault) -> str:
    """The source of a fault without comments, docstrings and its mended twin."""
    tree = ast.parse((ROOT / fault.source).read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not _is_left_out(node)]
    tree = Folded(fault.flags).visit(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    name, dtype = fault.case
    if not name:
        return ast.unparse(tree) + "\n"
    function = next(node for node in tree.body if getattr(node, "name", "") == name)
    parts = [node.id for each in function.decorator_list for node in ast.walk(each) if isinstance(node, ast.Name)]
    function.decorator_list = []
    own = [node for node in tree.body if node is function or getattr(node, "name", "-") in parts]
    imports = "import torch\nfrom torch import nn\n"
    body = "\n\n".join(ast.unparse(node) for node in own)
    return f"{imports}{HANDWRITTEN}\n{body}\n\ndef buggy():\n    return lambda: {name}(torch.{dtype})\n"


def _is_left_out(node: ast.stmt) -> bool:
    named = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in HINTS
    return named or (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))


def mended(fault: Fault, source: str) -> str:
    """The source after the edits. Raises `ValueError` where it lacks what they replace."""
    for before, after in fault.edits:
        if source.count(before) != 1:
            raise ValueError(f"{fault.source} must contain once:\n{before}")
        source = source.replace(before, after)
    return source


def judged(fault: Fault, folder: Path, source: str) -> dict[str, Any]:
    """The verdict of the file, as the command and `show` say it."""
    (folder / "subject.py").write_text(source, encoding="utf-8")
    (folder / "watched.py").write_text(WATCH.lstrip(), encoding="utf-8")
    (folder / "run.json").unlink(missing_ok=True)
    lint = run([sys.executable, "-m", "ampcheck", "lint", "subject.py"], folder)
    code = run(fault.command, folder).returncode
    answer = json.loads(shown(folder, "--json"))
    first = next((f for f in answer["findings"] if f["verdict"] == "fail"), None)
    text = shown(folder, "finding", str(first["number"])) if first else ""
    rules = [line.split(": ")[1].split()[0] for line in lint.stdout.splitlines() if ": AMP" in line]
    place = {"check": first["check"], "where": first["where"]} if first else {}
    verdict = {"code": code, "verdict": answer["verdict"], "counts": answer["counts"]}
    return {**verdict, "lint": rules, "first": place, "text": text}


def shown(folder: Path, *words: str) -> str:
    """What `ampcheck show` prints. Raises `RuntimeError` where it answers nothing."""
    done = run([sys.executable, "-m", "ampcheck", "show", "run.json", *words], folder)
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"ampcheck show {words} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A command in the folder of a fault."""
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


def tried(fault: Fault) -> dict[str, Any]:
    """A fault before and after its edits."""
    source = planted(fault)
    changed = mended(fault, source)
    with tempfile.TemporaryDirectory() as name:
        before, after = judged(fault, Path(name), source), judged(fault, Path(name), changed)
    diff = difflib.unified_diff(source.splitlines(), changed.splitlines(), "subject.py", "subject.py", n=1, lineterm="")
    command = "python watched.py" if fault.watch else shlex.join(["ampcheck", *fault.command[3:]])
    return {
        "class": fault.kind,
        "source": fault.source,
        "command": command,
        "before": before,
        "after": after,
        "diff": [*diff],
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The trial as Markdown."""
    proved = sum(bool(row["before"]["counts"].get("fail")) and not row["after"]["counts"].get("fail") for row in rows)
    lines = [
        f"{proved} of {len(rows)} planted faults fail at first, and nothing fails after the edit, by the same command.",
        "An agent made the edits that knew nothing of ampcheck, from the files and from what its commands print.",
        "",
        "| class | source | first verdict | lint | finding 1 | second verdict |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        first, before = row["before"]["first"], row["before"]
        where = first.get("where", {})
        place = ", ".join(
            filter(None, (where.get("module"), where.get("op"), f"{where.get('file')}:{where.get('line')}"))
        )
        named = place if where.get("file") else where.get("module", "nowhere")
        cells = (row["class"], Path(row["source"]).name, before["verdict"], ", ".join(before["lint"]) or "nothing")
        cells += (f"`{first.get('check', 'none')}` at {named}", row["after"]["verdict"])
        lines.append(f"| {' | '.join(cells)} |")
    for row in rows:
        lines += ["", f"## {row['class']}", "", f"`{row['command']}`, then `ampcheck show run.json finding 1`:", ""]
        lines += ["```text", *row["before"]["text"].splitlines(), "```", "", "```diff", *row["diff"], "```"]
    return lines


def main() -> int:
    """Try all; 1 if one is not proved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the evidence, and a table beside it")
    options = parser.parse_args()
    rows = []
    for fault in FAULTS:
        rows.append(tried(fault))
        print(f"{fault.kind}: {rows[-1]['before']['verdict']} -> {rows[-1]['after']['verdict']}", flush=True)
    write_evidence(options.json, {"faults": rows}, table(rows))
    return int(any(not row["before"]["counts"].get("fail") or row["after"]["counts"].get("fail") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
