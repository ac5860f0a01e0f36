"""Tasks on a forced text, measured through the decode path: no question, no grading, any weights.

`perplexity`: exp of the mean negative log-likelihood of the text's next tokens. `fidelity`: the same, and how far a
method's next-token distributions are from the full cache's on the same forced text: the mean KL divergence
D(full || method) in nats, and how often both have the same most likely token. It leaves out the first of the forced
tokens, which every method predicts from the whole prompt.
"""

import torch
from torch import Tensor


def excerpts(
    ids: list[int], length: int, forced: int, samples: int, bos: list[int]
) -> list[tuple[list[int], list[int]]]:
    """(prompt, continuation) pairs of `length` tokens, `forced` of them the continuation's, from consecutive parts of a
    text; fewer if the text is short.

    bos: ids that begin every prompt. Raises ValueError if the text is shorter than one sample.
    """
    if length <= forced + len(bos):
        raise ValueError(f"a length of {length} tokens is too short: {forced} of them are forced")
    size = length - len(bos)
    if len(ids) < size:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than a sample of {size}")
    starts = range(0, len(ids) - size + 1, size)[:samples]
    cut = size - forced
    return [(bos + ids[i : i + cut], ids[i + cut : i + size]) for i in starts]


def negative_log_likelihood(logits: Tensor, tokens: list[int]) -> float:
    """The mean negative log-likelihood of n tokens under logits [n, vocab], in nats."""
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens, device=logits.device)).item()


def divergence(logits: Tensor, full: Tensor) -> tuple[float, float]:
    """(mean KL divergence D(full || method) in nats, share of rows with the same argmax) of logits [n, vocab]."""
    p, q = full.log_softmax(-1), logits.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean().item()
    return max(kl, 0.0), (p.argmax(-1) == q.argmax(-1)).float().mean().item()
