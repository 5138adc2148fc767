"""The target network and its MTP head. Layers read and write the caches they are handed and keep no state."""

from surefoot.model.decoder import Decoder, build_cache
from surefoot.model.draft_head import DraftHead
from surefoot.model.mtp import MTPHead

__all__ = ["Decoder", "DraftHead", "MTPHead", "build_cache"]
