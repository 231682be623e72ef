"""`ampcheck audit`: judge a model or a training loop."""

from __future__ import annotations

import argparse
import os

from ampcheck.cli.output import (
    EXIT_CODES,
    Commands,
    add_output,
    add_subject,
    finish,
    load_placed,
    print_report,
    require_writable,
    split_names,
)
from ampcheck.core.errors import UsageError


def add_command(commands: Commands) -> None:
    """Add `audit` to the parser's commands."""
    summary = "judge a model in low precision, eager and compiled, forward and backward; or a training loop"
    audit = commands.add_parser("audit", help=summary, description=f"{summary.capitalize()}. {EXIT_CODES}")
    add_subject(
        audit,
        nargs="?",
        target="package.module:factory or path/to/file.py:factory; the factory returns (module, args), or for a "
        "training loop {'model', 'optimizer', 'scaler', 'step'}. A function that trains and returns nothing, such as "
        "train.py:main, is judged as it runs. Default: the built-in demo",
        dtype="dtypes of autocast, separated by commas (default: float16,bfloat16). 16-bit models "
        "always run in their own dtype; subjects with a list of calls or blocks do so if --dtype is omitted",
    )
    audit.add_argument("--steps", type=int, metavar="N", help="steps of a training loop to observe")
    audit.add_argument("--no-compile", action="store_true", help="do not run torch.compile")
    add_output(audit)
    audit.set_defaults(command=_audit)


def _audit(options: argparse.Namespace) -> int:
    dtypes = None if options.dtype is None else split_names(options.dtype)
    if dtypes == []:
        raise UsageError(f"--dtype names dtypes of autocast, such as float16,bfloat16; found {options.dtype!r}")
    require_writable(html=options.html, json=options.json)

    from ampcheck.report import progress_bar

    with progress_bar() as progress:
        progress("loading torch and the subject", 0, 1)
        from ampcheck import demo
        from ampcheck.audit import audit

        run = audit(
            demo.subject() if options.target is None else load_placed(options, trains=True),
            device=options.device,
            dtype=dtypes,
            compile=not options.no_compile,
            steps=options.steps,
            progress=progress,
        )
    if "RANK" in os.environ:  # torchrun: rank 0 reports the findings of all ranks
        from ampcheck.training.distributed.ranks import gather_runs

        gathered = gather_runs(run)
        if gathered is None:
            return 0
        run = gathered
    return finish(run, options, lambda: print_report(run, verbose=options.verbose))
