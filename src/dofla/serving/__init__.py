"""Using a compressed model beyond ``generate``: conversations that remember, requests in one batch, texts without end,
prompts that are read once and saved, compiled decoding, and the server of ``dofla serve``.

Knows the models and caches of :mod:`dofla.integration`, and nothing of training or evaluation.
"""
