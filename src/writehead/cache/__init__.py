"""Key/value cache storage."""

from __future__ import annotations

from writehead.cache.storage import KVCache

__all__ = ["KVCache"]
