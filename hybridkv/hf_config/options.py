"""Choices of the caller that a config.json does not make."""

from hybridkv.spec_base import Frozen
from hybridkv.specs import Dtype


class CacheOptions(Frozen):
    """How caches are stored, whatever the model.

    `kv_dtype` is the dtype of K and V; a checkpoint's own dtype says nothing about its caches.
    """

    kv_dtype: Dtype = "bfloat16"


DEFAULT_OPTIONS = CacheOptions()
