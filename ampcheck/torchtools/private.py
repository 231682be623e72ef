"""PyTorch's private names that the rest of ampcheck uses, by plain names; contract.md has what happens without each.

What ampcheck cannot work without fails here where a PyTorch lacks it. Other names are `_optional`: one that is gone
raises `MissingNameError` where it is used, and what needs it is skipped with that reason. All are bound as they are,
without a function around them, since many are called for each op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from types import CodeType
from typing import Any, NoReturn

import torch
from torch._C import DispatchKey as DispatchKey
from torch._C import DispatchKeySet as DispatchKeySet
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.utils import _device, _python_dispatch

from ampcheck.core.errors import UsageError


class MissingNameError(UsageError):
    """This PyTorch lacks a private name."""


class _Missing:
    def __init__(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        from ampcheck.torchtools.contract import WITHOUT

        return f"PyTorch {torch.__version__} has no torch.{self._name}: {WITHOUT[self._name]}"

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise MissingNameError(str(self))

    def __getattr__(self, name: str) -> NoReturn:
        self()


def _optional(name: str) -> Any:
    try:
        return attrgetter(name)(torch)
    except AttributeError:
        return _Missing(name)


# Dispatch: keys, kernels and modes
Guard = Callable[..., Any]
NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
"""`__torch_dispatch__` of tensors and of subclasses that define none."""
TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))
"""The kinds of modes under which ops are recorded and not run, as `mode_of_kind` takes them."""
without_modes = _python_dispatch._disable_current_modes
current_mode = _python_dispatch._get_current_dispatch_mode
mode_stack = _python_dispatch._get_current_dispatch_mode_stack
mode_of_kind = torch._C._get_dispatch_mode
below_autograd = torch._C._AutoDispatchBelowAutograd
excluding_keys = torch._C._ExcludeDispatchKeyGuard
has_kernel = torch._C._dispatch_has_kernel
has_kernel_for = torch._C._dispatch_has_kernel_for_dispatch_key
op_names: Callable[[], list[str]] = _optional("_C._dispatch_get_all_op_names")
registrations: Callable[[str], list[str]] = _optional("_C._dispatch_get_registrations_for_dispatch_key")
describe_kernels: Callable[[str], str] = _optional("_C._dispatch_dump")
keys_below: Callable[[DispatchKey], DispatchKeySet] = _optional("_C._dispatch_keyset_full_after")
included_keys: Callable[[], DispatchKeySet] = _optional("_C._dispatch_tls_local_include_set")
excluded_keys: Callable[[], DispatchKeySet] = _optional("_C._dispatch_tls_local_exclude_set")
forcing_keys: Guard = _optional("_C._ForceDispatchKeyGuard")
state_of_caller: Guard = _optional("_C._RestorePythonTLSSnapshot")
"""The dispatcher's state as it was when the user's code called the op that a mode sees."""
python_dispatcher: Guard = _optional("_dispatch.python.enable_python_dispatcher")
resolve_key: Callable[..., Any] = _optional("_ops.resolve_key")
without_autocast: Guard = _optional("_C._DisableAutocast")
without_torch_function: Guard = _optional("_C.DisableTorchFunction")
without_subclass_function: Guard = _optional("_C.DisableTorchFunctionSubclass")
function_modes: Callable[[], list[object]] = _optional("overrides._get_current_function_mode_stack")
renamed_backend: Callable[[], str] = _optional("_C._get_privateuse1_backend_name")
library_kernels: set[str] = _optional("library._impls")

# The autograd engine
backward_task = torch._C._current_graph_task_id
"""The number of the backward pass that this thread runs; -1 outside of one."""
backward_node: Callable[[], Any] = _optional("_C._current_autograd_node")
sequence_number: Callable[[], int] = _optional("autograd._get_sequence_nr")
backward_keeps_graph: Callable[[], bool] = _optional("_C._autograd._get_current_graph_task_keep_graph")


def run_backward(*args: Any, **kwargs: Any) -> Any:
    """The engine's entry, looked up at each call: `stream` and `autocast.placement` replace it."""
    return torch.autograd._engine_run_backward(*args, **kwargs)  # type: ignore[attr-defined]


# Tensors
is_transformed_tensor = torch._C._functorch.is_functorch_wrapped_tensor
transformed_from: Callable[[torch.Tensor], torch.Tensor] = _optional("_C._functorch.get_unwrapped")
transforms: Callable[[], list[Any] | None] = _optional("_C._functorch.peek_interpreter_stack")
is_traceable_subclass: Callable[[object], bool] = _optional("utils._python_dispatch.is_traceable_wrapper_subclass")
make_subclass: Callable[..., Any] = _optional("Tensor._make_subclass")
MetaTensorDescriber: Any = _optional("_subclasses.meta_utils.MetaTensorDescriber")
storage_users: Callable[[int], int] = _optional("_C._storage_Use_Count")
restore_location: Callable[..., Any] = _optional("serialization._get_restore_location")
tree_leaves: Callable[[Any], list[Any]] = _optional("utils._pytree.tree_leaves")

# Ops
CAST = torch.ops.aten._to_copy
READ_NUMBER = torch.ops.aten._local_scalar_dense.default
chunk_cat: Callable[..., torch.Tensor] = _optional("_chunk_cat")
efficient_zeros: Callable[..., torch.Tensor] = _optional("_efficientzerotensor")
negative_view: Callable[[torch.Tensor], torch.Tensor] = _optional("_neg_view")
nested_view: Callable[..., torch.Tensor] = _optional("_nested_view_from_buffer")
foreach_subtract: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] = _optional("_foreach_sub_")
foreach_norm: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] = _optional("_foreach_norm")
pack_padded_sequence: Callable[..., Any] = _optional("_VF._pack_padded_sequence")


def flex_attention(*args: Any, **kwargs: Any) -> Any:
    """The op of `flex_attention` in plain ops. Its import takes most of the compiler along."""
    from torch._higher_order_ops.flex_attention import sdpa_dense

    return sdpa_dense(*args, **kwargs)


def flex_attention_backward(*args: Any, **kwargs: Any) -> Any:
    """Its backward pass in plain ops."""
    from torch._higher_order_ops.flex_attention import sdpa_dense_backward

    return sdpa_dense_backward(*args, **kwargs)


# Devices, modules, TorchScript, the compiler
DeviceContext: Any = _optional("utils._device.DeviceContext")
device_constructors: Callable[[], set[Any]] = _optional("utils._device._device_constructors")
parse_to: Callable[..., Any] = _optional("_C._nn._parse_to")
xpu_is_compiled: Callable[[], bool] = _optional("xpu._is_compiled")
MODULE_CALL: CodeType = _optional("nn.Module._call_impl.__code__")
scripted_op: Callable[[object], str | None] = _optional("jit._builtins._find_builtin")
register_scripted_op: Callable[[object, str], None] = _optional("jit._builtins._register_builtin")
scripted_ops: Callable[[], dict[int, str]] = _optional("jit._builtins._get_builtin_table")
tracing_context: Callable[[], Any] = _optional("_guards.TracingContext.try_get")


def default_device() -> object:
    """The device of `torch.set_default_device` or of the innermost `with torch.device(...)`, itself; None without."""
    return _device.CURRENT_DEVICE


def lack_of(names: Sequence[object]) -> str:
    """Why what needs these names cannot run under this PyTorch; "" where it has all of them."""
    return next((str(name) for name in names if isinstance(name, _Missing)), "")
