"""The check of the outcome: whether what a repository accepts is still there."""

from ampcheck.catalog import declared

BASELINE = declared(
    "baseline",
    "outcome",
    "Every finding that the baseline accepts is still found, and none is older than the date until which it is "
    "accepted.",
    "The findings of an audit against the file that `ampcheck baseline` wrote, by check, subject, module, op, file and "
    "source line; line numbers may move. A finding is gone if its check judged its subject and did not report it.",
    "A defect was mended, or its line was rewritten.",
    "Run `ampcheck baseline --prune`, which removes what is gone and accepts nothing new.",
)
