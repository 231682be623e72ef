"""Each rule reports the mistake that it is for, at its line, and leaves the code alone that has it mended."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

from ampcheck.core.check import SECTIONS, sections
from ampcheck.core.run import Verdict
from ampcheck.lint import lint, rules

HEAD = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"

# By code: a mistake, whose line ends in the comment `# here`, and the same code mended.
CASES: dict[str, list[tuple[str, str]]] = {
    "AMP101": [
        ("with torch.cuda.amp.autocast():  # here\n    f()", 'with torch.amp.autocast("cuda"):\n    f()'),
        (
            "from torch.cuda.amp import GradScaler\nscaler = GradScaler()  # here",
            'from torch.amp import GradScaler\nscaler = GradScaler("cuda")',
        ),
        (
            "from torch.cuda import amp\nscaler = amp.GradScaler()  # here",
            "try:\n    s = torch.amp.GradScaler()\nexcept AttributeError:\n    s = torch.cuda.amp.GradScaler()",
        ),
        (
            "from torch.cuda.amp import custom_fwd\nclass A:\n    @custom_fwd  # here\n    def forward(c): ...",
            "TORCH_2_4 = True\nscaler = torch.amp.GradScaler() if TORCH_2_4 else torch.cuda.amp.GradScaler()",
        ),
    ],
    "AMP102": [
        (
            """
            def train(model, optimizer, x):
                with torch.autocast("cuda"):
                    loss = model(x).mean()
                loss.backward()  # here
                optimizer.step()
            """,
            """
            def train(model, optimizer, x):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = model(x).mean()
                loss.backward()
                optimizer.step()
            """,
        ),
        (
            """
            ctx = torch.autocast("cpu", torch.float16)
            def train(model, x):
                with ctx:
                    loss = model(x).mean()
                loss.backward()  # here
            """,
            """
            def train(model, x, scaler):
                with torch.autocast("cuda", torch.float16):
                    loss = model(x).mean()
                scaler.scale(loss).backward()
            """,
        ),
    ],
    "AMP103": [
        (
            """
            def train(model, optimizer, scaler, loss):
                scaler.scale(loss).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # here
                scaler.step(optimizer)
                scaler.update()
            """,
            """
            def train(model, optimizer, scaler, loss):
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            """,
        ),
        (
            """
            class Trainer:
                def step(self, loss):
                    scaled = self.grad_scaler.scale(loss)
                    scaled.backward()
                    nn.utils.clip_grad_value_(self.model.parameters(), 1.0)  # here
                    self.grad_scaler.step(self.optimizer)
                    self.grad_scaler.update()
            """,
            """
            def train(model, optimizer, scaler, loss):
                if scaler is not None:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
            """,
        ),
        (
            """
            def train(self, loss):
                self.scaler.scale(loss).backward()
                nn.utils.clip_grad_norm_(self.parameters(), 1.0)  # here
                self._unscale_gradients()
                self.scaler.step(self.optimizer)
            """,
            """
            def train(self, loss):
                self.scaler.scale(loss).backward()
                self._unscale_gradients()
                nn.utils.clip_grad_norm_(self.parameters(), 1.0)
                self.scaler.step(self.optimizer)
            """,
        ),
        (
            """
            from .helpers import clip_grad_value_
            def clip_grad_norm_(parameters, most):
                ...
            class Trainer:
                def step(self, loss):
                    self.scaler.scale(loss).backward()
                    self.model.clip_grad_norm_(1.0)  # here
                    self.scaler.step(self.optimizer)
            """,
            """
            from . import helpers
            from .helpers import clip_grad_value_
            from elsewhere import utils
            def clip_grad_norm_(parameters, most):
                ...
            class Trainer:
                def step(self, loss):
                    self.scaler.scale(loss).backward()
                    clip_grad_norm_(self.model.parameters(), 1.0)
                    clip_grad_value_(self.model.parameters(), 1.0)
                    helpers.clip_grad_norm_(self.model.parameters(), 1.0)
                    utils.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.clip_grad_norm_()
                    self.scaler.step(self.optimizer)
            """,
        ),
    ],
    "AMP104": [
        (
            """
            def train(optimizer, scaler, loss):
                scaler.scale(loss).backward()
                scaler.step(optimizer)  # here
            """,
            """
            def train(optimizer, scaler, loss):
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            """,
        ),
    ],
    "AMP105": [
        (
            """
            def train(model, x):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(x).mean()
                    loss.backward()  # here
            """,
            """
            def train(model, x):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(x).mean()
                loss.backward()
            """,
        ),
        (
            """
            @torch.autocast("cpu", torch.bfloat16)
            def train(model, optimizer, x):
                optimizer.step()  # here
            """,
            """
            def train(model, optimizer, x):
                with torch.autocast("cpu", torch.bfloat16, enabled=False):
                    optimizer.step()
            """,
        ),
    ],
    "AMP106": [
        (
            """
            def main(model):
                model.half()  # here
                optimizer = torch.optim.Adam(model.parameters())
            """,
            """
            def main(model):
                optimizer = torch.optim.Adam(model.parameters())
                with torch.autocast("cuda", torch.float16):
                    model(1)
            """,
        ),
        (
            """
            def main(net):
                optimizer = torch.optim.SGD(params=net.parameters(), lr=0.1)
                net.to(dtype=torch.float16)  # here
            """,
            """
            def main(net, teacher):
                teacher.half()
                optimizer = torch.optim.SGD(params=net.parameters(), lr=0.1)
            """,
        ),
    ],
    "AMP107": [
        (
            """
            def main(net):
                optimizer = torch.optim.AdamW(net.parameters())
                net.to(torch.bfloat16)  # here
            """,
            """
            def main(net):
                net.to(torch.bfloat16)
                optimizer = torch.optim.AdamW(net.parameters())
            """,
        ),
    ],
    "AMP108": [
        (
            """
            def train(data, optimizer, scheduler):
                for x in data:
                    scheduler.step()  # here
                    optimizer.step()
            """,
            """
            def train(data, optimizer, scheduler):
                for x in data:
                    optimizer.step()
                    scheduler.step()
            """,
        ),
    ],
    "AMP109": [
        ("y = x / (x.half() + 1e-8)  # here", "y = x / (x.half() + 1e-4)"),
        ("y = x.to(torch.float16).clamp(min=1e-12).log()  # here", "y = x.to(torch.float32).clamp(min=1e-12).log()"),
    ],
    "AMP110": [
        (
            """
            def scores(q, k, mask):
                s = (q @ k).half()
                return s.masked_fill(mask, -1e9)  # here
            """,
            """
            def scores(q, k, mask):
                s = (q @ k).half()
                return s.masked_fill(mask, torch.finfo(s.dtype).min)
            """,
        ),
        (
            """
            def scores(x, mask):
                x = x.to(torch.float16)
                return torch.where(mask, x, -1e10)  # here
            """,
            """
            def scores(x, mask):
                return torch.where(mask, x, -1e10)
            """,
        ),
        (
            """
            def scores(x, mask):
                with torch.autocast("cuda", dtype=torch.float16):
                    return (x @ x).masked_fill(mask, -1e9)  # here
            """,
            """
            def scores(x, mask):
                with torch.autocast("cuda", dtype=torch.float16):
                    return (x @ x).float().masked_fill(mask, -1e9)
            """,
        ),
        (
            """
            def scores(q, k, mask, loss):
                s = q.half() @ k.half()
                log(loss.float(), -1e4, torch.finfo(loss.dtype))
                return s.masked_fill(mask, -1e9)  # here
            """,
            """
            def scores(q, k, mask):
                q = q.half()
                s = torch.matmul(q.float(), k.float()).transpose(1, 2)
                q = q.half()
                return s.masked_fill(mask.half() > 0, -1e9)
            """,
        ),
        (
            """
            def scores(self, q, k, mask):
                with torch.autocast("cuda"):
                    s = torch.softmax(q @ k, -1)
                    t = q.bmm(k.transpose(1, 2))[0].T
                    s.masked_fill(mask, -1e9)
                s, t = torch.where(mask, s, -1e9), torch.where(mask, -t, -1e9)  # here
                t = torch.masked_fill(input=t, mask=mask, value=-1e9)
            """,
            """
            import numpy as np
            def scores(self, x, y, mask):
                if self.half:
                    y = y.half()
                elif self.wide:
                    y.masked_fill(mask, -1e9)
                x = x.to(torch.float16)
                if x.dtype == torch.float16:
                    x.masked_fill(mask, -1e4)
                else:
                    x.masked_fill(mask, -1e9)
                np.where(mask, x, -1e9), where(mask, x, -1e9), self.where(mask, x, -1e9)
                z, w = x.to(device=self.device), x.type_as(y.float())
                torch.full(x.shape, -1e9), torch.full_like(w, -1e9), x.new_zeros(3).float().masked_fill(mask, -1e9)
                with torch.autocast("cuda"), torch.autocast("cuda", enabled=False):
                    (y @ y).float().masked_fill(mask, -1e9)
                return unknown(x).masked_fill(mask, -1e9)
            """,
        ),
        (
            """
            @torch.autocast("cuda", dtype=torch.float16)
            def scores(q, k, v, mask, device, dtype):
                a, b = q.bfloat16(), torch.einsum("ij,jk", q, k)
                a.masked_fill(mask, -1e9)
                b.to(device).to(dtype).masked_fill(mask, -1e9)
                b.to(device).to("cpu").masked_fill(mask, -1e9)  # here
                v.to(b).masked_fill(mask, -1e9)  # here
                v.to(b.dtype).masked_fill_(mask, value=-1e9)  # here
                torch.full((2,), -1e9, dtype=torch.half)  # here
                (v + b).where(mask, -1e9)  # here
                for c in b.chunk(2):
                    c = c * 2
                    c.masked_fill(mask, -1e9)  # here
            """,
            """
            def scores(q, k, mask):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    return (q @ k).masked_fill(mask, -1e9)
            """,
        ),
    ],
    "AMP111": [
        ("p = torch.arange(n, dtype=torch.bfloat16)  # here", "p = torch.arange(n, dtype=torch.float32)"),
        ("p = torch.arange(0, 4096).half()  # here", "p = torch.arange(0, 1024).half()"),
        ("p = torch.arange(n, device=d).to(torch.bfloat16)  # here", "p = torch.arange(16).to(torch.bfloat16)"),
    ],
    "AMP112": [
        (
            """
            def evaluate(batches):
                total = torch.zeros((), dtype=torch.bfloat16)
                for batch in batches:
                    total += batch.sum()  # here
            """,
            """
            def evaluate(batches):
                total = torch.zeros((), dtype=torch.float32)
                for batch in batches:
                    total += batch.sum()
            """,
        ),
        (
            """
            def evaluate(epochs):
                for epoch in epochs:
                    total = torch.zeros((), dtype=torch.float16)
                    for batch in epoch:
                        total += batch.sum()  # here
            def another(batches):
                total = torch.zeros((), dtype=torch.float16)
                for batch in batches:
                    total += batch.sum()  # here
            """,
            """
            def empty():
                total = torch.zeros((), dtype=torch.float16)
                return total
            def evaluate(batches):
                total = 0.0
                for batch in batches:
                    total += batch.sum().item()
            def each(batches):
                total = torch.zeros((), dtype=torch.float16)
                for batch in batches:
                    total = torch.zeros((), dtype=torch.float16)
                    total += batch.sum()
            """,
        ),
    ],
    "AMP113": [
        (
            """
            @torch.compile
            def f(x):
                return x * x.sum().item()  # here
            """,
            """
            def f(x):
                return x * x.sum().item()
            """,
        ),
        (
            """
            def f(x):
                if x.isnan().any():  # here
                    return x
                return x + 1
            g = torch.compile(f)
            """,
            """
            def build():
                def f(x):
                    return x + 1
                return torch.compile(f)
            def f(x):
                return x.item()
            """,
        ),
    ],
    "AMP114": [
        (
            """
            def loss(p, y):
                with torch.autocast("cuda"):
                    return F.binary_cross_entropy(p, y)  # here
            """,
            """
            def loss(z, y):
                with torch.autocast("cuda"):
                    return F.binary_cross_entropy_with_logits(z, y)
            """,
        ),
        (
            """
            criterion = nn.BCELoss()
            def loss(p, y):
                with torch.autocast("cuda", torch.float16):
                    return criterion(p.sigmoid(), y)  # here
            """,
            """
            criterion = nn.BCELoss()
            def loss(p, y):
                with torch.autocast("cuda", enabled=False):
                    return criterion(p.sigmoid(), y)
            """,
        ),
    ],
    "AMP115": [
        (
            """
            def save(model, optimizer, scaler):
                scaler.step(optimizer)
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "a.pt")  # here
            """,
            """
            def save(model, optimizer, scaler):
                scaler.step(optimizer)
                state = {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
                torch.save(state, "a.pt")
            """,
        ),
        (
            """
            class Trainer:
                def step(self):
                    self.scaler.step(self.optimizer)
                def save(self):
                    torch.save(self.optimizer.state_dict(), "a.pt")  # here
            """,
            """
            class Trainer:
                def step(self):
                    self.scaler.step(self.optimizer)
            def save_another(optimizer):
                torch.save(optimizer.state_dict(), "a.pt")
            """,
        ),
    ],
}


def reports(folder: Path, text: str, code: str) -> list[int | None]:
    path = folder / "code.py"
    path.write_text(HEAD + dedent(text))
    return [finding.where.line for finding in lint([path], [code], cached=False).findings]


def lines_of(text: str) -> list[int]:
    return [n for n, line in enumerate((HEAD + dedent(text)).splitlines(), 1) if line.endswith("# here")]


@pytest.mark.parametrize(("code", "case"), [(code, case) for code, cases in CASES.items() for case in cases])
def test_a_mistake_is_reported_at_its_line_and_its_cure_is_not(
    code: str, case: tuple[str, str], tmp_path: Path
) -> None:
    mistake, mended = case
    assert reports(tmp_path, mistake, code) == lines_of(mistake)
    assert reports(tmp_path, mended, code) == []


def test_every_rule_has_a_case_a_page_and_a_code_of_its_own() -> None:
    assert set(rules()) == set(CASES)
    for code, rule in rules().items():
        assert re.fullmatch(r"AMP\d{3}", code)
        assert list(sections(rule.check.page)) == list(SECTIONS)
        assert rule.audit.startswith("ampcheck audit") or code == "AMP101"  # a deprecation needs no proof


def test_a_rule_says_how_to_mend_it_and_which_audit_proves_it(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(HEAD + dedent(CASES["AMP103"][0][0]))
    (finding,) = lint([tmp_path], cached=False).findings
    assert finding.verdict is Verdict.FAIL
    assert "scaler.unscale_(optimizer) before" in finding.hint
    assert "ampcheck audit train.py:main --checks scaler-protocol" in finding.hint
