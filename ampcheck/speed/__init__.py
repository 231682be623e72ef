"""Does it pay, and since when? Paired measurement, verdicts with intervals, start-up, history and trend."""
