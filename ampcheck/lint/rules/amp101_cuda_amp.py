"""Requires: Autocast and scalers come from torch.amp, with the device as an argument. torch.cuda.amp and torch.cpu.amp
are deprecated since PyTorch 2.4, and warn at each use.

Measured: A call or an import of their autocast, GradScaler, custom_fwd or custom_bwd, unless a handler of
ImportError or AttributeError or a test of the version leaves it to older releases.

Causes: Code of PyTorch 1.6 to 2.3, and examples that are older than torch.amp.

Fix: torch.amp.autocast("cuda", ...), torch.amp.GradScaler("cuda", ...) and torch.amp.custom_fwd(device_type="cuda");
--fix writes them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcheck.core.check import Check
from ampcheck.lint.rule import Edit, Report, Rule
from ampcheck.lint.source import Call, Source

_MOVED = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
_NAMES = {
    f"torch.{device}.amp{inside}.{name}": (device, name)
    for device in ("cuda", "cpu")
    for inside, names in (("", _MOVED), (".autocast_mode", _MOVED), (".grad_scaler", _MOVED))
    for name in names
}
_OLDER = ("version", "hasattr", "torch_")
"""In the test of a branch, in small letters: what asks for the release."""


def _read(source: Source) -> Iterator[Report]:
    """Calls, and decorators without arguments; imports that nothing uses are left alone."""
    for scope in source.scopes:
        for call in scope.calls:
            if call.name in _NAMES and not _for_older_releases(source, call):
                device, name = _NAMES[call.name]
                yield Report(call.line, _message(device, name), _fix(source, call, name, _argument(device, name)))
        for decorator in getattr(scope.node, "decorator_list", ()):
            if (found := _NAMES.get(source.resolve(decorator))) is not None:
                yield Report(decorator.lineno, _message(*found))


def _message(device: str, name: str) -> str:
    return f"torch.{device}.amp.{name} is deprecated: write torch.amp.{name}({_argument(device, name)}, ...)"


def _argument(device: str, name: str) -> str:
    return f'device_type="{device}"' if name.startswith("custom") else f'"{device}"'


def _fix(source: Source, call: Call, name: str, argument: str) -> tuple[Edit, ...]:
    """Where the call names the module itself, so that no import has to change."""
    node = call.node
    if ast.unparse(node.func).split(".")[0] != "torch" or "torch" not in source.imports:
        return ()
    if name == "autocast" and node.args:  # the first is `enabled` there, and `device_type` here
        return ()
    if name.startswith("custom") or any(keyword.arg in ("device_type", "device", None) for keyword in node.keywords):
        return ()
    start, line, end = node.func.lineno, node.func.end_lineno, node.func.end_col_offset
    after = source.lines[start - 1].encode()[end:]
    if line != start or end is None or not after.startswith(b"("):
        return ()
    comma = "" if not node.args and not node.keywords else ", " if after[1:].strip() else ","
    return (Edit(start, node.func.col_offset, start, end + 1, f"torch.amp.{name}({argument}{comma}"),)


def _for_older_releases(source: Source, call: Call) -> bool:
    """Return whether the call is in a branch that a version or the lack of the new name decides."""
    for identity, _ in call.branches:
        statement = source.nodes[identity]
        if isinstance(statement, ast.Try):
            return True
        test = ast.unparse(statement.test).lower() if isinstance(statement, (ast.If, ast.IfExp)) else ""
        if any(word in test for word in _OLDER):
            return True
    return False


RULE = Rule(Check("AMP101", "lint", __doc__), (("cuda.amp", "cpu.amp", "torch.cuda import amp"),), _read, fails=False)
