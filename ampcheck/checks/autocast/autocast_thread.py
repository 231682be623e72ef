"""Requires: A thread that was started inside a region computes in the region's dtype, unless it chose another one
itself.

Measured: Instances of threading.Thread and tasks of ThreadPoolExecutor are followed. An op counts when autocast of the
starting thread would have cast its inputs. A torch.autocast without dtype chooses no dtype. Threads of other pools are
followed only where they are started inside.

Causes: Autocast's state belongs to one thread: a new one starts with it off, and torch.nn.parallel.parallel_apply
passes it on without the dtype.

Fix: Enter torch.autocast(device, dtype=...) inside the thread's function.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampcheck.checks.autocast import clean, names, recast
from ampcheck.core.check import Check
from ampcheck.core.limits import Limits
from ampcheck.core.run import Finding
from ampcheck.core.subject import Kind
from ampcheck.records.autocast import GuardStats

CHECK = Check(
    "autocast-thread",
    "autocast",
    __doc__,
    unit="places",
    subjects=(Kind.TRAINING, Kind.CALL),
    needs=("GuardStats",),
    order=308,
    evidence=("docs/examples/checks/autocast-thread",),
)


def check(stats: GuardStats, limits: Limits) -> Iterator[Finding]:
    """A thread computes in the dtype of the thread that started it, unless it chose another."""
    calls = recast(stats, "thread")
    if not calls:
        reason = "no thread that was started under autocast ran an op"
        yield clean(CHECK, stats, "thread ops", reason)
        return
    call = calls[0][0]
    now = call.now.dtype if call.now is not None else None
    autocast = "with autocast off" if now is None else f"with autocast to {now}, the default"
    others = f" (and {len(calls) - 1} other places)" if len(calls) > 1 else ""
    message = (
        f"a thread must compute as the one that started it, but {call.op} ran on {names(call.dtypes)} {autocast}"
        f"{others}; autocast to {call.state.dtype} was on where the thread was started, under which it computes "
        f"in {call.expected}. The state of autocast belongs to one thread"
    )
    hint = f"enter torch.autocast({call.state.device!r}, dtype={call.state.dtype}) inside the thread's function"
    yield CHECK.fail(stats.subject, message, where=call.where, observed=len(calls), limit=0, hint=hint)
