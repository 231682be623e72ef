"""Peak memory counts the tensors of a step, to the byte."""

import threading

import pytest
import torch

from ampcheck.speed.memory import Peak, _of_system, allocated_memory, available_memory, peak_memory

MIB = 2**20


def test_a_planted_temporary_is_counted_to_the_byte():
    x = torch.zeros(MIB, dtype=torch.uint8)

    def step():
        y = x + 1  # 1 MiB, kept until the end
        torch.zeros(100 * MIB, dtype=torch.uint8)
        return y

    assert peak_memory(step) == Peak(101 * MIB)


def test_the_same_step_needs_the_same_each_time():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    x = torch.randn(32, 64)

    def step():
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    step()
    first = peak_memory(step)
    assert first.bytes > 4 * 32 * 256
    assert [peak_memory(step) for _ in range(3)] == [first] * 3


def test_memory_that_is_reused_counts_once():
    def step():
        for _ in range(5):
            torch.zeros(MIB, dtype=torch.uint8)

    assert peak_memory(step).bytes == MIB


@pytest.mark.parametrize(("frees_first", "needed"), [(True, 0), (False, 5 * MIB)])
def test_what_a_step_frees_of_what_the_last_one_left_is_known(frees_first, needed):
    held = []

    def step():
        if frees_first:
            held.clear()
        new = torch.zeros(5 * MIB, dtype=torch.uint8)
        held[:] = [new]

    step()
    assert peak_memory(step).bytes == needed


def test_a_step_without_tensors_needs_nothing():
    assert peak_memory(lambda: None).bytes == 0


def test_another_thread_is_not_seen():
    def step():
        thread = threading.Thread(target=lambda: torch.zeros(MIB))
        thread.start()
        thread.join()

    assert peak_memory(step).bytes == 0  # as the module says; if this fails PyTorch has learned it


def test_an_exception_of_the_step_is_raised_and_the_next_is_measured():
    def step():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        peak_memory(step)
    assert peak_memory(lambda: torch.zeros(MIB, dtype=torch.uint8)).bytes == MIB


def test_a_device_that_tells_nothing_is_told():
    assert peak_memory(lambda: None, device="meta") == Peak(
        None, reason="PyTorch does not report the peak memory of meta"
    )
    assert allocated_memory("meta") == 0


@pytest.mark.cuda
def test_a_temporary_on_the_gpu_is_counted():
    found = peak_memory(lambda: torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda"), device="cuda")
    assert found == Peak(64 * MIB)


class Accelerator:
    """Stands for `torch.cuda`, with 100 bytes of tensors and a pool of a CUDA graph in which 40 of 64 are free."""

    def __init__(self):
        self.segments = [
            {"device": 0, "segment_pool_id": (0, 0), "total_size": 1000, "allocated_size": 76},
            {"device": 0, "segment_pool_id": (0, 1), "total_size": 64, "allocated_size": 24},
            {"device": 1, "segment_pool_id": (0, 2), "total_size": 512, "allocated_size": 0},
        ]
        self.allocated = 100

    def memory_allocated(self, device):
        return self.allocated

    def max_memory_allocated(self, device):
        return self.allocated + 10

    def memory_reserved(self, device):
        return 1064

    def mem_get_info(self, device):
        return 5000, 80000

    def memory_snapshot(self):
        return self.segments

    def current_device(self):
        return 0

    def synchronize(self, device):
        pass

    def reset_peak_memory_stats(self, device):
        pass


def test_what_a_replay_computes_in_the_pool_of_its_graph_is_counted(monkeypatch):
    """A replay allocates nothing; the pool was filled when the graph was recorded, and is nobody else's."""
    accelerator = Accelerator()
    monkeypatch.setattr(torch, "cuda", accelerator)

    assert allocated_memory("cuda") == allocated_memory("cuda:0") == 140
    assert allocated_memory("cuda:1") == 100 + 512
    assert peak_memory(lambda: None, device="cuda", before=100).bytes == 50
    assert peak_memory(lambda: None, device="cuda").bytes == 10


def test_what_is_free_on_an_accelerator_is_told_with_what_its_allocator_keeps(monkeypatch):
    monkeypatch.setattr(torch, "cuda", Accelerator())

    assert available_memory("cuda") == 5000 + 1064 - 100
    assert available_memory("meta") is None


def test_what_is_free_on_a_cpu_is_what_linux_gives(tmp_path):
    table = tmp_path / "meminfo"
    table.write_text("MemTotal: 9 kB\nMemAvailable:    2 kB\n")

    assert _of_system(table) == 2048
    table.write_text("MemTotal: 9 kB\n")
    assert _of_system(table) is None
    assert _of_system(tmp_path / "none") is None
