"""What is noted of a memory goes with it."""

from __future__ import annotations

import gc

import torch

from ampcheck.facts.store import StorageMap


def test_all_views_of_one_memory_have_one_value():
    noted, tensor = StorageMap[str](), torch.zeros(4)
    noted.put(tensor[1:], "value")
    assert noted.get(tensor) == noted.get(tensor.view(torch.int32)) == noted.get(tensor.untyped_storage()) == "value"
    assert noted.get(tensor.clone()) is None
    assert [(storage.nbytes(), value) for storage, value in noted] == [(16, "value")]
    assert noted.pop(tensor) == "value"
    assert noted.pop(tensor) is None


def test_a_value_goes_with_its_storage_and_never_to_the_next_one_at_its_place():
    noted = StorageMap[int]()
    for number in range(100):
        tensor = torch.zeros(64)
        assert noted.get(tensor) is None
        noted.put(tensor, number)
        noted.put(tensor, number + 1)
        assert noted.get(tensor) == number + 1
    del tensor
    gc.collect()
    assert len(noted) == 0


def test_what_has_no_storage_has_no_value():
    noted = StorageMap[int]()
    for key in (None, 3, torch.eye(2).to_sparse()):
        noted.put(key, 1)
        assert noted.get(key) is None
        assert noted.pop(key) is None
    assert len(noted) == 0
