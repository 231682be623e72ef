"""The graph runs as it was traced."""

import torch


def backend(graph, inputs):
    def run(*arguments):
        return tuple(graph(*arguments))

    return run


def subject():
    return torch.compile(lambda x: x * 2, backend=backend), [(torch.ones(4),)]
