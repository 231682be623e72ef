"""Training loops as real projects have them, and as they should be: none of them may fail."""

from __future__ import annotations

import healthy_optimizers
import healthy_protocols
import healthy_variants
import pytest
import torch
from healthy_loops import LOOPS

from ampcheck.audit import audit
from ampcheck.core.run import Verdict

assert all((healthy_optimizers, healthy_protocols, healthy_variants))


@pytest.mark.parametrize("name", LOOPS)
def test_a_healthy_loop_has_no_failure(name):
    torch.manual_seed(0)
    run = audit(LOOPS[name]())
    assert [(one.check, one.message) for one in run.of(Verdict.FAIL)] == []
