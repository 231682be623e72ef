#!/usr/bin/env bash
# Run the command of ampcheck in $COMMAND with every report, and pass its exit code on as an output of the step.
set -euo pipefail

reports="$RUNNER_TEMP/ampcheck/reports"
rm -rf "$reports"
mkdir -p "$reports"
read -ra words <<< "$COMMAND"

code=0
ampcheck "${words[@]}" --html "$reports/run.html" --json "$reports/run.json" --sarif "$reports/run.sarif" \
  --markdown "$reports/run.md" || code=$?

written=false
if [[ -f "$reports/run.md" && -f "$reports/run.sarif" ]]; then
  written=true
fi
{
  echo "code=$code"
  echo "reports=$reports"
  echo "written=$written"
} >> "$GITHUB_OUTPUT"
