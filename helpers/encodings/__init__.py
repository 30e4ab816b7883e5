"""Positional encodings: one registered object each, in one file each. Nothing else branches on an encoding's name."""

from helpers.encodings.base import Encoding, ModelShape
from helpers.registry import Registry

registry: Registry[Encoding] = Registry("encoding", __name__)

from helpers.encodings.learned import Learned, ShiftedLearned  # noqa: E402  (they register, so they need the registry)
from helpers.encodings.none import NoEncoding  # noqa: E402
from helpers.encodings.rotary import Rotary  # noqa: E402
from helpers.encodings.sinusoidal import Sinusoidal  # noqa: E402

__all__ = ["Encoding", "Learned", "ModelShape", "NoEncoding", "Rotary", "ShiftedLearned", "Sinusoidal", "registry"]
