"""Consequences of the lack of each private name of PyTorch that `torchtools` uses, and which releases have it.

`python benchmarks/contract.py` writes contract.md from this and from the sources, and
tests/contract/test_private_names.py asks the installed PyTorch for every name.
"""

from __future__ import annotations

_WITHOUT = {
    "ampcheck cannot be imported": "_C._disabled_torch_dispatch_impl _C._TorchDispatchModeKey _C._get_dispatch_mode "
    "_C._AutoDispatchBelowAutograd _C._ExcludeDispatchKeyGuard _C._dispatch_has_kernel _C._current_graph_task_id "
    "_C._dispatch_has_kernel_for_dispatch_key _C._functorch.is_functorch_wrapped_tensor _C.DispatchKey "
    "_C.DispatchKeySet _C._dynamo.eval_frame _C._dynamo.eval_frame.set_eval_frame _ops.HigherOrderOperator "
    "_ops.OpOverload _subclasses.fake_tensor.FakeTensor autograd.graph._engine_run_backward ops.aten._to_copy "
    "ops.aten._local_scalar_dense.default utils._device utils._python_dispatch _tensor_str.PRINT_OPTS "
    "utils._python_dispatch.TorchDispatchMode utils._python_dispatch._disable_current_modes "
    "utils._python_dispatch._get_current_dispatch_mode utils._python_dispatch._get_current_dispatch_mode_stack",
    "no run is followed in float64": "autograd._get_sequence_nr _C._RestorePythonTLSSnapshot "
    "_C._dispatch_tls_local_exclude_set _C._dispatch_tls_local_include_set _C._ForceDispatchKeyGuard "
    "_C._storage_Use_Count jit._builtins._find_builtin jit._builtins._register_builtin "
    "jit._builtins._get_builtin_table",
    "ops of other threads, and those inside of others, are not followed": "utils._python_dispatch._push_mode "
    "utils._python_dispatch._pop_mode",
    "training loops are not judged": "_C._functorch.peek_interpreter_stack",
    "no backward pass is followed in float64": "_C._current_autograd_node",
    "no gradient is compared": "autograd._engine_run_backward",
    "under PyTorch 2.6 a default device that was never chosen is not restored": "_GLOBAL_DEVICE_CONTEXT",
    "changed settings of the compiler are not restored": "fx.experimental._config",
    "an export inside of a watch captures ampcheck's own functions": "export._trace",
    "errors of the compiler count as the model's": "_inductor _functorch",
    "autocast's policy is neither probed nor compared": "_C._dispatch_dump _dispatch.python.enable_python_dispatcher "
    "_C._dispatch_get_registrations_for_dispatch_key _ops.resolve_key _C._get_privateuse1_backend_name "
    "Tensor._make_subclass utils._pytree.tree_leaves xpu._is_compiled",
    "no other device's autocast is emulated, and the dtypes of compiled ops are not compared": "library._impls "
    "_C._dispatch_get_all_op_names _C._dispatch_keyset_full_after",
    "no device is emulated": "_C._nn._parse_to _VF._pack_padded_sequence _C.DisableTorchFunction "
    "overrides._get_current_function_mode_stack _guards.TracingContext.try_get serialization._get_restore_location "
    "_subclasses.meta_utils.MetaTensorDescriber utils._device.CURRENT_DEVICE utils._device.DeviceContext "
    "utils._device._device_constructors",
    "ampcheck cannot distinguish casts that a backward pass repeats": "nn.Module._call_impl.__code__ "
    "_C._autograd._get_current_graph_task_keep_graph",
    "a transformed tensor (vmap, grad) has no statistics": "_C._functorch.get_unwrapped",
    "a subclass of tensors has no statistics": "_C.DisableTorchFunctionSubclass",
    "results that are subclasses of tensors are not compared": "utils._python_dispatch.is_traceable_wrapper_subclass",
    "statistics inside of compiled graphs are not taken": "_C._DisableAutocast",
    "ops on such tensors are not followed": "_efficientzerotensor _neg_view _nested_view_from_buffer",
    "flex_attention is not followed": "_higher_order_ops.flex_attention.sdpa_dense "
    "_higher_order_ops.flex_attention.sdpa_dense_backward",
    "casts in packed collectives are not followed": "_chunk_cat",
    "collectives are not followed": "_C._distributed_c10d.Work.unbox ops._c10d_functional.wait_tensor",
    "sampled updates have no norms": "_foreach_sub_ _foreach_norm",
    "compiled graphs are not intercepted: their telemetry and blame are skipped": "_guards.TracingContext "
    "_guards.TracingContext.report_output_strides _guards.CompileContext _guards.compile_context _guards.tracing "
    "_inductor.compile_fx _inductor.compile_fx.compile_fx _inductor.compile_fx.compile_fx_inner _inductor.config "
    "_inductor.config.patch _inductor.config.get_config_copy _functorch.config _functorch.config.patch",
    "nothing is compiled for a comparison": "_dynamo _dynamo.config _dynamo.eval_frame _dynamo.lookup_backend "
    "_inductor.runtime.runtime_utils",
    "compiled code is not run with caches of its own": "_inductor.utils _inductor.utils.clear_inductor_caches",
    "graph breaks, recompiles and caches are not judged": "_dynamo.utils _dynamo.utils.CompilationMetrics "
    "_dynamo.utils.counters _logging._internal.trace_log",
    "compile times are not measured": "_dynamo.utils.calculate_time_spent",
    "generated kernels are not counted": "_inductor.metrics _inductor.metrics.generated_kernel_count",
    "a code object is compiled though a mode runs": "_C._dynamo.eval_frame.set_code_exec_strategy "
    "_C._dynamo.eval_frame._FrameAction _C._dynamo.eval_frame._FrameExecStrategy",
    "hits of Inductor's cache raise outside of a compilation": "_dynamo.utils.get_metrics_context",
    "higher-order ops raise under a mode": "utils._python_dispatch._pop_mode_temporarily",
    "calls of compiled code inside of higher-order ops count twice": "_higher_order_ops.utils",
}

WITHOUT = {name: what for what, names in _WITHOUT.items() for name in names.split()}
"""Consequence of the lack of each name of `torch`."""
