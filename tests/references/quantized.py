"""TailorKV (arXiv 2505.19586, Equations 4 and 6 to 12, Figure 14), KIVI (arXiv 2402.02750), PQCache (arXiv 2407.12820):
all layers. Attention within the prompt is exact and left out here.
"""

import math
from collections.abc import Iterable
from fractions import Fraction

import torch
from torch import Tensor

from kv.method import Plan

from .attention import SlowLayers, Text, best, half_up, probabilities

EPS = 2.0**-14  # the smallest scale: fp16's smallest normal number
LEAST_BUDGET = 8
LONG_PROMPT = 32 * 1024  # longer prompts are read by 12 channels, not 8
LONG_CLUSTERING = 64 * 1024  # keys of longer prompts get one round of k-means


def quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """One group's codes, scale and zero point (Equation 4): x [n] -> int64 [n], fp16, fp16.

    s = max((max x - min x) / (2^b - 1), 2^-14) and z = min x are computed in fp32, then rounded to fp16. Codes use the
    rounded s and z: clamp(round((x - z) / s), 0, 2^b - 1) in fp32, halves to even.
    """
    x = x.float()
    steps = torch.tensor(float(2**bits - 1), dtype=torch.float32)
    scale = ((x.max() - x.min()) / steps).clamp(min=EPS).half()
    zero = x.min().half()
    codes = torch.round((x - zero.float()) / scale.float()).clamp(0, 2**bits - 1)
    return codes.long(), scale, zero


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """codes s + z, exact in fp64; for up to 8 bits, rounding it to fp32 equals computing it in fp32."""
    return codes.double() * scale.double() + zero.double()


def dense_preference(q: Tensor, k: Tensor, n_q: int = 32, share: float = 0.05) -> float:
    """P of a layer and a prompt (Equations 6 to 8): q [Hq,T,D], k [Hk,T,D]. By Equation 9, P > tau quantizes the layer.

    Our reading: A (Equation 6) is each query head's softmax over the keys that a query may see, 0 ... its own position.
    I (Equation 7) holds the k highest entries of each row of A, where k is `share` of the prompt, rounded half up and
    at least 1 (a row with fewer entries has them all). Equation 8 sums 1 - (mass of the row's top k) over the rows; we
    take the mean over the last n_q rows (all T of a shorter prompt) and over the query heads. It lies in [0, 1) and is
    0 if the top k receive all attention.
    """
    q, k = q.double(), k.double()
    length, groups = k.shape[1], q.shape[0] // k.shape[0]
    top = max(1, half_up(Fraction(str(share)) * length))
    missed = []
    for head in range(q.shape[0]):
        for i in range(max(0, length - n_q), length):
            row = probabilities(q[head, i], k[head // groups, : i + 1]).tolist()
            missed.append(1.0 - math.fsum(sorted(row, reverse=True)[:top]))
    return math.fsum(missed) / len(missed)


def split_budget(budget: int, initial: int = 4, local: int | None = None) -> tuple[int, int]:
    """(n_local, n_topk) of a budget: n_local = min(128, floor(t / 3)), or `local`, and includes the initial tokens.

    The initial tokens are always kept, so n_local is at least `initial`.
    """
    if budget < LEAST_BUDGET:
        raise ValueError(f"a budget of {budget} tokens is less than {LEAST_BUDGET}")
    n_local = max(initial, min(128, budget // 3) if local is None else local)
    if n_local > budget:
        raise ValueError(f"{n_local} initial and local tokens exceed the budget of {budget}")
    return n_local, budget - n_local


class QuantizedText(Text):
    """One layer's tokens. The first `packed` are codes; `keys` and `values` hold their dequantized vectors.

    A group is `group` tokens that start at a multiple of `group`. Its keys are quantized per channel over its tokens,
    its values per token over spans of `channels` channels (a head's last span may be shorter).
    """

    def __init__(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, bits: int, group: int, channels: int, recent: int):
        super().__init__(plan, q, k, v)
        self.keys, self.values = self.keys.clone(), self.values.clone()  # packing writes to them
        self.bits, self.group, self.recent = bits, group, recent
        head_dim = plan.head_dim
        self.spans = [(at, min(at + channels, head_dim)) for at in range(0, head_dim, min(channels, head_dim))]
        self.packed = 0
        # codes, scale and zero point by (KV head, group index, channel) and by (KV head, token, span index)
        self.key_groups: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self.value_groups: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self.pack()

    def append(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().append(q, k, v)
        self.pack()

    def due(self) -> int:
        """P(n): how many of the first tokens are packed once there are n."""
        return max(0, (self.length - self.recent) // self.group) * self.group

    def pack(self) -> None:
        """Quantizes every group that is due."""
        while self.packed < self.due():
            for kv_head in range(self.keys.shape[0]):
                self.pack_keys(kv_head, self.packed)
                for token in range(self.packed, self.packed + self.group):
                    self.pack_values(kv_head, token)
            self.packed += self.group

    def pack_keys(self, kv_head: int, first: int) -> None:
        """Quantizes a group's keys per channel, over its tokens (Section 4.3)."""
        for channel in range(self.keys.shape[2]):
            x = self.keys[kv_head, first : first + self.group, channel]
            group = quantize(x, self.bits)
            self.key_groups[kv_head, first // self.group, channel] = group
            self.keys[kv_head, first : first + self.group, channel] = dequantize(*group)

    def pack_values(self, kv_head: int, token: int) -> None:
        """Quantizes a token's values over each span of channels (Section 4.3)."""
        for i, (low, high) in enumerate(self.spans):
            group = quantize(self.values[kv_head, token, low:high], self.bits)
            self.value_groups[kv_head, token, i] = group
            self.values[kv_head, token, low:high] = dequantize(*group)

    def packed_keys(self, kv_head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes int64 [P,D], scales and zero points fp16 [P / group,D]."""
        shape = self.packed // self.group, self.keys.shape[2]
        codes = torch.zeros(self.packed, shape[1], dtype=torch.int64)
        scales, zeros = torch.zeros(shape, dtype=torch.float16), torch.zeros(shape, dtype=torch.float16)
        for i in range(shape[0]):
            for channel in range(shape[1]):
                code, scales[i, channel], zeros[i, channel] = self.key_groups[kv_head, i, channel]
                codes[i * self.group : (i + 1) * self.group, channel] = code
        return codes, scales, zeros

    def packed_values(self, kv_head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes int64 [P,D], scales and zero points fp16 [P,number of spans]."""
        shape = self.packed, len(self.spans)
        codes = torch.zeros(self.packed, self.values.shape[2], dtype=torch.int64)
        scales, zeros = torch.zeros(shape, dtype=torch.float16), torch.zeros(shape, dtype=torch.float16)
        for token in range(self.packed):
            for i, (low, high) in enumerate(self.spans):
                codes[token, low:high], scales[token, i], zeros[token, i] = self.value_groups[kv_head, token, i]
        return codes, scales, zeros


class PackedLayers(SlowLayers):
    """Layers whose texts have `packed`, `keys` and `values`."""

    def packed(self, layer: int) -> int:
        """P(n): how many tokens are codes."""
        return self.texts[layer].packed

    def keys(self, layer: int, kv_head: int) -> Tensor:
        """The keys that attention reads, dequantized or in full precision, in order of position: [n,D]."""
        return self.texts[layer].keys[kv_head].float()

    def values(self, layer: int, kv_head: int) -> Tensor:
        """The values that attention reads, dequantized or in full precision, in order of position: [n,D]."""
        return self.texts[layer].values[kv_head].float()


class SlowQuantized(PackedLayers):
    """Quantizes every layer except its newest tokens: KIVI with 2 or 4 bits and 128 recent tokens.

    Of n tokens, the first max(0, floor((n - recent) / group)) group are packed: at least the `recent` newest and at
    most recent + group - 1 stay in full precision. A step stores its token, packs a group that is due and attends to
    everything.
    """

    def __init__(self, plan: Plan, bits: int = 4, group: int = 64, channels: int = 64, recent: int = 128):
        super().__init__(plan)
        self.bits, self.group, self.channels, self.recent = bits, group, channels, recent

    def text_of(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Text:
        return QuantizedText(self.plan, q, k, v, self.bits, self.group, self.channels, self.recent)

    def packed_keys(self, layer: int, kv_head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes int64 [P,D], scales and zero points fp16 [P / group,D]."""
        return self.texts[layer].packed_keys(kv_head)

    def packed_values(self, layer: int, kv_head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes int64 [P,D], scales and zero points fp16 [P,D / channels]."""
        return self.texts[layer].packed_values(kv_head)


class SlowTailorKV(SlowQuantized):
    """TailorKV: layers in `quant_layers` are quantized, with recent = 0; the others, sparse, select prompt tokens.

    A sparse layer attends to the prompt's first `initial` and last n_local - initial tokens, to the n_topk best tokens
    between them, chosen per KV head in each step, and to all generated tokens. `channels` is d_s (None: 8, or 12 for
    prompts beyond 32K), `local` is n_local (None: from the budget), `value_group` is the channels per group of values.
    """

    def __init__(
        self,
        plan: Plan,
        budget: int,
        quant_layers: Iterable[int],
        bits: int = 2,
        group: int = 64,
        channels: int | None = None,
        initial: int = 4,
        local: int | None = None,
        value_group: int = 64,
    ):
        super().__init__(plan, bits, group, value_group, recent=0)
        self.budget, self.initial, self.critical = budget, initial, channels
        self.quant_layers = sorted(quant_layers)
        self.n_local, self.n_topk = split_budget(budget, initial, local)
        self.predicted: dict[int, Tensor] = {}  # by sparse layer: the last step's predicted queries [Hq,D]

    def begin(self) -> None:
        super().begin()
        self.predicted = {}

    def is_quantized(self, layer: int) -> bool:
        return layer in self.quant_layers

    def text_of(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Text:
        return super().text_of(layer, q, k, v) if self.is_quantized(layer) else Text(self.plan, q, k, v)

    def n_channels(self, prompt: int) -> int:
        """d_s: how many channels of a prompt's keys are read to choose tokens."""
        default = 12 if prompt > LONG_PROMPT else 8
        return min(default if self.critical is None else self.critical, self.plan.head_dim)

    def channels_of(self, layer: int, kv_head: int) -> list[int]:
        """The critical channels of a sparse layer's last step, ascending: those with the highest |q_i| max|K_i|.

        This is Equation 10. q is the mean of the group's predicted queries (Equation 12), taken before the absolute
        value (Figure 14); the maximum is over the whole prompt.
        """
        text = self.texts[layer]
        heads = self.predicted[layer][kv_head * self.groups : (kv_head + 1) * self.groups]
        scores = []
        for channel in range(self.plan.head_dim):
            query = abs(math.fsum(heads[:, channel].tolist()) / self.groups)
            scores.append(query * max(abs(x) for x in text.keys[kv_head, : text.prompt, channel].tolist()))
        return best(torch.tensor(scores, dtype=torch.float64), self.n_channels(text.prompt))

    def candidates(self, layer: int) -> range:
        """The prompt tokens that are neither initial nor local."""
        return range(self.initial, self.texts[layer].prompt - (self.n_local - self.initial))

    def choose(self, layer: int, kv_head: int) -> list[int]:
        """Initial, local and generated tokens, and the best others by the group's mean query on the critical channels.

        As in Figure 14, `approximate_attn`: raw dot products with the true query, no softmax.
        """
        text = self.texts[layer]
        if self.is_quantized(layer):
            return list(range(text.length))
        channels = self.channels_of(layer, kv_head)
        query = [math.fsum(column) / self.groups for column in self.queries(layer, kv_head)[:, channels].T.tolist()]
        between, scores = self.candidates(layer), []
        for position in between:
            key = text.keys[kv_head, position, channels].tolist()
            scores.append(math.fsum(a * b for a, b in zip(query, key, strict=True)))
        selected = {between[i] for i in best(torch.tensor(scores, dtype=torch.float64), self.n_topk)}
        return [position for position in range(text.length) if position not in between or position in selected]

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, predicted: Tensor | None = None) -> Tensor:
        """Stores one token, chooses, attends: q [Hq,D], k and v [Hk,D] -> [Hq,D].

        `predicted` [Hq,D] is the query that the layer below predicts, RoPE applied; by default, the true query.
        """
        if not self.is_quantized(layer):
            self.predicted[layer] = (q if predicted is None else predicted).double()
        return super().decode(layer, q, k, v)


def nearest(x: Tensor, centroids: Tensor) -> int:
    """The index of the centroid closest by squared distance, the first among equals: x [d], centroids [C,d]."""
    distances = ((centroids - x) ** 2).sum(1).tolist()
    return distances.index(min(distances))


def k_means(points: Tensor, count: int, rounds: int) -> Tensor:
    """Lloyd's algorithm from a strided start: points [T,d] -> centroids [min(count, T),d].

    Centroid c starts at point floor(c T / C). A round assigns every point to its nearest centroid and moves each
    centroid to the mean of its points; a centroid without points stays.
    """
    length = points.shape[0]
    count = min(count, length)
    centroids = torch.stack([points[c * length // count] for c in range(count)])
    for _ in range(rounds):
        members: list[list[Tensor]] = [[] for _ in range(count)]
        for point in points:
            members[nearest(point, centroids)].append(point)
        for c, some in enumerate(members):
            if some:
                centroids[c] = torch.stack(some).sum(0) / len(some)
    return centroids


class SlowPQCache(SlowLayers):
    """PQCache: selects tokens by product-quantized keys.

    A KV head attends to the sequence's first `initial` tokens, to its newest `window` tokens, including the new one,
    and to the n_topk best tokens between them. In each partition of the channels, a token's code is its nearest
    centroid; the centroids are computed from the prompt alone. The budget is split as in TailorKV, but the window holds
    at least the new token.
    """

    def __init__(
        self, plan: Plan, budget: int, partitions: int = 2, codebits: int = 6, rounds: int = 8, initial: int = 4
    ):
        super().__init__(plan)
        if plan.head_dim % partitions:
            raise ValueError(f"{plan.head_dim} channels make no {partitions} equal parts")
        self.budget, self.partitions, self.codebits, self.rounds = budget, partitions, codebits, rounds
        self.initial = initial
        self.window = max(1, split_budget(budget, initial)[0] - initial)
        self.n_topk = budget - initial - self.window
        if self.n_topk < 0:
            raise ValueError(f"{initial} initial and {self.window} local tokens exceed the budget of {budget}")
        self.books: list[list[list[Tensor]]] = []  # by layer, KV head and partition: centroids [C,d]
        self.coded: list[list[list[list[int]]]] = []  # by layer, KV head and partition: codes, in order of position

    def begin(self) -> None:
        super().begin()
        self.books, self.coded = [], []

    def parts(self, x: Tensor) -> list[Tensor]:
        """The partitions of some vectors' channels: [...,D] -> [...,d] each."""
        size = self.plan.head_dim // self.partitions
        return [x[..., p * size : (p + 1) * size] for p in range(self.partitions)]

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().prefill(layer, q, k, v)
        text = self.texts[layer]
        rounds = min(self.rounds, 1) if text.prompt > LONG_CLUSTERING else self.rounds
        books, coded = [], []
        for keys in text.keys:
            book = [k_means(part, 2**self.codebits, rounds) for part in self.parts(keys)]
            books.append(book)
            coded.append([[nearest(x, book[p]) for x in part] for p, part in enumerate(self.parts(keys))])
        self.books.append(books)
        self.coded.append(coded)

    def encode(self, layer: int, kv_head: int) -> None:
        """Gives a code to every generated token that has left the window."""
        text, codes = self.texts[layer], self.coded[layer][kv_head]
        while len(codes[0]) < text.length - self.window:
            parts = self.parts(text.keys[kv_head, len(codes[0])])
            for p, part in enumerate(parts):
                codes[p].append(nearest(part, self.books[layer][kv_head][p]))

    def tables(self, layer: int, kv_head: int) -> list[list[float]]:
        """By partition: each centroid's dot product with the queries of the group, summed over the group."""
        queries = self.parts(self.queries(layer, kv_head))
        result = []
        for p, book in enumerate(self.books[layer][kv_head]):
            result.append([math.fsum((queries[p] * centroid).flatten().tolist()) for centroid in book])
        return result

    def choose(self, layer: int, kv_head: int) -> list[int]:
        """Initial tokens, the window, and the best others by the sum of their codes' table entries."""
        self.encode(layer, kv_head)
        length, codes, tables = self.texts[layer].length, self.coded[layer][kv_head], self.tables(layer, kv_head)
        between, scores = range(self.initial, length - self.window), []
        for position in between:
            scores.append(math.fsum(tables[p][codes[p][position]] for p in range(self.partitions)))
        selected = {between[i] for i in best(torch.tensor(scores, dtype=torch.float64), self.n_topk)}
        return [position for position in range(length) if position not in between or position in selected]

    def codes(self, layer: int, kv_head: int) -> list[list[int]]:
        """By partition: the codes of the prompt and of the generated tokens that have left the window."""
        return self.coded[layer][kv_head]

    def centroids(self, layer: int, kv_head: int) -> Tensor:
        """[partitions,C,D / partitions]; C is less than 2^codebits if the prompt is shorter."""
        return torch.stack(self.books[layer][kv_head]).float()
