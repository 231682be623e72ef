"""The pytest plugin: options, markers, the fixture `speed` and the summary."""
