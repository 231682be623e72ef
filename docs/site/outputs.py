"""Write the output that the documentation shows: `python docs/site/outputs.py [PAGE ...]`.

Every page is run in a folder of its own, and each block below `<!-- output -->` becomes what the snippet before it
printed. A block that differs in numbers alone is not changed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from snippets import pages, run_page, with_outputs


def main(names: list[str]) -> int:
    """Run the pages with these paths, or all; return 1 if a snippet failed."""
    failed = 0
    for page in [Path(name).resolve() for name in names] or pages():
        with tempfile.TemporaryDirectory() as folder:
            results, shown = run_page(page, Path(folder))
        page.write_text(with_outputs(page, shown), encoding="utf-8")
        for result in results:
            if result.failed:
                failed = 1
                print(result)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
