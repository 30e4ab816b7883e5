"""Where tensors live."""

import torch

from helpers.validation import require


def resolve_device(device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> torch.device:
    """The torch device called ``device``, able to compute in ``dtype``.

    ``"auto"`` is CUDA if present, else MPS if present and able, else the CPU. ``ValueError`` if the device is unknown,
    absent or cannot compute in ``dtype``, before anything is allocated on it.
    """
    device = str(device)
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if device == "auto":
        return torch.device("cuda" if cuda else "mps" if mps and dtype != torch.float64 else "cpu")
    present = ["auto", "cpu"] + ["cuda"] * cuda + ["mps"] * mps
    kind, _, index = device.partition(":")
    known = kind in present and (not index or (kind == "cuda" and index.isdigit()))
    known = known and (not index or int(index) < torch.cuda.device_count())
    require(known, "device", device, "one of " + ", ".join(present) + " on this machine")
    require_dtype(torch.device(device), dtype)
    return torch.device(device)


def require_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """``ValueError`` if ``device`` cannot compute in ``dtype`` (Apple's MPS has no float64)."""
    require(not (device.type == "mps" and dtype == torch.float64), "dtype", dtype, "torch.float32 on an mps device")
