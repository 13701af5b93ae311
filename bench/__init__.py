"""Measurements of cuattn on a GPU; ``python -m bench --help`` in a checkout."""
