"""Devices: what is absent is named before anything runs, and ``auto`` takes what there is."""

import pytest
import torch

from helpers.devices import require_dtype, resolve_device


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes torch believe in some hardware."""

    def pretend(cuda: int = 0, mps: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return pretend


def test_auto_is_the_cpu_where_there_is_nothing_else(machine) -> None:
    machine()
    assert resolve_device("auto") == torch.device("cpu")
    assert resolve_device() == torch.device("cpu")


def test_auto_prefers_cuda_then_mps(machine) -> None:
    machine(cuda=1, mps=True)
    assert resolve_device("auto") == torch.device("cuda")
    machine(mps=True)
    assert resolve_device("auto") == torch.device("mps")


def test_auto_does_not_take_a_device_without_the_precision(machine) -> None:
    machine(mps=True)
    assert resolve_device("auto", torch.float64) == torch.device("cpu")


def test_a_device_may_be_numbered_or_be_a_device_already(machine) -> None:
    machine(cuda=2)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    assert resolve_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "mps", "gpu", "cpu:0", "tpu:x", "", "cuda:"])
def test_an_absent_or_unknown_device_is_named_with_those_present(machine, device: str) -> None:
    machine()
    with pytest.raises(ValueError, match=rf"^device='{device}' is not allowed: .* one of auto, cpu on this machine$"):
        resolve_device(device)


def test_a_number_beyond_the_last_device_is_refused(machine) -> None:
    machine(cuda=2)
    with pytest.raises(ValueError, match=r"device='cuda:2' is not allowed: .* one of auto, cpu, cuda on this machine"):
        resolve_device("cuda:2")


def test_float64_on_mps_is_refused_by_name(machine) -> None:
    machine(mps=True)
    with pytest.raises(ValueError, match=r"dtype=torch.float64 is not allowed: .* torch.float32 on an mps device"):
        resolve_device("mps", torch.float64)
    require_dtype(torch.device("mps"), torch.float32)
    require_dtype(torch.device("cpu"), torch.float64)
