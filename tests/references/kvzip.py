"""KVzip (arXiv 2505.23416): a token's importance is the most attention it receives while the model repeats the prompt.

Unlike the other references this one runs a model of transformers: a Llama, Qwen2 or Qwen3 for causal language modelling
in fp32. It runs the whole sequence prompt + text for each text: the hidden states are those of a text that reads the
prompt's cache, and nothing of a text reaches the next.
"""

import math

import torch
from torch import Tensor, nn

from .attention import best, probabilities


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [H,N,D], which pairs channel i with channel i + D/2: cos and sin [N,D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], -1) * sin


def queries_and_keys(model: nn.Module, tokens: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Each layer's q [Hq,N,D] and k [Hk,N,D] of a sequence, RoPE applied."""
    found = []

    def record(attention: nn.Module, args: tuple, kwargs: dict) -> None:
        x = kwargs["hidden_states"][0]  # [N,C]
        cos, sin = (table[0] for table in kwargs["position_embeddings"])
        q = attention.q_proj(x).unflatten(-1, (-1, attention.head_dim))  # [N,Hq,D]
        k = attention.k_proj(x).unflatten(-1, (-1, attention.head_dim))
        if hasattr(attention, "q_norm"):  # Qwen3
            q, k = attention.q_norm(q), attention.k_norm(k)
        found.append((rotate(q.transpose(0, 1), cos, sin), rotate(k.transpose(0, 1), cos, sin)))

    hooks = [layer.self_attn.register_forward_pre_hook(record, with_kwargs=True) for layer in model.model.layers]
    try:
        model.model(torch.tensor([tokens]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@torch.no_grad()
def importance(model: nn.Module, prompt: list[int], texts: list[list[int]], chunk: int, sinks: int) -> Tensor:
    """The importance of each token of a prompt: fp32 [L,Hk,T], +inf for the sinks.

    `texts` holds one text for each chunk of `chunk` tokens of the prompt. A query of a text scores the sinks, the
    text's chunk and the text up to itself.
    """
    size, config = len(prompt), model.config
    received = torch.zeros(config.num_hidden_layers, config.num_key_value_heads, size, dtype=torch.float64)
    groups = config.num_attention_heads // config.num_key_value_heads
    for start, text in zip(range(0, size, chunk), texts, strict=True):
        own = range(start, min(start + chunk, size))
        cached = sorted({*range(min(sinks, size)), *own})
        for layer, (q, k) in enumerate(queries_and_keys(model, prompt + text)):
            for head in range(q.shape[0]):
                most = received[layer, head // groups]
                for i in range(size, size + len(text)):
                    seen = cached + list(range(size, i + 1))
                    weights = probabilities(q[head, i], k[head // groups, seen])
                    for position, weight in zip(seen, weights, strict=True):
                        if position in own:
                            most[position] = torch.maximum(most[position], weight)
    received[:, :, :sinks] = math.inf
    return received.float()


def kept(importance: Tensor, count: int) -> list[list[list[int]]]:
    """The `count` most important positions of each layer's KV heads, ascending: importance [L,Hk,T]."""
    return [[best(head, count) for head in layer] for layer in importance]


def kept_together(importance: Tensor, count: int, alpha: float) -> list[list[int]]:
    """The positions, ascending, that each KV head of one layer keeps if the heads share `count` slots a head.

    importance is [Hk,T]. A head keeps its int(alpha * count) most important tokens; the remaining slots go to the most
    important tokens that are left, whichever their head. Ties go to the lowest head, then to the lowest position.
    """
    chosen = [best(head, int(alpha * count)) for head in importance]
    left = [
        (-value, head, position)
        for head, values in enumerate(importance.tolist())
        for position, value in enumerate(values)
        if position not in chosen[head]
    ]
    slots = len(chosen) * count - sum(len(positions) for positions in chosen)
    for _, head, position in sorted(left)[:slots]:
        chosen[head].append(position)
    return [sorted(positions) for positions in chosen]
