"""Files that are whole or not there: written beside their place and renamed, in locked folders.

JSON with fields that are checked, tensors as safetensors, optional packages, and which of several processes writes.
Knows nothing of attention or models.
"""
