"""Slow reference implementations of TailorKV and of the methods beside it: one batch row, all layers, plain loops.

They follow the equations and share no code with kv/. TailorKV (arXiv 2505.19586, Equations 4 and 6 to 12, Figure 14),
KIVI (arXiv 2402.02750), PQCache (arXiv 2407.12820). All arithmetic is fp64, but for the quantizer, which rounds as an
implementation in fp32 with 16-bit scales and zero points does, so that codes can be compared bit by bit. Outputs and
stored vectors are given out as fp32.

The life of a text: `prefill` for layers 0 ... L - 1 (layer 0 begins a new text), `finish`, then `decode` for each layer
of each step. The prompt's own attention is not modelled, it is exact. Ties break to the lowest index.
"""

import math
from collections.abc import Iterable
from fractions import Fraction

import torch
from references import best, half_up
from references_omni import Text, probabilities
from torch import Tensor

from kv.base import Shape

EPS = 2.0**-14  # the least scale: the smallest normal number of fp16
LEAST_BUDGET = 8
LONG_PROMPT = 32 * 1024  # a longer one is read by 12 channels, not 8
LONG_CLUSTERING = 64 * 1024  # a longer prompt's keys get one round of k-means


def quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """One group's codes, scale and zero point (Equation 4): x [n] -> int64 [n], fp16, fp16.

    s = max((max x - min x) / (2^b - 1), 2^-14) and z = min x in fp32, then rounded to fp16; codes come from the rounded
    ones: clamp(round((x - z) / s), 0, 2^b - 1) in fp32, halves to even.
    """
    x = x.float()
    steps = torch.tensor(float(2**bits - 1), dtype=torch.float32)
    scale = ((x.max() - x.min()) / steps).clamp(min=EPS).half()
    zero = x.min().half()
    codes = torch.round((x - zero.float()) / scale.float()).clamp(0, 2**bits - 1)
    return codes.long(), scale, zero


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """codes s + z in fp64, where it is exact: up to 8 bits, rounding it to fp32 gives what fp32 arithmetic gives."""
    return codes.double() * scale.double() + zero.double()


def dense_preference(q: Tensor, k: Tensor, n_q: int = 32, share: float = 0.05) -> float:
    """P of a layer and a prompt (Equations 6 to 8): q [Hq,T,D], k [Hk,T,D]. By Equation 9, P > tau quantizes the layer.

    Our reading: A (Equation 6) is each query head's softmax over the keys that a query may see, 0 ... its own position;
    I (Equation 7) holds the k highest entries of each row of A by itself, k = `share` of the prompt, rounded half up
    and at least 1 (a row that sees fewer has them all). Equation 8 is the sum over the rows of 1 - (mass of the row's
    top k); we take the mean over the n_q rows (all T of a shorter prompt) and over the query heads, which lies in
    [0, 1) and is 0 if top k attention is everything.
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
    """(n_local, n_topk) of a budget: n_local = min(128, floor(t / 3)), the initial tokens among them, or `local`.

    The initial tokens are always kept, so n_local is never less than they are.
    """
    if budget < LEAST_BUDGET:
        raise ValueError(f"a budget of {budget} tokens is less than {LEAST_BUDGET}")
    n_local = max(initial, min(128, budget // 3) if local is None else local)
    if n_local > budget:
        raise ValueError(f"{n_local} initial and local tokens exceed the budget of {budget}")
    return n_local, budget - n_local


class SlowLayers:
    """Full attention, and what the methods have in common: a text a layer, and for each KV head what it attends to."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.groups = shape.n_head // shape.n_kv_head
        self.texts: list[Text] = []  # by layer
        self.attended: dict[int, list[list[int]]] = {}  # by layer and KV head: positions of the last step, ascending

    def begin(self) -> None:
        """Forgets the text."""
        self.texts, self.attended = [], {}

    def text_of(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Text:
        """What a layer keeps of a prompt."""
        return Text(self.shape, q, k, v)

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores a layer's prompt: q [Hq,T,D], k and v [Hk,T,D]. Layer 0 begins a new text."""
        if layer == 0:
            self.begin()
        if layer != len(self.texts):
            raise ValueError(f"layer {layer} follows layer {len(self.texts) - 1}")
        self.texts.append(self.text_of(layer, q, k, v))

    def finish(self) -> None:
        """Nothing waits for the last layer's prompt."""

    def choose(self, layer: int, kv_head: int) -> list[int]:
        """The positions that a KV head attends to, ascending; the newest token is stored already."""
        return list(range(self.texts[layer].length))

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores one token, then attends: q [Hq,D], k and v [Hk,D] -> [Hq,D]."""
        text = self.texts[layer]
        text.append(q, k, v)
        attended = [self.choose(layer, kv_head) for kv_head in range(self.shape.n_kv_head)]
        self.attended[layer] = attended
        heads = range(self.shape.n_head)
        return torch.stack([text.attend(head, attended[head // self.groups]) for head in heads]).float()

    def chosen(self, layer: int, kv_head: int) -> list[int]:
        """The positions that the last step attended to, ascending; none before the first step."""
        return self.attended[layer][kv_head] if layer in self.attended else []

    def queries(self, layer: int, kv_head: int) -> Tensor:
        """The newest token's queries of a group: [G,D]."""
        return self.texts[layer].queries[kv_head * self.groups : (kv_head + 1) * self.groups, -1]


class QuantizedText(Text):
    """One layer's tokens, of which the first `packed` are codes: `keys` and `values` hold what those stand for.

    A group is `group` tokens from a multiple of `group` on. Its keys are quantized a channel at a time over its tokens,
    its values a token at a time over `channels` channels (the last ones of a head may be fewer).
    """

    def __init__(
        self, shape: Shape, q: Tensor, k: Tensor, v: Tensor, bits: int, group: int, channels: int, recent: int
    ):
        super().__init__(shape, q, k, v)
        self.keys, self.values = self.keys.clone(), self.values.clone()  # packing writes to them
        self.bits, self.group, self.recent = bits, group, recent
        head_dim = shape.head_dim
        self.spans = [(at, min(at + channels, head_dim)) for at in range(0, head_dim, min(channels, head_dim))]
        self.packed = 0
        # codes, scale and zero point by (KV head, group's number, channel) and by (KV head, token, span's number)
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
        """Per channel (Section 4.3), over the tokens of a group."""
        for channel in range(self.keys.shape[2]):
            x = self.keys[kv_head, first : first + self.group, channel]
            group = quantize(x, self.bits)
            self.key_groups[kv_head, first // self.group, channel] = group
            self.keys[kv_head, first : first + self.group, channel] = dequantize(*group)

    def pack_values(self, kv_head: int, token: int) -> None:
        """Per token (Section 4.3), over each span of channels."""
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


class SlowQuantized(SlowLayers):
    """Every layer quantized but for its newest tokens: KIVI with 2 or 4 bits and 128 recent tokens.

    Of n tokens the first max(0, floor((n - recent) / group)) group are packed, so that at least the `recent` newest and
    at most recent + group - 1 are in full precision. A step stores its token, packs a group that is due, and attends to
    everything.
    """

    def __init__(self, shape: Shape, bits: int = 4, group: int = 64, channels: int = 64, recent: int = 128):
        super().__init__(shape)
        self.bits, self.group, self.channels, self.recent = bits, group, channels, recent

    def text_of(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Text:
        return QuantizedText(self.shape, q, k, v, self.bits, self.group, self.channels, self.recent)

    def packed(self, layer: int) -> int:
        """P(n): how many tokens are codes."""
        return self.texts[layer].packed

    def keys(self, layer: int, kv_head: int) -> Tensor:
        """The keys as they are attended to, dequantized or in full precision, in order of position: [n,D]."""
        return self.texts[layer].keys[kv_head].float()

    def values(self, layer: int, kv_head: int) -> Tensor:
        """The values as they are attended to, dequantized or in full precision, in order of position: [n,D]."""
        return self.texts[layer].values[kv_head].float()

    def packed_keys(self, layer: int, kv_head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes int64 [P,D], scales and zero points fp16 [P / group,D]."""
        return self.texts[layer].packed_keys(kv_head)

    def packed_values(self, layer: int, kv_head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes int64 [P,D], scales and zero points fp16 [P,D / channels]."""
        return self.texts[layer].packed_values(kv_head)


class SlowTailorKV(SlowQuantized):
    """TailorKV: the layers of `quant_layers` are quantized, without recent tokens; the others select prompt tokens.

    A sparse layer attends to the prompt's first `initial` and last n_local - initial tokens, to the n_topk best of
    those between, chosen per KV head in each step, and to everything generated. `channels` is d_s (None: 8, or 12 for
    prompts beyond 32K), `local` is n_local (None: from the budget), `value_group` is the channels of a group of values.
    """

    def __init__(
        self,
        shape: Shape,
        budget: int,
        quant_layers: Iterable[int],
        bits: int = 1,
        group: int = 64,
        channels: int | None = None,
        initial: int = 4,
        local: int | None = None,
        value_group: int = 64,
    ):
        super().__init__(shape, bits, group, value_group, recent=0)
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
        return super().text_of(layer, q, k, v) if self.is_quantized(layer) else Text(self.shape, q, k, v)

    def n_channels(self, prompt: int) -> int:
        """d_s: how many channels of a prompt's keys are read to choose tokens."""
        default = 12 if prompt > LONG_PROMPT else 8
        return min(default if self.critical is None else self.critical, self.shape.head_dim)

    def channels_of(self, layer: int, kv_head: int) -> list[int]:
        """The critical channels of the last step of a sparse layer, ascending.

        By |q_i| max|K_i| (Equation 10), q the mean of the group's predicted queries (Equation 12; the mean comes before
        the absolute value, Figure 14), the maximum over all of the prompt.
        """
        text = self.texts[layer]
        heads = self.predicted[layer][kv_head * self.groups : (kv_head + 1) * self.groups]
        scores = []
        for channel in range(self.shape.head_dim):
            query = abs(math.fsum(heads[:, channel].tolist()) / self.groups)
            scores.append(query * max(abs(x) for x in text.keys[kv_head, : text.prompt, channel].tolist()))
        return best(torch.tensor(scores, dtype=torch.float64), self.n_channels(text.prompt))

    def candidates(self, layer: int) -> range:
        """The prompt tokens that are neither initial nor local."""
        return range(self.initial, self.texts[layer].prompt - (self.n_local - self.initial))

    def choose(self, layer: int, kv_head: int) -> list[int]:
        """Initial, local and generated tokens, and the best others by the group's mean query on the critical channels.

        Figure 14, `approximate_attn`: raw dot products of the true query, no softmax.
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

        `predicted` [Hq,D] is the query that the layer below foresaw, RoPE applied; without one the true query is used.
        """
        if not self.is_quantized(layer):
            self.predicted[layer] = (q if predicted is None else predicted).double()
        return super().decode(layer, q, k, v)


def nearest(x: Tensor, centroids: Tensor) -> int:
    """Which centroid is closest by squared distance, the first among equals: x [d], centroids [C,d]."""
    distances = ((centroids - x) ** 2).sum(1).tolist()
    return distances.index(min(distances))


def k_means(points: Tensor, count: int, rounds: int) -> Tensor:
    """Lloyd's algorithm from a strided start: points [T,d] -> centroids [min(count, T),d].

    Centroid c starts at point floor(c T / C). A round assigns every point to its nearest centroid and moves each
    centroid to the mean of its points; one that has none stays.
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
    """PQCache: tokens are selected by product-quantized keys.

    A KV head attends to the text's first `initial` tokens, to its newest `window`, the new one among them, and to the
    n_topk best of those between. A token's code in each partition of the channels is its nearest centroid, and the
    centroids are fixed once the prompt is there. The budget is split as TailorKV splits it, but the window holds at
    least the new token.
    """

    def __init__(
        self,
        shape: Shape,
        budget: int,
        partitions: int = 2,
        codebits: int = 6,
        rounds: int = 8,
        initial: int = 4,
    ):
        super().__init__(shape)
        if shape.head_dim % partitions:
            raise ValueError(f"{shape.head_dim} channels make no {partitions} equal parts")
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
        size = self.shape.head_dim // self.partitions
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
