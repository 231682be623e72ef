"""Names that imports make, wherever they stand in a file: the last one in the order of the lines counts."""

from __future__ import annotations

import ast

from ampcheck.core.syntax import dotted, imported_names, parse_python

SOURCE = """
from torch.nn import functional as F
import torch.optim
def build(kind):
    match kind:
        case "a":
            import numpy as np
    try:
        from torch.cuda import amp
    except ImportError:
        amp = None
    finally:
        from . import local
    return lambda x: x if x else y
if True:
    import mylib.functional as F
"""


def test_imports_are_found_in_every_block_and_the_last_counts() -> None:
    names = dict(imported_names(ast.parse(SOURCE), lambda relative: "package"))
    assert names == {
        "F": "mylib.functional",
        "torch": "torch",
        "np": "numpy",
        "amp": "torch.cuda.amp",
        "local": "package.local",
    }


def test_what_is_no_python_has_no_tree_and_a_call_no_dotted_name() -> None:
    assert parse_python("def") is None
    assert parse_python("(" * 100_000) is None
    assert dotted(ast.parse("a.b.c", mode="eval").body) == "a.b.c"
    assert dotted(ast.parse("a().c", mode="eval").body) == ""
