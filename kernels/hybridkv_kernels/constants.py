"""Sentinel values shared by block tables, slot mappings and kernels."""

from typing import Final

PAD_SLOT_ID: Final = -1
"""Slot of a token that has no place in a group's cache: padding, dead, unreserved or another rank's."""

NULL_BLOCK_ID: Final = 0
"""Block 0 of every group: it may be read, is never written, is never handed out."""
