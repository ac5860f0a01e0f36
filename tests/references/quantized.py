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
    n_local = max(initial, min(128, budget // 3) if local is None else local)
    return n_local, budget - n_local


class PackedText(Text):
    """One layer's tokens, of which groups become codes; `keys` and `values` then hold their dequantized vectors.

    A group is `group` tokens that start at a multiple of `group`. A derived class says how many groups are `due`, and
    packs one by `pack_keys` and `pack_values`.
    """

    whole = 0  # first tokens that are never packed

    def __init__(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, group: int):
        super().__init__(plan, q, k, v)
        self.keys, self.values = self.keys.clone(), self.values.clone()  # packing writes to them
        self.group, self.packed = group, 0  # tokens of a group, and tokens that are codes
        # by KV head and group: what each packing returns
        self.key_groups: list[list[tuple[Tensor, ...]]] = [[] for _ in self.keys]
        self.value_groups: list[list[tuple[Tensor, ...]]] = [[] for _ in self.keys]
        self.pack()

    def append(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().append(q, k, v)
        self.pack()

    def pack(self) -> None:
        """Quantizes every group that is due."""
        while self.packed < self.due() * self.group:
            tokens = range(self.whole + self.packed, self.whole + self.packed + self.group)
            for kv_head in range(self.keys.shape[0]):
                self.key_groups[kv_head].append(self.pack_keys(kv_head, tokens))
                self.value_groups[kv_head].append(self.pack_values(kv_head, tokens))
            self.packed += self.group


class QuantizedText(PackedText):
    """A group's keys are quantized per channel over its tokens, its values per token over spans of `channels` channels
    (a head's last span may be shorter).
    """

    def __init__(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, bits: int, group: int, channels: int, recent: int):
        self.bits, self.channels, self.recent = bits, channels, recent
        super().__init__(plan, q, k, v, group)

    def due(self) -> int:
        """How many groups are packed: at least the `recent` newest tokens are not."""
        return max(0, (self.length - self.recent) // self.group)

    def pack_keys(self, kv_head: int, tokens: range) -> tuple[Tensor, Tensor, Tensor]:
        """Codes int64 [group,D], scales and zero points fp16 [D] (Section 4.3)."""
        groups = [quantize(x, self.bits) for x in self.keys[kv_head, tokens].T]
        self.keys[kv_head, tokens] = torch.stack([dequantize(*group) for group in groups], 1)
        codes, scales, zeros = zip(*groups, strict=True)
        return torch.stack(codes, 1), torch.stack(scales), torch.stack(zeros)

    def pack_values(self, kv_head: int, tokens: range) -> tuple[Tensor, Tensor, Tensor]:
        """Codes int64 [group,D], scales and zero points fp16 [group,number of spans] (Section 4.3)."""
        rows = []
        for token in tokens:
            spans = [quantize(x, self.bits) for x in self.values[kv_head, token].split(self.channels)]
            self.values[kv_head, token] = torch.cat([dequantize(*span) for span in spans])
            codes, scales, zeros = zip(*spans, strict=True)
            rows.append((torch.cat(codes), torch.stack(scales), torch.stack(zeros)))
        return tuple(torch.stack(x) for x in zip(*rows, strict=True))


class SlowQuantized(SlowLayers):
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
        self.initial, self.critical = initial, channels
        self.quant_layers = sorted(quant_layers)
        self.n_local, self.n_topk = split_budget(budget, initial, local)

    def begin(self) -> None:
        super().begin()
        self.predicted: dict[int, Tensor] = {}  # by sparse layer: the last step's predicted queries [Hq,D]

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
        self.partitions, self.codebits, self.rounds = partitions, codebits, rounds
        self.initial = initial
        self.window = max(1, split_budget(budget, initial)[0] - initial)
        self.n_topk = budget - initial - self.window

    def begin(self) -> None:
        super().begin()
        self.books: list[list[list[Tensor]]] = []  # by layer, KV head and partition: centroids [C,d]
        # By layer, KV head and partition: codes of all tokens that have left the window, and of the prompt.
        self.codes: list[list[list[list[int]]]] = []

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """The partitions of some vectors' channels: [...,D] -> [...,d] each."""
        return x.chunk(self.partitions, dim=-1)

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().prefill(layer, q, k, v)
        text = self.texts[layer]
        rounds = min(self.rounds, 1) if text.prompt > LONG_CLUSTERING else self.rounds
        self.books.append([])
        self.codes.append([])
        for keys in text.keys:
            book = [k_means(part, 2**self.codebits, rounds) for part in self.parts(keys)]
            self.books[layer].append(book)
            self.codes[layer].append([[nearest(x, book[p]) for x in part] for p, part in enumerate(self.parts(keys))])

    def encode(self, layer: int, kv_head: int) -> None:
        """Gives a code to every generated token that has left the window."""
        text, codes = self.texts[layer], self.codes[layer][kv_head]
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
        length, codes, tables = self.texts[layer].length, self.codes[layer][kv_head], self.tables(layer, kv_head)
        between, scores = range(self.initial, length - self.window), []
        for position in between:
            scores.append(math.fsum(tables[p][codes[p][position]] for p in range(self.partitions)))
        selected = {between[i] for i in best(torch.tensor(scores, dtype=torch.float64), self.n_topk)}
        return [position for position in range(length) if position not in between or position in selected]
