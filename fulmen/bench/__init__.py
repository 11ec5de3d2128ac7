"""Measuring: what `python -m fulmen bench` runs."""
