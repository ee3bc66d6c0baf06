"""Compressing a model's KV cache: what is measured of the model once, and the plan of a size.

:func:`~dofla.compression.calibrate.calibrate` measures directions of keys and values, what eviction costs in each KV
head, and which heads needles are found with; :func:`~dofla.compression.compress.compress` plans a cache of a size by
it. Knows models and windows of text; trains nothing.
"""
