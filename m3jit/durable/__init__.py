"""Versions of a program's state on disk: content-addressed blocks, a write-ahead log, stores that survive a crash."""
from m3jit.durable.checkpoints import Checkpoints
from m3jit.durable.errors import DamagedStore, StoreError, StoreFull, StoreInUse
from m3jit.durable.store import Restored, Store

__all__ = ["Checkpoints", "DamagedStore", "Restored", "Store", "StoreError", "StoreFull", "StoreInUse"]
