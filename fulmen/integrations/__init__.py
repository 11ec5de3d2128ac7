"""fulmen inside other libraries: Hugging Face transformers, torch SDPA, and code written for flash-attn.

Importing a module of this package changes nothing outside it; `register` and `install` do, and can be undone.
"""
