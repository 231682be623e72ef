"""The history of measurements, each with its time, commit and machine: JSON lines that are only ever appended."""
