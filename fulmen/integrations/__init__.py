"""fulmen inside other libraries: transformers, torch SDPA, and code written for flash-attn, fla or mamba-ssm.

Importing a module of this package changes nothing outside it; `register` and `install` do, and can be undone.
"""
