"""Hunt for defects in 16 bits in the public callables of packages, and keep what a person has confirmed.

python benchmarks/hunt.py PACKAGE... [--only PATTERN]     # candidates, ranked
python benchmarks/hunt.py --record FOLDER...              # write finding.json of reports/found/FOLDER
python benchmarks/hunt.py --table                         # write reports/found/README.md
python benchmarks/hunt.py --check [FOLDER...]             # run the repros: broken or mended in this release?
python benchmarks/hunt.py --packages                      # what the repros need from PyPI
"""

from __future__ import annotations

import argparse
import sys

import _found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="packages; with --record and --check, folders")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of the callables' names, such as '*Loss'")
    action = parser.add_mutually_exclusive_group()
    for name in ("record", "table", "check", "packages"):
        action.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    if options.table:
        (_found.FOUND / "README.md").write_text("\n".join(_found.table()) + "\n", encoding="utf-8")
    elif options.packages:
        print("\n".join(_found.distributions()))
    elif options.check:
        return int(_found.check_all(options.names) > 0)
    elif options.record:
        for folder in _found.folders(options.names):
            print(f"{folder.name}: {_found.write_record(folder)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
