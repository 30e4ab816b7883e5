"""Where tensors live."""

import torch

from helpers.validation import require


def resolve_device(device: str = "cpu") -> torch.device:
    """The torch device called ``device``; ``"auto"`` is CUDA if present, else MPS if present, else the CPU.

    ``ValueError`` if the device is unknown or absent, before anything is allocated on it.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if device == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    present = ["auto", "cpu"] + ["cuda"] * cuda + ["mps"] * mps
    kind, _, index = device.partition(":")
    known = kind in present and (not index or (kind == "cuda" and index.isdigit()))
    known = known and (not index or int(index) < torch.cuda.device_count())
    require(known, "device", device, "one of " + ", ".join(present) + " on this machine")
    return torch.device(device)


def require_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """``ValueError`` if ``device`` cannot compute in ``dtype`` (Apple's MPS has no float64)."""
    require(not (device.type == "mps" and dtype == torch.float64), "dtype", dtype, "torch.float32 on an mps device")
