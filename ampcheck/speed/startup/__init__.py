"""The cost of a compiled start: fresh processes with empty caches, warm caches and artifacts, and the break-even."""
