"""`ampcheck policy`: show, compare and explain what autocast does to each op, and lock the ops of a model."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ampcheck.autocast.drift import shipped_devices
from ampcheck.autocast.policy import releases
from ampcheck.autocast.views import counts_view, diff_view, explain_view, known_best, policy_view, source_of
from ampcheck.cli.output import Commands, Stdout, add_output, finish, print_report, split_names
from ampcheck.core.arguments import LOW
from ampcheck.core.errors import UsageError
from ampcheck.core.run import Scalar, Table
from ampcheck.core.subject import TARGET_FORMS
from ampcheck.report import print_tables
from ampcheck.report.text import clean


def add_command(commands: Commands) -> None:
    """Add `policy` and its commands to the parser's commands."""
    policy = commands.add_parser("policy", help="what autocast does to each op, per device and PyTorch release")
    below = policy.add_subparsers(title="commands", metavar="COMMAND", required=True)

    snapshot = below.add_parser(
        "snapshot",
        help="write the policy of the installed PyTorch, all devices, as JSON",
        description="Write the policy of the installed PyTorch on every device that it knows as JSON.",
    )
    snapshot.add_argument("path", nargs="?", metavar="PATH", help="default: torch-X.Y.json in the working directory")
    snapshot.set_defaults(command=_snapshot)

    show = below.add_parser("show", help="what autocast does to each op, by rule, and how many ops were probed")
    show.add_argument("device", nargs="?", metavar="DEVICE", help="such as cuda; without it the ops are counted")
    _add_options(show, _show, default="the installed one")

    diff = below.add_parser(
        "diff",
        help="where two releases or two devices differ",
        description="Where two PyTorch releases or two devices differ. The exit code is 0 whether they do or not: this "
        "is a listing, and ampcheck.assert_policy is the judge.",
    )
    diff.add_argument("one", metavar="A", help="a release (2.6, or installed) or a device (cpu)")
    diff.add_argument("other", metavar="B", help="another release or another device")
    diff.add_argument("--device", help="where two releases are compared (default: each device that both know)")
    _add_options(diff, _diff, default="the installed one")

    explain = below.add_parser("explain", help="the rule of an op on every device, and since which release")
    explain.add_argument("op", metavar="OP", help="such as aten::norm.Scalar, layer_norm or torch.nn.functional.gelu")
    explain.add_argument("--device", metavar="DEVICE", help="on one device, such as cuda (default: on every one)")
    _add_options(explain, _explain, default="that of the installed one")

    lock = below.add_parser(
        "lock",
        help="record which ops a model sends through autocast, and check that they stay",
        description="Record which ops a model sends through autocast, under which rule, in which dtypes and where, in "
        "ampcheck.lock.json next to its code. Exit code 0: written, or as locked; 1: findings; 2: usage error.",
    )
    lock.add_argument("target", metavar="TARGET", help=TARGET_FORMS)
    for option, default in (("--device", "cpu,cuda"), ("--dtype", "both")):
        meaning = f"separated by commas (default: {default}; with --check all that are locked)"
        lock.add_argument(option, metavar=f"{option[2:].upper()}S", help=meaning)
    lock.add_argument("--check", action="store_true", help="compare with the lock and write nothing")
    lock.add_argument("--path", metavar="PATH", help="the lock, a file or its folder (default: next to the code)")
    lock.add_argument(
        "--torch", metavar="RELEASE", help="with --check: what would differ under the policy of a release, such as 2.15"
    )
    add_output(lock, kind="policy")
    lock.set_defaults(command=_lock)


def _add_options(parser: Any, command: Callable[[argparse.Namespace], int], *, default: str) -> None:
    parser.add_argument("--torch", metavar="RELEASE", help=f"the policy of a release, such as 2.6 (default: {default})")
    parser.add_argument("--dtype", default="float16", help="what autocast casts to (default: %(default)s)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.set_defaults(command=command)


def _lock(options: argparse.Namespace) -> int:
    from ampcheck.autocast.locks.lock import DEVICES, LockTarget, compare_lock, write_lock

    if options.torch and not options.check:
        raise UsageError("a lock is made under the installed PyTorch: --torch goes with --check")
    devices, dtypes = split_names(options.device), split_names(options.dtype)
    target = LockTarget.of(options.target, options.path)
    if options.check:
        run = compare_lock(target, devices, dtypes, release=options.torch)
    else:
        run = write_lock(target, devices or DEVICES, dtypes or LOW)
    run = replace(run, title=f"policy of {target.entry}")

    def show() -> None:
        print_report(run, verbose=options.verbose)
        if not options.check:
            print(clean(f"lock: {target.file}, entry {target.entry}"))

    return finish(run, options, show)


def _snapshot(options: argparse.Namespace) -> int:
    from ampcheck.autocast.probe import take_snapshot

    snapshot = take_snapshot()
    path = Path(options.path or f"torch-{snapshot.release}.json")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}")
    snapshot.save(path)
    with Stdout() as out:
        for device, by_dtype in snapshot.policies.items():
            for dtype, policy in by_dtype.items():
                print(f"{device:14} {dtype:9} {len(policy.ops)} of {policy.registered} overloads, {policy.counts()}")
                for op, reason in policy.unprobed.items():
                    print(clean(f"{'':24} not probed: {op}: {reason}"))
        print(f"wrote {path}: PyTorch {snapshot.torch}, {snapshot.build}, {snapshot.platform}")
    return out.code()


def _show(options: argparse.Namespace) -> int:
    source = source_of(options.torch or "installed", options.dtype)
    view = policy_view(source, options.device) if options.device else counts_view(source)
    return _print(view.tables, view.data, options)


def _explain(options: argparse.Namespace) -> int:
    source = source_of(options.torch, options.dtype) if options.torch else known_best(options.dtype)
    view = explain_view(source, options.op, options.device)
    return _print(view.tables, view.data, options)


def _diff(options: argparse.Namespace) -> int:
    are_releases = {text == "installed" or re.match(r"\d", text) is not None for text in (options.one, options.other)}
    if len(are_releases) > 1:
        valid = f"two releases ({', '.join(releases())}, installed) or two devices ({', '.join(shipped_devices())})"
        raise UsageError(f"policy diff compares {valid}; found {options.one} and {options.other}")
    if are_releases == {False}:
        if options.device is not None:
            raise UsageError("--device is for two releases; two devices are compared with --torch RELEASE")
        source = source_of(options.torch or "installed", options.dtype)
        view = diff_view(source, source, options.one, options.other)
        return _print(view.tables, {"comparisons": [view.data]}, options)
    if options.torch is not None:
        raise UsageError("--torch is for two devices; two releases are compared with --device DEVICE")
    first, second = source_of(options.one, options.dtype), source_of(options.other, options.dtype)
    both = [device for device in first.devices if device in second.devices]
    views = [diff_view(first, second, device, device) for device in ([options.device] if options.device else both)]
    tables = [table for view in views for table in view.tables]
    for has, lacks in ((first, second), (second, first)) if not options.device else ():
        missing = [device for device in has.devices if device not in lacks.devices]
        tables += [Table(f"{device}: {has} has an autocast policy, {lacks} has none", (), ()) for device in missing]
    return _print(tables, {"comparisons": [view.data for view in views]}, options)


def _print(tables: Sequence[Table], data: Mapping[str, object], options: argparse.Namespace) -> int:
    with Stdout() as out:
        if options.json:
            print(json.dumps(data, indent=1))
        elif options.markdown:
            print("\n\n".join(map(_markdown, tables)))
        else:
            print_tables(tables)
    return out.code()


def _markdown(table: Table) -> str:
    def line(cells: Sequence[Scalar]) -> str:
        return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"

    parts = [f"### {table.title}"]
    if table.rows:
        rule = ["---:" if isinstance(cell, int) else "---" for cell in table.rows[0]]
        parts.append("\n".join([line(table.columns), line(rule), *map(line, table.rows)]))
    if table.note:
        parts.append("\n".join(f"- {note}" for note in table.note.splitlines()))
    return "\n\n".join(parts)
