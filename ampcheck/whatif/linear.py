"""The three products of each linear layer of a run, computed as a recipe has it, or beside it.

Layers are `nn.Linear`, and whatever else multiplies its input by a matrix of its own: `linear`, `addmm`, `mm` and
`matmul` with a two-dimensional parameter. A layer is named by the module that runs, as filters of torchao name it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ampcheck.records.whatif import ProductLoss
from ampcheck.whatif.casts import cast, transformed
from ampcheck.whatif.recipes import Operand, Recipe

_LINEAR = torch.nn.functional.linear
_ADDMM = (torch.addmm, torch.Tensor.addmm)
_MATMUL = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
_BATCHED = (torch.bmm, torch.Tensor.bmm, torch.baddbmm)


class Products:
    """What computes the products of layers.

    choice: the recipe of each module; others compute in float32. observed: recipes whose errors are measured beside
    each product, in `losses`, by recipe, module and product. weights: the elements of a layer's matrices, by module;
    multiplications: of each layer, in all three products; unseen: products that are left as they are, by reason.
    """

    def __init__(self, choice: Mapping[str, Recipe] | None = None, observed: Sequence[Recipe] = ()) -> None:
        self.choice, self.observed = choice or {}, observed
        self.losses: dict[tuple[str, str, str], ProductLoss] = {}
        self.weights: dict[str, int] = {}
        self.multiplications = Counter[tuple[str, str]]()
        self.unseen = Counter[str]()
        self._amax: dict[tuple[str, str, str, int], list[torch.Tensor]] = {}
        self._calls = Counter[tuple[str, str]]()
        self._matrices = set[tuple[str, int, torch.Size]]()

    def add_matrix(self, module: str, weight: torch.Tensor) -> None:
        """Count a matrix once, of the several that a module of experts has."""
        key = module, weight.data_ptr(), weight.shape
        if key not in self._matrices:
            self._matrices.add(key)
            self.weights[module] = self.weights.get(module, 0) + weight.numel()

    def compute(self, module: str, product: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """`a @ b.T`, of matrices that share their second dimension: in float32, and of float64 in float64."""
        self._calls[module, product] += 1
        self.multiplications[module, product] += a.shape[0] * a.shape[1] * b.shape[0]
        recipe, empty = self.choice.get(module), not (a.numel() and b.numel())  # an expert may get no token
        if recipe is not None and recipe[product] is not None and not empty:
            return self._narrow(recipe, module, product, a, b)[0]
        wide = torch.promote_types(a.dtype, torch.float32)
        exact = a.to(wide) @ b.to(wide).T
        for recipe in self.observed:
            if recipe[product] is not None and not empty:
                self._compare(recipe, module, product, a, b, exact)
        return exact

    def _narrow(
        self, recipe: Recipe, module: str, product: str, a: torch.Tensor, b: torch.Tensor, *, shares: bool = False
    ) -> tuple[torch.Tensor, float, float]:
        operands = recipe[product]
        assert operands is not None
        seed = zlib.crc32(f"{module} {product} {self._calls[module, product]}".encode())
        casts = []
        for number, (x, operand) in enumerate(zip((a, b), operands, strict=True)):
            generator = torch.Generator(x.device).manual_seed(seed)
            if operand.hadamard:
                x = transformed(x, operand.hadamard, torch.Generator().manual_seed(seed))
            amax = self._earlier(operand, (recipe.name, module, product, number), x) if operand.history else None
            casts.append(cast(x, operand, amax=amax, generator=generator, shares=shares))
        saturated, flushed = (max(values) for values in zip(*(c[1:] for c in casts), strict=True))
        return casts[0].values @ casts[1].values.T, saturated, flushed

    def _earlier(self, operand: Operand, key: tuple[str, str, str, int], x: torch.Tensor) -> torch.Tensor:
        """The largest amax of the calls before this one; of the first call its own."""
        history = self._amax.setdefault(key, [])
        now = x.abs().amax()
        largest = torch.stack(history).amax() if history else now
        history.append(now)
        del history[: -operand.history]
        return largest

    def _compare(
        self, recipe: Recipe, module: str, product: str, a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor
    ) -> None:
        narrow, saturated, flushed = self._narrow(recipe, module, product, a, b, shares=True)
        size, error = exact.double().square().sum(1), (narrow - exact).double().square().sum(1)
        rows = size > 0
        if not rows.any():
            return
        noise, of_rows = (error.sum() / size.sum()).sqrt(), (error[rows] / size[rows]).sqrt().median()
        loss = ProductLoss(float(noise), float(of_rows), saturated, flushed)
        key = recipe.name, module, product
        if key not in self.losses or not loss.noise <= self.losses[key].noise:
            self.losses[key] = loss


class _Linear(torch.autograd.Function):
    """`input @ weight.T` and its gradients by `Products`; the results have the dtypes of the run."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, products: Products, module: str) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.products, ctx.module = products, module
        with _plain(input.device.type):
            output = products.compute(module, "forward", input.reshape(-1, input.shape[-1]), weight)
        return output.to(input.dtype).reshape(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        input, weight = ctx.saved_tensors
        grad, rows = gradients[0].reshape(-1, weight.shape[0]), input.reshape(-1, input.shape[-1])
        of_input = of_weight = None
        with _plain(input.device.type):
            if ctx.needs_input_grad[0]:
                of_input = ctx.products.compute(ctx.module, "grad_input", grad, weight.T)
                of_input = of_input.to(input.dtype).reshape(input.shape)
            if ctx.needs_input_grad[1]:
                of_weight = ctx.products.compute(ctx.module, "grad_weight", grad.T, rows.T).to(weight.dtype)
        return of_input, of_weight, None, None


@contextmanager
def _plain(device: str) -> Iterator[None]:
    """Inside, autocast leaves the emulation alone; no layer runs in a backward pass, nor while the mode handles one."""
    with torch.no_grad(), torch.autocast(device, enabled=False):
        yield


class LinearMode(TorchFunctionMode):
    """Inside, the linear layers of a model compute by `Products`.

    layers: of these modules alone, None for all.
    """

    def __init__(self, model: torch.nn.Module, products: Products) -> None:
        super().__init__()
        self._model, self._products = model, products
        self._running: list[tuple[str, Collection[int]]] = []
        self._stack = ExitStack()

    def __enter__(self) -> LinearMode:
        for name, module in self._model.named_modules():
            own = {id(parameter) for parameter in module.parameters(recurse=False)}
            self._stack.callback(module.register_forward_pre_hook(self._enters(name, own), prepend=True).remove)
            self._stack.callback(module.register_forward_hook(self._leaves, always_call=True).remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._stack.close()

    def _enters(self, name: str, own: Collection[int]) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._running.append((name, own))

        return enter

    def _leaves(self, *_: object) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _LINEAR:
            return self._linear(*args, **kwargs)
        if func in _ADDMM and not kwargs and self._is_own(args[2]):
            return self._linear(args[1], args[2].T, args[0])
        if func in _MATMUL and not kwargs and self._is_own(args[1]):
            return self._linear(args[0], args[1].T)
        if func in _BATCHED and any(self._is_own(arg, dims=3) for arg in args):
            self._products.unseen["batched products of weights"] += 1
        return func(*args, **kwargs)

    def _is_own(self, value: object, dims: int = 2) -> bool:
        """Whether a matrix is a parameter of the module that runs."""
        own = self._running[-1][1] if self._running else ()
        return isinstance(value, torch.Tensor) and value.dim() == dims and id(value) in own

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        device, matrix = input.device.type, weight
        if torch.is_autocast_enabled(device) and input.is_floating_point() and input.dtype is not torch.float64:
            input, weight = (t.to(torch.get_autocast_dtype(device)) for t in (input, weight))
        if weight.dim() != 2 or not self._running or input.dtype is not weight.dtype or not input.is_floating_point():
            return _LINEAR(input, weight, bias)
        module = self._running[-1][0]
        self._products.add_matrix(module, matrix)
        output: torch.Tensor = _Linear.apply(input, weight, self._products, module)  # type: ignore[no-untyped-call]
        return output if bias is None else output + bias.to(output.dtype)
