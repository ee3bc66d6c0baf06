"""The plug-in for vLLM: ``vllm serve FOLDER`` opens a model that dofla has saved.

A compressed cache has the same size for any number of tokens, so to vLLM each layer is like one of Mamba: a page per
sequence that holds its state. vLLM finds :func:`dofla.vllm.plugin.register` by its entry point; nothing else in dofla
knows of this package, and it does not import transformers' part of dofla (:mod:`dofla.integration`).
"""

ARCHITECTURE, HYBRID, METHOD, BACKEND = "DoflaForCausalLM", "DoflaHybridForCausalLM", "dofla", "DOFLA"
"""Names under which vLLM knows models all of whose layers are compressed, those with other layers beside them, the
checkpoints of both, and their cache."""
CONNECTOR, FOLDER = "DoflaConnector", "folder"
"""The name of what moves states between servers, and of its one setting."""
