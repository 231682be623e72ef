"""The pytest plugin: options, marker, the fixture `speed` and the summary."""
