"""A backend of one's own returns float16 where eager mode returns float32.

Run: ampcheck audit failing.py:subject
"""

import torch


def backend(graph, inputs):
    def run(*arguments):
        return tuple(output.half() for output in graph(*arguments))

    return run


def subject():
    return torch.compile(lambda x: x * 2, backend=backend), [(torch.ones(4),)]
