"""What is measured on a forced text, through the decode path: no question, no grading, any weights.

`perplexity`: exp of the mean negative log-likelihood of the text's next tokens. `fidelity`: how far a method's next-
token distributions are from the full cache's on the same forced text: the mean KL divergence D(full || method) in
nats, and how often both think the same token the most likely.
"""

import torch
from torch import Tensor

FORCED = 128  # tokens decoded a sample


def excerpts(ids: list[int], length: int, samples: int, bos: list[int]) -> list[tuple[list[int], list[int]]]:
    """Prompts and their continuations, `length` tokens together, side by side in a text; fewer if it is short.

    bos: ids that every prompt begins with. Raises ValueError if the text is shorter than one sample.
    """
    if length <= FORCED + len(bos):
        raise ValueError(f"a length of {length} tokens is too short: {FORCED} of them are forced")
    size = length - len(bos)
    if len(ids) < size:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than a sample of {size}")
    starts = range(0, len(ids) - size + 1, size)[:samples]
    cut = size - FORCED
    return [(bos + ids[i : i + cut], ids[i + cut : i + size]) for i in starts]


def negative_log_likelihood(logits: Tensor, tokens: list[int]) -> float:
    """The mean over logits [n, vocab] of what they say of the n tokens, in nats."""
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens, device=logits.device)).item()


def divergence(logits: Tensor, full: Tensor) -> tuple[float, float]:
    """(mean KL divergence D(full || method) in nats, share of rows with the same argmax) of logits [n, vocab]."""
    p, q = full.log_softmax(-1), logits.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean().item()
    return max(kl, 0.0), (p.argmax(-1) == q.argmax(-1)).float().mean().item()
