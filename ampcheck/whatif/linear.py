"""The three products of each linear layer of a run, computed as a recipe has it, or beside it.

Layers are `nn.Linear`, and whatever else multiplies its input by a matrix of the model: `linear`, also within
`nn.MultiheadAttention`, and `addmm`, `mm`, `matmul` and `einsum` with a parameter, a view or a cast of one. Other
products with parameters are counted. A layer is named by the module that runs, as filters of torchao name it; all
matrices that a module multiplies by are one layer.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from ampcheck.facts.store import StorageMap
from ampcheck.records.whatif import ProductLoss
from ampcheck.torchtools.composite import body_of
from ampcheck.torchtools.pytree import tensors
from ampcheck.whatif.casts import cast, transformed
from ampcheck.whatif.einsum import projection
from ampcheck.whatif.recipes import Operand, Recipe

_LINEAR = torch.nn.functional.linear
_ADDMM = (torch.addmm, torch.Tensor.addmm)
_MATMUL = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
_COPIES = (
    *(torch.Tensor.to, torch.Tensor.type, torch.Tensor.type_as, torch.Tensor.contiguous, torch.Tensor.clone),
    *(torch.Tensor.bfloat16, torch.Tensor.half, torch.Tensor.float, torch.Tensor.double),
)
_BADDBMM = (torch.baddbmm, torch.Tensor.baddbmm)
_BATCHED = "batched products of weights"
_COUNTED = {
    **dict.fromkeys((*_ADDMM, *_MATMUL, torch.linalg.multi_dot), "products of weights"),
    **dict.fromkeys((torch.mv, torch.Tensor.mv, torch.inner, torch.Tensor.inner), "products of weights"),
    **dict.fromkeys((torch.bmm, torch.Tensor.bmm, *_BADDBMM), _BATCHED),
    getattr(torch.nn.functional, "grouped_mm", torch.bmm): _BATCHED,  # PyTorch 2.10
    torch.einsum: "batched einsum of weights",
    torch.tensordot: "tensordot of weights",
    torch.nn.functional.bilinear: "bilinear forms of weights",
}
"""Functions that multiply, with the reason by which `unseen` counts those of weights that are no linear layer."""


class Products:
    """Computes the products of layers.

    choice: the recipe of each module; others compute in float32. observed: recipes whose errors are measured beside
    each product, in `losses`, by recipe, module and product, of the worst call and matrix. seed: of stochastic rounding
    and random signs. shares: a choice counts what saturates and becomes zero, too: `saturated` and `flushed` have the
    largest parts by module and product. weights: the elements of a layer's matrices, by module; multiplications: of
    each layer, in all three products; unseen: products that are left as they are, by reason.
    """

    def __init__(
        self,
        choice: Mapping[str, Recipe] | None = None,
        observed: Sequence[Recipe] = (),
        *,
        seed: int = 0,
        shares: bool = False,
    ) -> None:
        self.choice, self.observed = choice or {}, observed
        self.saturated, self.flushed = dict[tuple[str, str], float](), dict[tuple[str, str], float]()
        self._seed, self._shares = seed, shares
        self.losses: dict[tuple[str, str, str], ProductLoss] = {}
        self.weights: dict[str, int] = {}
        self.multiplications = Counter[tuple[str, str]]()
        self.unseen = Counter[str]()
        self._amax: dict[tuple[object, ...], list[torch.Tensor]] = {}
        self._calls = Counter[tuple[str, str]]()
        self._matrices: dict[tuple[str, object], int] = {}

    def add_matrix(self, module: str, matrix: object, elements: int) -> int:
        """The number of a matrix among those of the model; its elements are counted once in each module."""
        if (module, matrix) not in self._matrices:
            self.weights[module] = self.weights.get(module, 0) + elements
        return self._matrices.setdefault((module, matrix), len(self._matrices))

    def compute(self, module: str, product: str, a: torch.Tensor, b: torch.Tensor, matrix: int = 0) -> torch.Tensor:
        """`a @ b.T`, of matrices that share their second dimension: in float32, and of float64 in float64.

        matrix: the number of the layer's matrix, each of which has its own history of scales.
        """
        self._calls[module, product] += 1
        self.multiplications[module, product] += a.shape[0] * a.shape[1] * b.shape[0]
        recipe, empty = self.choice.get(module), not (a.numel() and b.numel())  # an expert may get no token
        if recipe is not None and recipe[product] is not None and not empty:
            result, *parts = self._narrow(recipe, module, product, a, b, matrix, shares=self._shares)
            for largest, part in zip((self.saturated, self.flushed), parts, strict=True):
                largest[module, product] = max(largest.get((module, product), 0.0), part)
            return result
        wide = torch.promote_types(a.dtype, torch.float32)
        exact = a.to(wide) @ b.to(wide).T
        for recipe in self.observed:
            if recipe[product] is not None and not empty:
                narrow = self._narrow(recipe, module, product, a, b, matrix, shares=True)
                self._compare((recipe.name, module, product), exact, *narrow)
        return exact

    def _narrow(
        self,
        recipe: Recipe,
        module: str,
        product: str,
        a: torch.Tensor,
        b: torch.Tensor,
        matrix: int,
        *,
        shares: bool = False,
    ) -> tuple[torch.Tensor, float, float]:
        operands = recipe[product]
        assert operands is not None
        seed = zlib.crc32(f"{module} {product} {self._calls[module, product]}".encode(), self._seed)
        casts = []
        for number, (x, operand) in enumerate(zip((a, b), operands, strict=True)):
            generator = torch.Generator(x.device).manual_seed(seed)
            if operand.hadamard:
                x = transformed(x, operand.hadamard, torch.Generator().manual_seed(seed))
            amax = self._earlier(operand, (recipe.name, matrix, product, number), x) if operand.history else None
            casts.append(cast(x, operand, amax=amax, generator=generator, shares=shares))
        saturated, flushed = (max(values) for values in zip(*(c[1:] for c in casts), strict=True))
        return casts[0].values @ casts[1].values.T, saturated, flushed

    def _earlier(self, operand: Operand, key: tuple[object, ...], x: torch.Tensor) -> torch.Tensor:
        """The largest amax of the calls before this one; of the first call its own."""
        history = self._amax.setdefault(key, [])
        now = x.abs().amax()
        largest = torch.stack(history).amax() if history else now
        history.append(now)
        del history[: -operand.history]
        return largest

    def _compare(
        self, key: tuple[str, str, str], exact: torch.Tensor, narrow: torch.Tensor, saturated: float, flushed: float
    ) -> None:
        size, error = exact.double().square().sum(1), (narrow - exact).double().square().sum(1)
        rows = size != 0  # also where it is NaN
        if not rows.any():
            return
        noise, of_rows = (error.sum() / size.sum()).sqrt(), (error[rows] / size[rows]).sqrt().median()
        loss = ProductLoss(float(noise), float(of_rows), saturated, flushed)
        if key not in self.losses or loss.decibels < self.losses[key].decibels:
            self.losses[key] = loss


class _Linear(torch.autograd.Function):
    """`input @ weight.T` and its gradients by `Products`; the results have the dtypes of the run."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, products: Products, module: str, matrix: int
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.products, ctx.module, ctx.matrix = products, module, matrix
        with _plain(input.device.type):
            output = products.compute(module, "forward", input.reshape(-1, input.shape[-1]), weight, matrix)
        return output.to(input.dtype).reshape(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        grad, rows = gradients[0].reshape(-1, weight.shape[0]), input.reshape(-1, input.shape[-1])
        of_input = of_weight = None
        with _plain(input.device.type):
            if ctx.needs_input_grad[0]:
                of_input = ctx.products.compute(ctx.module, "grad_input", grad, weight.T, ctx.matrix)
                of_input = of_input.to(input.dtype).reshape(input.shape)
            if ctx.needs_input_grad[1]:
                of_weight = ctx.products.compute(ctx.module, "grad_weight", grad.T, rows.T, ctx.matrix)
                of_weight = of_weight.to(weight.dtype)
        return of_input, of_weight, None, None, None


@contextmanager
def _plain(device: str) -> Iterator[None]:
    """Inside, autocast leaves the emulation alone; no layer runs in a backward pass, nor while the mode handles one."""
    with torch.no_grad(), torch.autocast(device, enabled=False):
        yield


class LinearMode(TorchFunctionMode):
    """Inside, the linear layers of a model compute by `Products`.

    model: None for all modules that run, named from the outermost one; those of a second one have its class before
    their names.
    """

    def __init__(self, model: torch.nn.Module | None, products: Products) -> None:
        super().__init__()
        self._products = products
        self._running: list[str | None] = []
        self._names: dict[torch.nn.Module, str] = {}
        self._weights = StorageMap[object]()
        self._learns = model is None
        self._stack = ExitStack()
        if model is not None:
            self._learn(model)

    def __enter__(self) -> LinearMode:
        self._stack.callback(register_module_forward_pre_hook(self._enters).remove)
        self._stack.callback(register_module_forward_hook(self._leaves, always_call=True).remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._stack.close()

    def _learn(self, root: torch.nn.Module) -> None:
        """Name the modules of a model, and know its parameters."""
        prefix = f"{type(root).__name__}." if self._names and root not in self._names else ""
        for name, module in root.named_modules():
            self._names.setdefault(module, f"{prefix}{name}".rstrip("."))
        for parameter in root.parameters():
            if self._weights.get(parameter) is None and not is_lazy(parameter):
                self._weights.put(parameter, id(parameter))

    def _enters(self, module: torch.nn.Module, args: object) -> None:
        if self._learns and not self._running:
            self._learn(module)
        self._running.append(self._names.get(module))

    def _leaves(self, *_: object) -> None:
        self._running.pop()

    @property
    def _module(self) -> str | None:
        """The innermost module of the model that runs."""
        return next((name for name in reversed(self._running) if name is not None), None)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _LINEAR:
            return self._linear(*args, **kwargs)
        if func in _COUNTED:
            return self._product(func, args, kwargs)
        if func in _COPIES:
            return self._copy(func, args, kwargs)
        body = body_of(func)
        if body is None:
            return func(*args, **kwargs)
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return body(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _product(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A product, which is a linear layer where one of two operands is a matrix of the model."""
        layer = None if kwargs else self._as_layer(func, args)
        if layer is not None:
            return layer
        factors = args[1:] if func in (*_ADDMM, *_BADDBMM) else args
        weights = [factor for _, factor in tensors((factors, kwargs)) if self._is_weight(factor)]
        if weights:
            batched = func in _MATMUL and max(weight.dim() for weight in weights) > 2
            self._products.unseen[_BATCHED if batched else _COUNTED[func]] += 1
        return func(*args, **kwargs)

    def _as_layer(self, func: Any, args: Sequence[Any]) -> torch.Tensor | None:
        if func is torch.einsum and len(args) == 3:
            return self._einsum(*args)
        if func not in (*_ADDMM, *_MATMUL):
            return None
        *bias, a, b = args
        of_model = [self._is_weight(factor) for factor in (a, b)]
        if of_model == [False, True] and b.dim() == 2:
            return self._linear(a, b.T, *bias)
        if of_model == [True, False] and a.dim() == b.dim() == 2 and not bias:
            return self._linear(b.T, a).T
        return None

    def _einsum(self, equation: object, *operands: torch.Tensor) -> torch.Tensor | None:
        of_model = [self._is_weight(operand) for operand in operands]
        if sum(of_model) != 1:
            return None
        input, weight = operands[:: -1 if of_model[0] else 1]
        found = projection(equation, input, weight, swapped=of_model[0])
        if found is None:
            return None
        return found.ordered(self._linear(found.rows(input), found.matrix(weight), matrix=weight), weight)

    def _copy(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        copy: torch.Tensor = func(*args, **kwargs)
        if isinstance(copy, torch.Tensor) and self._is_weight(args[0]) and not self._is_weight(copy):
            self._weights.put(copy, self._place(args[0]))
        return copy

    def _is_weight(self, value: torch.Tensor) -> bool:
        """Return whether a tensor is a parameter of the model, a view of one, or a copy of these in some dtype."""
        return self._module is not None and self._weights.get(value) is not None

    def _place(self, weight: torch.Tensor) -> object:
        """Return a key of a matrix. Matrices of one shape that each call recomputes, such as a weight with a norm,
        share a key."""
        known = self._weights.get(weight)
        return weight.shape if known is None else (known, weight.storage_offset(), weight.numel())

    def _linear(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        matrix: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """matrix: of which the weight is a copy."""
        device, matrix = input.device.type, weight if matrix is None else matrix
        if torch.is_autocast_enabled(device) and input.is_floating_point() and input.dtype is not torch.float64:
            input, weight = (t.to(torch.get_autocast_dtype(device)) for t in (input, weight))
        module = self._module
        if weight.dim() != 2 or module is None or input.dtype is not weight.dtype or not input.is_floating_point():
            return _LINEAR(input, weight, bias)
        number = self._products.add_matrix(module, self._place(matrix), matrix.numel())
        output: torch.Tensor = _Linear.apply(input, weight, self._products, module, number)  # type: ignore[no-untyped-call]
        return output if bias is None else output + bias.to(output.dtype)
