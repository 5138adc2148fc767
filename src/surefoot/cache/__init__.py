"""Every tensor that outlives a step. `hybrid` is the whole; `kv` and `recurrent` are the two kinds of layer; `memory`
has room for them or says why not."""

from surefoot.cache.hybrid import HybridCache
from surefoot.cache.kv import KVCache
from surefoot.cache.recurrent import RecurrentCache

__all__ = ["HybridCache", "KVCache", "RecurrentCache"]
