"""`ampcheck policy`: show, compare and explain what autocast does to each op. Nothing here knows the rules."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ampcheck.errors import UsageError


def add_commands(commands: Any) -> None:
    """Add `policy` and what stands below it to the parser's commands."""
    policy = commands.add_parser("policy", help="what autocast does to each op, per device and PyTorch release")
    below = policy.add_subparsers(title="commands", metavar="COMMAND", required=True)

    snapshot = below.add_parser(
        "snapshot",
        help="write the policy of the installed PyTorch, all devices, as JSON",
        description="Write the policy of the installed PyTorch on every device that it knows as JSON.",
    )
    snapshot.add_argument("path", nargs="?", metavar="PATH", help="default: torch-X.Y.json in the working directory")
    snapshot.set_defaults(command=_snapshot)


def _snapshot(options: argparse.Namespace) -> int:
    from ampcheck.autocast.probe import take_snapshot

    taken = take_snapshot()
    path = Path(options.path or f"torch-{taken.release}.json")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}")
    taken.save(path)
    for device, held in taken.policies.items():
        for dtype, policy in held.items():
            print(f"{device:14} {dtype:9} {len(policy.ops)} of {policy.registered} overloads, {policy.counts()}")
            for op, reason in policy.unprobed.items():
                print(f"{'':24} not probed: {op}: {reason}")
    print(f"wrote {path}: PyTorch {taken.torch}, {taken.build}, {taken.platform}")
    return 0
