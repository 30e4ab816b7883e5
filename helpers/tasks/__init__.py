"""Tasks: what is asked of a model. One file each; the registry finds them."""

from helpers.registry import Registry
from helpers.tasks.base import IGNORE, Task

registry: Registry[Task] = Registry("task", __name__)

from helpers.tasks.retrieval import FixedOffsetRetrieval  # noqa: E402  (registers itself, so it needs the registry)

__all__ = ["IGNORE", "FixedOffsetRetrieval", "Task", "registry"]
