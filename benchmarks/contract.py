"""Write ampcheck/torchtools/contract.md: PyTorch's private names, who needs each, and what happens without it.

python benchmarks/contract.py
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ampcheck"
CONTRACT = PACKAGE / "torchtools" / "contract.md"
PRIVATE = "torchtools/private.py"
_SHOWN = 4

_STRATEGIES = "set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy"
SINCE = {f"_C._dynamo.eval_frame.{name}": "2.7" for name in _STRATEGIES}
"""Names that the oldest supported release lacks, and has another way for."""

OBJECTS = {
    "GradScaler._scale": "the loss scale is not followed",
    "GradScaler._device": "scalers of a device that is missing are not named",
    "GradScaler._found_inf_per_device": "steps that a fused optimizer skips count as taken",
    "autocast._enabled": "the loss of a region counts as computed in float32",
    "Optimizer._optimizer_step_pre_hooks": "optimizers are not found inside the wrappers of libraries",
    "Module._compiled_call_impl": "calls of modules that `compile()` compiled are not recorded",
    "OpOverload._schema": "ampcheck cannot tell what an op writes: nothing is judged",
    "OpOverload._overloadpacket": "autocast's policy is not probed",
    "OpOverload._dispatch_cache": "autocast's policy is not probed",
    "OpOverload._op_dk": "composed ops are not followed in inference mode",
    "Tensor._version": "writes to saved tensors are not seen",
    "Tensor._base": "views are not followed to their memory",
    "Tensor._is_view": "casts that autocast keeps are not told from others",
    "Tensor._is_zerotensor": "no run is followed in float64",
    **dict.fromkeys(
        ("Tensor._nested_tensor_size", "Tensor._nested_tensor_strides", "Tensor._nested_tensor_storage_offsets"),
        "nested tensors are not followed",
    ),
    "UntypedStorage._cdata": "tensors that share memory are not recognised: nothing is judged",
    "TypedStorage._untyped_storage": "storages are placed on no emulated device",
    "Node._input_metadata": "the format in which a loss was computed is not known",
    **dict.fromkeys(("MulBackward0._saved_self", "MulBackward0._saved_other"), "a constant loss scale is not seen"),
    "Function._forward_cls": "own autograd functions are not recognised in backward passes",
    "checkpoint._allowed_determinism_checks_to_fns": "checkpoints do not recompute on an emulated device",
    "DefaultDeviceType._default_device_type": "checkpoints do not recompute on an emulated device",
    "Library._destroy": "the emulation of autocast is not undone",
    "DistributedDataParallel._comm_hooks": "gradients with a hook of communication count as averaged over all ranks",
    **dict.fromkeys(("FSDPModule._get_fsdp_state", "FSDPState._mp_policy"), "the policies of FSDP2 are not judged"),
    "ProcessGroup._get_backend": "messages between ranks wait for half an hour at most",
    "ProcessGroup._get_sequence_number_for_group": "companions do not travel with collectives",
    "Options._timeout": "messages between ranks wait for half an hour at most",
}
"""Private attributes of objects of PyTorch, by a class or module that has them."""

_HEAD = """# Private names of PyTorch

`python benchmarks/contract.py` writes this file. `torchtools` is the only package that uses private names of PyTorch;
the others import them from `torchtools/private.py`. `python -m pytest tests/contract/test_private_names.py` asks the
installed PyTorch for each name, every night also the nightly build. Unless ampcheck cannot be imported without a name,
its use raises `MissingNameError` where it is gone, and what needs it is skipped with that reason.

"""


@cache
def _trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def _walk(node: ast.AST) -> list[ast.AST]:
    return list(ast.walk(node))


def is_private(name: str) -> bool:
    """Whether a dotted name is one of torch with a part that begins with one underscore."""
    return name.startswith("torch.") and re.search(r"\._(?!_)", name) is not None


def private_names(node: ast.AST, known: dict[str, str], *, strings: bool) -> Iterator[str]:
    """The private names of torch below a node. known: what local names stand for. strings: names in quotes, too."""

    def dotted(value: ast.AST) -> str:
        if isinstance(value, ast.Attribute):
            return f"{owner}.{value.attr}" if (owner := dotted(value.value)) else ""
        return known.get(value.id, "") if isinstance(value, ast.Name) else ""

    inner = {id(part.value) for part in _walk(node) if isinstance(part, ast.Attribute)}
    for part in _walk(node):
        names = []
        if isinstance(part, (ast.Attribute, ast.Name)) and id(part) not in inner:
            names = [dotted(part)]
        elif isinstance(part, (ast.Import, ast.ImportFrom)):
            names = [full for _, full in _imports(part)]
        elif strings and isinstance(part, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(part.value)):
            names = [str(part.value)]
        elif strings and isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "_optional":
            names = [f"torch.{ast.literal_eval(part.args[0])}"]
        yield from filter(is_private, names)


def _imports(node: ast.AST) -> list[tuple[str, str]]:
    """The local names that an import binds, with what they stand for."""
    if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
        return [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
    if isinstance(node, ast.Import):
        names = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
        return [(alias.asname or "torch", alias.name if alias.asname else "torch") for alias in names] + [
            ("torch", alias.name) for alias in names if not alias.asname and "._" in alias.name
        ]
    return []


def locals_of(tree: ast.Module) -> dict[str, str]:
    """What the names that a module imports or assigns stand for in torch."""
    known = {"torch": "torch"}
    for node in _walk(tree):
        known.update((local, full) for local, full in _imports(node) if local != "torch")
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value, parts = node.value, []
            while isinstance(value, ast.Attribute):
                value, parts = value.value, [value.attr, *parts]
            if parts and isinstance(value, ast.Name) and value.id in known:
                known[node.targets[0].id] = ".".join((known[value.id], *parts))
    return known


def outside() -> dict[str, list[str]]:
    """Files outside of torchtools that use private names of torch, with these."""
    others = {path: tree for path, tree in _trees().items() if not path.startswith("torchtools/")}
    names = {path: set(private_names(tree, locals_of(tree), strings=False)) for path, tree in others.items()}
    return {path: sorted(found) for path, found in names.items() if found}


def inside() -> dict[str, set[str]]:
    """The private names that torchtools uses, with the files that need them; those of `private.py` by their imports."""
    users: dict[str, set[str]] = defaultdict(set)
    imported: dict[str, set[str]] = defaultdict(set)
    for path, tree in _trees().items():
        for node in _walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "ampcheck.torchtools.private":
                for alias in node.names:
                    imported[alias.name].add(path)
    for path, tree in _trees().items():
        known = locals_of(tree) if path.startswith("torchtools/") else {}
        for node in tree.body if known else ():
            for name in private_names(node, known, strings=True):
                if path == PRIVATE:
                    users[name].update(*(imported.get(bound, {PRIVATE}) for bound in _bound(node, name)))
                else:
                    users[name].add(path)
    return users


def _bound(node: ast.stmt, name: str) -> list[str]:
    """The names by which a statement of `private.py` offers a private name."""
    if isinstance(node, ast.ImportFrom):
        return [local for local, full in _imports(node) if full == name]
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def entry_of(name: str, entries: dict[str, str]) -> str:
    """The entry that a name of torch belongs to: itself, or the longest that it is a part of; "" without one."""
    parts = name.removeprefix("torch.").split(".")
    candidates = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((candidate for candidate in candidates if candidate in entries), "")


def _users(files: set[str]) -> str:
    shown = sorted(files)
    if len(shown) <= _SHOWN:
        return ", ".join(shown)
    rooms = sorted({path.split("/")[0].removesuffix(".py") for path in shown})
    return f"{len(shown)} files of {', '.join(rooms)}"


def _attributes(tree: ast.Module) -> Iterator[str]:
    """The attributes that a file asks objects for, also by `getattr` and `hasattr`."""
    for node in _walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            yield from (str(value.value) for value in node.args[1:2] if isinstance(value, ast.Constant))


def attributes_outside() -> dict[str, set[str]]:
    """The private attributes that files outside of torchtools ask objects for that are not of ampcheck, with these."""
    own: set[str] = set()
    for node in (node for tree in _trees().values() for node in _walk(tree)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            own.add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, (ast.Name, ast.AnnAssign)):
            own.add(ast.unparse(getattr(node, "target", node)))
    found: dict[str, set[str]] = defaultdict(set)
    for path, tree in _trees().items():
        for name in set(_attributes(tree)) - own if not path.startswith("torchtools/") else ():
            if re.match(r"_(?!_|ampcheck)", name):
                found[name].add(path)
    return found


def contract() -> str:
    """The text of contract.md."""
    from ampcheck.torchtools.contract import WITHOUT

    users: dict[str, set[str]] = defaultdict(set)
    for name, files in inside().items():
        users[entry_of(name, WITHOUT)] |= files
    for path, tree in _trees().items():
        attributes = set(_attributes(tree))
        for name in OBJECTS:
            users[name].update([path] if name.partition(".")[2] in attributes else [])
    lines = ["| name | needed by | without it |", "|---|---|---|"]
    for name, what in sorted(WITHOUT.items()):
        release = f" (since {SINCE[name]})" if name in SINCE else ""
        lines.append(f"| `torch.{name}`{release} | {_users(users[name])} | {what} |")
    lines += ["", "## Private attributes of objects", "", "| attribute | needed by | without it |", "|---|---|---|"]
    lines += [f"| `{name}` | {_users(users[name])} | {what} |" for name, what in OBJECTS.items()]
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    CONTRACT.write_text(contract())
