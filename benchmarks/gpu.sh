#!/usr/bin/env bash
# Everything that needs a GPU, in order of worth: see gpu.py, which takes the same options.
#     bash benchmarks/gpu.sh [--minutes 40] [--zoo ../shared/zoo] [--out reports/evidence/gpu] [--dry-run]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python}" benchmarks/gpu.py "$@"
