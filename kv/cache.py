"""The cache of a model: its layers' caches, and what is done with all of them."""

from kv.base import KV
from kv.parts.offload import Pool


class Cache(list[KV]):
    """The KV of each layer, in order. Layers may share buffers and pools, which then count once."""

    def reset(self, row: int) -> None:
        for layer in self:
            layer.reset(row)

    def second_pass(self, prompt: list[int], tokenizer) -> list[list[int]]:
        """`KV.second_pass` of the first layer that wants one."""
        return next(filter(None, (layer.second_pass(prompt, tokenizer) for layer in self)), [])

    def make_room(self, lengths: dict[int, int]) -> None:
        """`KV.make_room` in all layers, before a step of rows of so many tokens."""
        for layer in self:
            for row, length in lengths.items():
                layer.make_room(row, length)

    def before_step(self, length: int, new: int) -> list[tuple]:
        """`KV.before_step` of each layer."""
        return [layer.before_step(length, new) for layer in self]

    def bytes(self) -> tuple[int, int]:
        """(device, host) bytes of all buffers and pools."""
        device = {}
        for layer in self:
            device |= layer.storages()
        return sum(device.values()), sum(pool.host_bytes for pool in self.pools)

    def step_bytes(self, length: int) -> tuple[int, int]:
        """(device, host) bytes that one step reads for a row of `length` tokens."""
        device, host = zip(*(layer.step_bytes(length) for layer in self), strict=True)
        return sum(device), sum(host)

    @property
    def pools(self) -> list[Pool]:
        return [pool for layer in self for pool in layer.pools]

    def fetched(self) -> tuple[int, int]:
        """Pool entries that steps requested from the host since allocation, and how many of them were fetched."""
        requested, transferred = zip((0, 0), *(pool.counts for pool in self.pools), strict=True)
        return sum(requested), sum(transferred)

    def close(self) -> None:
        """Ends the threads that fetch."""
        for pool in self.pools:
            pool.close()
