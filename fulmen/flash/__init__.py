"""Softmax (flash) attention."""

from fulmen.flash.op import flash_attention, flash_attention_with_lse

__all__ = ["flash_attention", "flash_attention_with_lse"]
