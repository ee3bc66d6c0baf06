"""The softmax cache that a prompt enters which is read twice (:mod:`dofla.integration.second_reading`)."""

from transformers import Cache, DynamicCache, PreTrainedConfig


class FirstReading(DynamicCache):
    """What a prompt is first read into, by softmax attention, before tokens of it enter the cache ``into``."""

    def __init__(self, config: PreTrainedConfig, into: Cache) -> None:
        super().__init__(config=config)
        self.into = into
