"""Longturn: an engine that serves large language models to agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longturn.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy: `import longturn` must stay cheap for the command line and the server process.
    if name == "LLM":
        from longturn.llm import LLM

        return LLM
    raise AttributeError(f"module 'longturn' has no attribute {name!r}")
