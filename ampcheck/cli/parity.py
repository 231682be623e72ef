"""`ampcheck parity` and `ampcheck record`: two executions compared, in one process or by files. No numerics here."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ampcheck.cli.output import EXIT_CODES, Commands, add_output, finish, print_report, require_writable
from ampcheck.core.arguments import parse_number
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Run
from ampcheck.core.settings import load_settings
from ampcheck.outcome.accept import accept

_TARGET = (
    "package.module:function or path/to/file.py:function, which returns (module, args) and is called inside the "
    "comparison; or a file of ampcheck record"
)

_CLIP = 0.2


def add_command(commands: Commands) -> None:
    """Add `parity` and `record` to the parser's commands."""
    summary = "compare two executions that should agree, by bounds that follow from their own roundings"
    parity = commands.add_parser(
        "parity",
        help=summary,
        description=f"{summary.capitalize()}: two implementations, a model and its port, a trainer and an inference "
        f"engine. Names the first ops at which they part. {EXIT_CODES}",
    )
    parity.add_argument("a", metavar="A", help=_TARGET)
    parity.add_argument("b", metavar="B", help="the same")
    parity.add_argument(
        "--relation",
        choices=("rounding", "function", "bitwise"),
        default="rounding",
        help="rounding: one function, each side within its own bound; function: one function; bitwise: equal bits "
        "(default: %(default)s)",
    )
    parity.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="A=B",
        help="a module of A and that of B whose results are compared as well, by their paths; may be repeated",
    )
    parity.add_argument(
        "--tokens",
        nargs="?",
        const="",
        metavar="OUTPUT",
        help="an output of log-probabilities, by its path, that is compared token by token; alone the only one",
    )
    parity.add_argument(
        "--clip",
        type=float,
        metavar="E",
        help=f"with --tokens: count ratios of probabilities outside of 1 ± E (default: {_CLIP})",
    )
    _add_circumstances(parity)
    add_output(parity, kind="parity", verbose="print every finding, and how far each result is from float64")
    parity.set_defaults(command=_parity)
    record = commands.add_parser(
        "record",
        help="record an execution for ampcheck parity: inputs, results, exact values and bounds",
        description="Run a target once, and write its results, their exact values and bounds to a file, with which "
        "another process, release or machine is compared.",
    )
    record.add_argument("target", metavar="TARGET", help=_TARGET.partition(";")[0])
    record.add_argument("-o", "--output", required=True, metavar="FILE.npz", help="where to write")
    _add_circumstances(record)
    record.set_defaults(command=_record)


def _add_circumstances(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dtype", choices=("float16", "bfloat16"), help="run under autocast to this dtype")
    command.add_argument(
        "--backward", action=argparse.BooleanOptionalAction, default=True, help="compare gradients too"
    )


def _parity(options: argparse.Namespace) -> int:
    pairs = dict(_pair(text) for text in options.module)
    if options.clip is not None and options.tokens is None:
        raise UsageError("--clip is about the ratios of --tokens: add it, or leave --clip out")
    if options.a.endswith(".npz") and options.b.endswith(".npz") and (pairs or options.dtype or not options.backward):
        raise UsageError("--module, --dtype and --no-backward are of what runs; A and B are recorded: leave them out")
    from ampcheck.parity.assert_parity import judge_parity, sides_of
    from ampcheck.parity.tokens import Tokens

    a, b = sides_of(options.a, options.b, modules=pairs, dtype=options.dtype, backward=options.backward)
    name = f"{options.a} and {options.b}"
    tokens = (
        None
        if options.tokens is None
        else Tokens(options.tokens, _CLIP if options.clip is None else parse_number(options.clip, "--clip"))
    )
    run: Run = accept(judge_parity(a, b, relation=options.relation, tokens=tokens, name=name), load_settings())
    tables = run.tables if options.verbose else run.tables[: options.tokens is not None]
    return finish(run, options, lambda: print_report(run, tables, verbose=options.verbose))


def _record(options: argparse.Namespace) -> int:
    if not options.output.endswith(".npz"):
        raise UsageError(f"--output names a file that ends with .npz; found {options.output}")
    require_writable(output=options.output)
    from ampcheck.parity.assert_parity import sides_of
    from ampcheck.parity.calls import Side
    from ampcheck.parity.recorded import record, save_record

    side, _ = sides_of(options.target, options.target, dtype=options.dtype, backward=options.backward)
    if not isinstance(side, Side):
        raise UsageError(f"{options.target} is recorded already")
    recorded = record(replace(side, name=options.target))
    if not recorded.run.results:
        raise UsageError(f"{options.target} returns no tensor: there is nothing to record")
    save_record(recorded, options.output)
    wrong = f"; {recorded.failures[0].message}" if recorded.failures else ""
    print(f"{options.output}: {len(recorded.run.results)} results of {options.target}{wrong}", flush=True)
    return 0


def _pair(text: str) -> tuple[str, str]:
    a, separator, b = text.partition("=")
    if not separator:
        raise UsageError(f"--module takes a path of A and one of B, such as encoder.0=blocks.0; found {text!r}")
    return a, b
