"""Read the guards that failed where Dynamo compiles again: their kind, what varies, and how to avoid it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

_TENSOR = re.compile(r"tensor '(.*?)' (.+?) mismatch(?: at index (\d+))?")
_SIZE = re.compile(r"([\w.\[\]']+)\.size\(\)\[(\d+)\]")
_TWO_OR_MORE = re.compile(rf"2 <= {_SIZE.pattern}( <= \d+)?")  # of a dynamic size: Dynamo always specialises 0 and 1
_ACTUAL = re.compile(rf"{_TENSOR.pattern}\. expected \d+, actual (\d+)")
_CONSTANT = re.compile(r"(.+?) (==|is|!=|is not|in|not in) .+")
_LENGTH_OF = re.compile(r"len\((.+)\) [=!]= \d+")
_IDENTITY = re.compile(r"___check_(?:obj|type)_id\((.+?), \d+\)|___dict_\w+\((.+?)[,)]")
_RAISED = re.compile(r"'(\w+)' object has no attribute '\w+'")  # the check of a guard raised
_STACK = "\nUser stack trace:\n"

HINTS = {
    "shape": "mark the dimension with torch._dynamo.mark_dynamic(tensor, dim) before the first call, compile with "
    "dynamic=True; where Python code needs the size (range, a list of that length) only padding to few sizes helps; "
    "sizes 0 and 1 are always specialised",
    "stride": "bring the input to one memory layout before the call, with contiguous()",
    "rank": "give the input one number of dimensions, or compile one function for each",
    "dtype": "give the input one dtype, or warm up with each that occurs",
    "device": "keep the input on one device, or warm up with each that occurs",
    "requires_grad": "call with inputs that agree in requires_grad, or warm up with both",
    "training flag": "switch train() and eval() seldom, and warm up with both; or compile one function for each",
    "grad mode": "run the warm-up with and without torch.no_grad(), or compile one function for each",
    "inference mode": "use torch.no_grad() where the same code also runs in training, or warm up under inference_mode",
    "autocast": "enter autocast inside the compiled function, or warm up in each autocast state that occurs",
    "constant attribute": "keep what changes in a buffer (register_buffer(name, torch.tensor(value))), or set "
    "torch._dynamo.config.allow_unspec_int_on_nn_module = True for an integer",
    "constant": "pass what changes as a tensor; Python values are compiled into the graph",
    "length": "stack what a list gathers into one tensor, or fill a buffer of fixed size: each length of a list or "
    "dict is compiled again",
    "identity": "keep one object instead of creating a new one for each call",
    "type": "keep one type, also before the first call: what is None in one call and a tensor in the next is compiled "
    "for both",
    "backend": "wrap with torch.compile once, and keep the result",
    "invalidated": "keep the objects that the graph was compiled for alive",
}


@dataclass(frozen=True, slots=True)
class Guard:
    """One failed guard. families: what varies, without its value; a family that failed before has varied before.
    of_tensor: it checks the size, layout, dtype or the like of a tensor."""

    kind: str
    text: str
    families: frozenset[tuple[str, ...]]
    global_state: bool = False
    of_tensor: bool = False
    stack: str = ""


def read_guards(text: str) -> list[Guard]:
    """The failed guards of a recompilation, one for each older compilation, the newest first.

    text: the payload of the record `recompile_reasons`: one reason, or a JSON list of them.
    """
    try:
        reasons = json.loads(text)
    except ValueError:
        reasons = text
    texts = [_with_plain_locals(str(reason)) for reason in (reasons if isinstance(reasons, list) else [reasons])]
    return [_guard(text, _actual_sizes(texts)) for text in texts]


def _with_plain_locals(reason: str) -> str:
    """`x` for the `L['x']` of PyTorch 2.6."""
    return re.sub(r"\bL\['(\w+)'\](?! got)", r"\1", reason)


def _actual_sizes(reasons: Iterable[str]) -> dict[tuple[str, str], int]:
    """The sizes that the guards of static graphs found, by name and dimension of the tensor."""
    found = [match for reason in reasons if (match := _ACTUAL.search(reason)) and match[2] == "size"]
    return {(match[1], match[3]): int(match[4]) for match in found}


def closest(guards: Sequence[Guard], known: Collection[tuple[str, ...]]) -> tuple[Guard, bool]:
    """The most specific guard, and whether all that differs had differed before.

    Each older compilation names the first of its guards that fails, global state before tensors. Values that have not
    varied yet come first; among those the compilation that agrees longest.
    """

    def order(guard: Guard) -> tuple[bool, bool, int]:
        return guard.families <= set(known), guard.global_state, len(guard.families)

    best = min(guards, key=order)
    return best, best.families <= set(known)


def hint(kind: str) -> str:
    """Return how recompilations of this kind are avoided."""
    return HINTS.get(kind) or next((HINTS[part] for part in kind.split(" and ") if part in HINTS), "")


def _guard(reason: str, sizes: Mapping[tuple[str, str], int]) -> Guard:
    text, _, stack = reason.partition(_STACK)
    of_module = "allow_unspec_int_on_nn_module" in text  # PyTorch's own advice, which follows such a guard alone
    text = re.sub(r"^\S+: ", "", text, count=1)
    text = " ".join(text.partition("  #")[0].split())
    if text.startswith("GLOBAL_STATE changed:"):
        flags = text.partition(":")[2].split()
        kinds = list(dict.fromkeys(map(_flag_kind, flags))) or ["global state"]
        families = frozenset(("global", flag) for flag in flags)
        return Guard(" and ".join(kinds), text, families, global_state=True, stack=stack)
    kind, family = _kind(text)
    if (match := _TWO_OR_MORE.fullmatch(text)) and sizes.get((match[1], match[2]), 2 if match[3] else 1) < 2:
        family = (*family, "0 or 1")
    kind = "constant attribute" if of_module and kind == "constant" else kind
    of_tensor = bool(_TENSOR.match(text) or _SIZE.search(text))
    return Guard(kind, text, frozenset([family]), of_tensor=of_tensor, stack=stack)


def _flag_kind(flag: str) -> str:
    if flag.startswith("autocast"):
        return "autocast"
    return "grad mode" if flag == "grad_mode" else flag.replace("_", " ")


def _tensor_kind(text: str, name: str, what: str, index: str) -> tuple[str, tuple[str, ...]]:
    """The same of a guard that compares a property of a tensor."""
    if what == "size":
        return "shape", ("shape", name, index)
    if what == "dispatch key set":
        expected, _, actual = text.partition("actual")
        kinds = {"Autograd": "inference mode", "Autocast": "autocast"}  # autocast in 2.6
        kind = next((kind for key, kind in kinds.items() if (key in expected) != (key in actual)), "dispatch keys")
        return kind, (kind, name)
    return what, (what, name, index)


def _kind(text: str) -> tuple[str, tuple[str, ...]]:
    """The kind of what differs, and its family."""
    if match := _TENSOR.match(text):
        return _tensor_kind(text, match[1], match[2], match[3] or "")
    if match := _SIZE.search(text):
        return "shape", ("shape", match[1], match[2])
    if "BACKEND_MATCH" in text:
        return "backend", ("backend",)
    if "invalidated" in text:
        return "invalidated", ("invalidated",)
    if re.search(r"\.training(?: == |, \d+\)$)", text):
        return "training flag", ("training",)
    if match := _LENGTH_OF.fullmatch(text):
        return "length", ("length", match[1])
    if match := _IDENTITY.search(text):
        return "identity", ("identity", next(filter(None, match.groups()), text))
    if match := _RAISED.fullmatch(text):
        return "type", ("type", match[1])
    if match := _CONSTANT.fullmatch(text):
        attribute = match[1].startswith("self.") or "._modules[" in match[1]
        return "constant attribute" if attribute else "constant", ("constant", match[1])
    return "other", ("other", re.sub(r"\d+", "#", text))
