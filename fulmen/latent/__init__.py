"""Attention over a latent cache: absorbed MLA."""

from fulmen.latent.op import latent_attention

__all__ = ["latent_attention"]
