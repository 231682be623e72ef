"""`ampcheck whatif`: what a model would lose in narrow formats, and which layers to keep. No numerics here."""

from __future__ import annotations

import argparse

from ampcheck.cli.output import EXIT_CODES, Commands, add_output, finish, print_report, split_names
from ampcheck.core.arguments import parse_integer
from ampcheck.core.settings import load_settings
from ampcheck.outcome.accept import accept
from ampcheck.report import progress_bar
from ampcheck.target import load_placed


def add_command(commands: Commands) -> None:
    """Add `whatif` to the parser's commands."""
    summary = "what a model would lose in float8, MXFP8 or NVFP4, and which layers to keep in 16 bits"
    whatif = commands.add_parser(
        "whatif",
        help=summary,
        description="Emulate recipes of narrow formats in the linear layers of a model, forward and backward: "
        f"{summary}. It warns, and fails nothing. {EXIT_CODES}",
    )
    whatif.add_argument(
        "target",
        metavar="TARGET",
        help="package.module:function or path/to/file.py:function, which returns (module, args) or trains; or an "
        "architecture, built small with random weights, such as transformers:LlamaForCausalLM",
    )
    whatif.add_argument(
        "--recipe",
        default="rowwise,mxfp8,nvfp4",
        metavar="NAMES",
        help="recipes, separated by commas: tensorwise, rowwise, rowwise_with_gw_hp, mxfp8, mxfp4, nvfp4 of torchao; "
        "delayed, current, te-blockwise, te-mxfp8, te-nvfp4 of TransformerEngine; blockwise of DeepSeek (default: "
        "%(default)s)",
    )
    whatif.add_argument(
        "--budget",
        type=float,
        metavar="BITS",
        help="print the filter for torchao of the layers to convert with at most so many bits per weight",
    )
    whatif.add_argument(
        "--front",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure each layer alone, and which to keep: a run for each layer and recipe",
    )
    whatif.add_argument(
        "--steps", type=int, default=20, metavar="N", help="of training: steps of each run (default: %(default)s)"
    )
    whatif.add_argument("--dtype", choices=("float16", "bfloat16"), help="run under autocast to this dtype")
    add_output(whatif, kind="whatif", verbose="print every finding, the layers in each recipe and the front")
    whatif.set_defaults(command=_whatif)


def _whatif(options: argparse.Namespace) -> int:
    from ampcheck.records.whatif import WhatIf
    from ampcheck.whatif.report import filter_text, run_of
    from ampcheck.whatif.run import measure_either

    parse_integer(options.steps, "--steps")
    with progress_bar() as progress:
        what = measure_either(
            load_placed(options.target, "cpu", trains=True),
            split_names(options.recipe),
            front=options.front,
            budget=options.budget,
            dtype=options.dtype,
            steps=options.steps,
            progress=progress,
        )
    run = accept(run_of(what), load_settings())
    tables = (
        run.tables if options.verbose else run.tables[:1] + run.tables[-1:] * bool(run.charts and len(run.tables) > 1)
    )

    def show() -> None:
        print_report(run, tables, verbose=options.verbose)
        if options.budget is not None and isinstance(what, WhatIf):
            print()
            print(filter_text(what, options.budget) or f"# no choice fits into {options.budget:g} bits per weight")

    return finish(run, options, show)
