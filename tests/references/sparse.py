"""Methods that keep or select tokens, one layer each: RocketKV (arXiv 2502.14051, Algorithms 1 and 2), SnapKV (arXiv
2404.14469), PyramidKV (arXiv 2406.02069), Quest (arXiv 2406.10774), SparQ (arXiv 2312.04985), DuoAttention (arXiv
2410.10819); and the head budgets of Ada-KV (arXiv 2407.11550).

A head of storage holds one list of tokens. It is a KV head h, whose G query heads h G ... h G + G - 1 share a choice,
or a query head in methods that keep or choose tokens for each query head.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import torch
from torch import Tensor

from kv.method import Plan

from .attention import Text, attend, best, causal, dots, half_up, masked_attention, probabilities, softmax

HEADS = {"heads": "equal", "alpha": 0.2}  # the options of methods that know Ada-KV's head budgets


def hybrid_sizes(slots: int, budget: int, head_dim: int) -> dict[str, int]:
    """Sizes of RocketKV's second stage over `slots` tokens, with the compression ratio c2 = slots / budget.

    page = min(floor(c2), ceil(sqrt(c2))), channels = round(D page / c2), pages = floor((budget / 2) / page).
    """
    ratio = Fraction(slots, budget)
    root = 1
    while root * root < ratio:  # ceil(sqrt(ratio))
        root += 1
    page = max(1, min(math.floor(ratio), root))
    channels = min(max(1, half_up(head_dim * page / ratio)), head_dim)
    return {"page": page, "channels": channels, "pages": max(1, budget // (2 * page))}


def rocket_sizes(planned: int, budget: int, room: int, head_dim: int, split: str) -> dict[str, int]:
    """RocketKV's sizes: n1 slots after stage 1, `keep` of them for the prompt, and the sizes of stage 2.

    c = S / t, n1 = max(round(S / c ** e), min(2 room, S)), keep = n1 - room; e =
    min(0.2 + 0.06 log2 c, 0.8) if the split is adaptive, 0.5 if it is even, as in the first paper.
    """
    budget = min(budget, planned)
    if split == "even":  # S / sqrt(S / t) = sqrt(S t); the root of an integer never ends in .5
        product = planned * budget
        slots = math.isqrt(product)
        slots += product > slots * slots + slots
    else:
        ratio = planned / budget
        slots = half_up(planned / ratio ** min(0.2 + 0.06 * math.log2(ratio), 0.8))
    slots = max(slots, min(2 * room, planned))
    return {"n1": slots, "keep": slots - room, **hybrid_sizes(slots, budget, head_dim)}


def pyramid_budgets(n_layer: int, budget: int, window: int, prompt: int) -> list[int]:
    """PyramidKV: how many prompt tokens each layer keeps, including the window (at most half of the budget).

    n = t - window, min = n / 20, max = 2 n - min: layer l keeps round(max - l (max - min) / (L - 1)) and the window.
    If max and the window exceed the prompt, max shrinks to fit it and min rises until the mean is n again. The lower
    half of the layers rounds halves up; in the upper half, layer L - 1 - l gets 2 n minus the share of layer l.
    """
    window = min(window, budget // 2)
    n, available = budget - window, prompt - window
    if n >= available:
        return [prompt] * n_layer
    if n_layer == 1:
        return [budget]
    low = Fraction(n, 20)
    high = 2 * n - low
    if high > available:
        high = Fraction(available)
        low = 2 * n - high
    lower = [half_up(high - layer * (high - low) / (n_layer - 1)) for layer in range(n_layer // 2)]
    middle = [n] if n_layer % 2 else []
    return [size + window for size in [*lower, *middle, *(2 * n - size for size in reversed(lower))]]


def window_scores(q: Tensor, keys: Tensor, window: int) -> Tensor:
    """Attention of the last `window` queries, summed over them and over the heads that share the keys.

    q [G,T,D], keys [T,D] -> [T - window]. Query i sees the keys 0 ... i; the window's own columns are dropped only
    after the softmax (Algorithm 1, lines 1 and 2).
    """
    length = keys.shape[0]
    scores = torch.zeros(length - window, dtype=torch.float64)
    for head in range(q.shape[0]):
        for i in range(length - window, length):
            scores += probabilities(q[head, i], keys[: i + 1])[: length - window]
    return scores


def max_pool(scores: Tensor, kernel: int) -> Tensor:
    """The highest of the `kernel` scores around each score; the ends are not padded."""
    pooled = torch.empty_like(scores)
    for i in range(scores.shape[0]):
        pooled[i] = scores[max(0, i - kernel // 2) : i + kernel // 2 + 1].max()
    return pooled


def snap_ranks(q: Tensor, keys: Tensor, window: int, kernel: int) -> Tensor:
    """SnapKV's pooled scores (Algorithm 1), inf for the window, which always stays: q [G,T,D], keys [T,D] -> [T]."""
    pooled = max_pool(window_scores(q, keys, window), kernel)
    return torch.cat([pooled, torch.full((window,), torch.inf, dtype=torch.float64)])


def adaptive_heads(ranks: list[Tensor], size: int, alpha: float) -> list[list[int]]:
    """Ada-KV's choice (Algorithm 1) for the H heads of storage of a layer: H n of their tokens stay, n being `size`.

    `ranks` are the scores of each head's tokens, [T] with T > n, inf for those that always stay. The safeguard alpha
    guarantees each head its floor(alpha n) best. The other cells go to the highest scores of all heads' other tokens,
    compared as they are: ties to the lower head, then to the lower position. inf comes first both times, and at most n
    tokens of a head have it: they all stay.
    """
    kept = [best(head, math.floor(alpha * size)) for head in ranks]
    rest = []
    for head, scores in enumerate(ranks):
        rest += [(-score, head, i) for i, score in enumerate(scores.tolist()) if i not in kept[head]]
    for _, head, i in sorted(rest)[: len(ranks) * size - sum(map(len, kept))]:
        kept[head].append(i)
    return [sorted(positions) for positions in kept]


def split_pages(count: int, page: int) -> list[range]:
    """Pages of consecutive indices 0 ... count - 1; the last page may be partly filled."""
    return [range(start, min(start + page, count)) for start in range(0, count, page)]


def bounds(keys: Tensor, tokens: range, reach: float) -> tuple[Tensor, Tensor]:
    """Element-wise minimum and maximum of a page's keys, or nearer to their mean by `reach`: [D], [D]."""
    rows = keys[tokens.start : tokens.stop]
    mean = rows.mean(0)
    return mean - reach * (mean - rows.min(0).values), mean + reach * (rows.max(0).values - mean)


def largest_channels(q: Tensor, channels: int) -> list[int]:
    """The channels with the largest sum over the group of |q|: q [G,D]."""
    return best(q.abs().sum(0), channels)


def partial_weights(q: Tensor, keys: Tensor, channels: list[int]) -> Tensor:
    """SparQ's approximation: softmax(K_r q_r / sqrt(D |q_r|_1 / |q|_1)) on some channels, q [D], keys [n,D] -> [n]."""
    q_r, keys_r = q[channels], keys[:, channels]
    if not q_r.any():  # every dot product is 0, and so is the temperature
        return softmax(torch.zeros(keys.shape[0]))
    return softmax(dots(q_r, keys_r) / torch.sqrt(q.shape[0] * q_r.abs().sum() / q.abs().sum()))


class Slow:
    """Full attention, and the base of the methods.

    A method decides what it keeps of a prompt (`keep`) and which stored tokens a step attends to (`choose`).
    """

    defaults: dict = {}

    def __init__(self, plan: Plan, budget: int, layer: int = 0, **options):
        self.plan, self.budget, self.layer = plan, budget, layer
        self.option = {**self.defaults, **options}
        self.groups = plan.n_head // plan.n_kv_head
        self.shared = self.option.get("gqa", self.option.get("shared", True))  # a group shares its choice

    def kv_head(self, head: int) -> int:
        """The KV head of a head of storage."""
        return head if self.shared else head // self.groups

    def query_heads(self, head: int) -> list[int]:
        """The query heads of a head of storage."""
        return list(range(head * self.groups, (head + 1) * self.groups)) if self.shared else [head]

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores a prompt: q [Hq,T,D], k and v [Hk,T,D]."""
        self.text = Text(self.plan, q, k, v)  # every token so far; `stored` says which are held
        heads = range(self.plan.n_kv_head if self.shared else self.plan.n_head)
        self.kept = self.keep_heads(heads)  # positions per head of storage
        self.stored = [list(kept) for kept in self.kept]  # kept and generated positions, in order

    def keys(self, head: int) -> Tensor:
        """The keys of every token so far that a head of storage may hold: [N,D]."""
        return self.text.keys[self.kv_head(head)]

    def values(self, head: int) -> Tensor:
        """The values of every token so far that a head of storage may hold: [N,D]."""
        return self.text.values[self.kv_head(head)]

    def decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores one token, then attends: q [Hq,D], k and v [Hk,D] -> [Hq,D]."""
        self.text.append(q, k, v)
        y, self.attended = torch.empty_like(q), []  # positions
        for head in range(len(self.stored)):
            self.stored[head].append(self.text.length - 1)
            heads = self.query_heads(head)
            positions, outputs = self.step(head, q[heads].double())
            y[heads] = outputs.float()
            self.attended.append(positions)
        return y

    def step(self, head: int, q: Tensor) -> tuple[list[int], Tensor]:
        """The positions one head of storage attends to, and the outputs of its query heads: q [G,D] -> [G,D]."""
        positions = self.choose(head, q)
        return positions, self.attend(head, q, positions)

    def attend(self, head: int, q: Tensor, positions: list[int]) -> Tensor:
        """Exact attention to some positions: q [G,D] -> [G,D]."""
        keys, values = self.keys(head)[positions], self.values(head)[positions]
        return torch.stack([attend(one, keys, values) for one in q])

    def keep_heads(self, heads: range) -> list[list[int]]:
        """Prompt positions that each head of storage keeps, ascending."""
        return [self.keep(head, self.text.queries[self.query_heads(head)], self.keys(head)) for head in heads]

    def keep(self, head: int, q: Tensor, keys: Tensor) -> list[int]:
        """Prompt positions that one head of storage keeps, ascending: q [G,T,D], keys [T,D]."""
        return list(range(keys.shape[0]))

    def choose(self, head: int, q: Tensor) -> list[int]:
        """The stored positions that a step attends to, ascending: q [G,D]."""
        return list(self.stored[head])


class SlowRanked(Slow):
    """The base of methods that score a prompt's tokens: a head of storage keeps the n best of more than n tokens.

    With `heads` = "adaptive", n is the mean over the layer's heads, and each keeps at least floor(alpha n) (Ada-KV).
    """

    def prompt_share(self, prompt: int) -> int:
        """n: how many tokens of a prompt, or of a text that long, a head of storage keeps."""
        return self.budget

    def ranks(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """A head's scores of T > n tokens, inf for those that always stay: q [G,m,D], keys and values [T,D] -> [T].

        q are the queries of the newest m tokens of the text; m is T for a prompt.
        """
        raise NotImplementedError

    def keep(self, head: int, q: Tensor, keys: Tensor) -> list[int]:
        share = self.prompt_share(keys.shape[0])
        if keys.shape[0] <= share:
            return list(range(keys.shape[0]))
        return best(self.ranks(q, keys, self.values(head)), share)

    def chunk_observed(self, held: int, chunk: int) -> int:
        """How many of the newest queries choose from `held` tokens after a chunk of a prompt: as `observed`."""
        return held

    def read(self, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int]) -> Tensor:
        """Stores a prompt in chunks: after each, the n best of what was held and of the chunk stay.

        n is the share of the whole prompt; the chunk's queries choose as a prompt's do. Returns the outputs [Hq,T,D]:
        a token attends to what was held before its chunk, and to the chunk up to itself.
        """
        heads, end, y = range(self.plan.n_kv_head if self.shared else self.plan.n_head), 0, torch.empty_like(q)
        share, self.stored = self.prompt_share(sum(sizes)), [[] for _ in heads]
        for n in sizes:
            end += n
            self.text = Text(self.plan, q[:, :end], k[:, :end], v[:, :end])
            held = [[*self.stored[head], *range(end - n, end)] for head in heads]
            for head, i in product(heads, range(n)):
                at = self.query_heads(head)
                seen = held[head][: len(held[head]) - n + i + 1]
                y[at, end - n + i] = self.attend(head, self.text.queries[at, end - n + i], seen).float()
            if sum(map(len, held)) > share * len(heads):
                queries = [
                    self.text.queries[self.query_heads(h), -self.chunk_observed(len(held[h]), n) :] for h in heads
                ]
                ranks = [self.ranks(queries[h], self.keys(h)[held[h]], self.values(h)[held[h]]) for h in heads]
                equal = self.option.get("heads") != "adaptive"
                chosen = (
                    [best(x, share) for x in ranks] if equal else adaptive_heads(ranks, share, self.option["alpha"])
                )
                held = [[held[h][i] for i in chosen[h]] for h in heads]
            self.stored = held
        self.kept = [list(positions) for positions in self.stored]
        return y

    def keep_heads(self, heads: range) -> list[list[int]]:
        share = self.prompt_share(self.text.prompt)
        if self.option.get("heads") != "adaptive" or self.text.prompt <= share:
            return super().keep_heads(heads)
        queries = [self.text.queries[self.query_heads(head)] for head in heads]
        ranks = [self.ranks(queries[head], self.keys(head), self.values(head)) for head in heads]
        return adaptive_heads(ranks, share, self.option["alpha"])


class SlowSnapPlus(SlowRanked):
    """RocketKV's first stage alone (Algorithm 1): each group keeps t prompt tokens and every generated one."""

    stage = {"window": 32, "kernel": 63, "long_kernel": 511, "threshold": None, "split": "adaptive"}
    defaults = {**stage, **HEADS}

    def snap(self, q: Tensor, keys: Tensor, window: int) -> Tensor:
        """`snap_ranks` with the kernel for so many tokens."""
        threshold = self.option["threshold"]
        is_long = threshold is not None and keys.shape[0] >= threshold
        return snap_ranks(q, keys, window, self.option["long_kernel" if is_long else "kernel"])

    def ranks(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self.snap(q, keys, min(self.option["window"], self.prompt_share(keys.shape[0]) // 2))


class SlowRocket(SlowSnapPlus):
    """RocketKV: stage 1 keeps n1 - room prompt tokens, stage 2 (Algorithm 2) attends to the best pages.

    n1 follows from each prompt's own length, the sizes of stage 2 from the longest prompt of the plan.

    A page holds consecutive stored tokens. Its bound is the maximum of its keys in channels where sum_G q >= 0, and
    their minimum in the others, or lies nearer to the mean key. With the channels r of the largest sum_G |q|, its
    score is the sum over the group of the softmax over the pages of q_r . bound_r / sqrt(D |q_r|_1 / |q|_1).
    """

    defaults = {**SlowSnapPlus.stage, "newest": True, "reach": 0.5}

    def sizes(self, prompt: int | None = None) -> dict[str, int]:
        """The sizes of both stages."""
        plan = self.plan
        planned = (prompt or plan.max_prompt) + plan.room
        return rocket_sizes(planned, self.budget, plan.room, plan.head_dim, self.option["split"])

    def prompt_share(self, prompt: int) -> int:
        return min(self.sizes(prompt)["keep"], self.sizes()["keep"])

    def choose(self, head: int, q: Tensor) -> list[int]:
        sizes, stored = self.sizes(), self.stored[head]
        keys = self.keys(head)[stored]
        pages = split_pages(len(stored), sizes["page"])
        channels = largest_channels(q, sizes["channels"])
        q_sum = q.sum(0)
        bound = torch.zeros(len(pages), q.shape[1], dtype=torch.float64)
        for i, tokens in enumerate(pages):
            low, high = bounds(keys, tokens, self.option["reach"])
            bound[i] = torch.where(q_sum >= 0, high, low)
        scores = sum(partial_weights(one, bound, channels) for one in q)
        if self.option["newest"]:
            scores[-1] = torch.inf
        return [stored[token] for i in best(scores, sizes["pages"]) for token in pages[i]]


class SlowRocketTurns(SlowRocket):
    """RocketKV's multi-turn form: no token is forgotten, and each turn chooses anew what its answer may attend to.

    The history (`text`) holds every token of every turn, the small store (`stored`) what stage 1 chose at the last
    prompt or turn and the tokens generated since. Stage 2 reads the small store alone.
    """

    def turn(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Continues the row by a text, then chooses from the whole history: q [Hq,n,D], k and v [Hk,n,D] -> [Hq,n,D].

        The text attends to every earlier token, also to those that the small store lacks.
        """
        text, start, count = self.text, self.text.length, k.shape[1]
        for i in range(count):
            text.append(q[:, i], k[:, i], v[:, i])
        y = masked_attention(text.queries, text.keys, text.values, causal(), range(start, text.length))
        self.kept = [self.keep_of_history(head, count) for head in range(self.plan.n_kv_head)]
        self.stored = [list(kept) for kept in self.kept]
        return y.float()

    def keep_of_history(self, head: int, count: int) -> list[int]:
        """Positions that one KV head keeps after a turn of `count` tokens, ascending; its queries alone choose.

        It keeps the prompt's share, and one for each later token: generated tokens count in SlowRocket's n1, too.
        """
        tokens, prompt = self.text.length, self.text.prompt
        share = self.prompt_share(prompt) + tokens - prompt
        if tokens <= share:
            return list(range(tokens))
        window = min(self.option["window"], count, share // 2)
        return best(self.snap(self.text.queries[self.query_heads(head)], self.keys(head), window), share)


class SlowHybrid(SlowRocket):
    """RocketKV's second stage alone: the whole prompt is kept, n1 = S."""

    def sizes(self, prompt: int | None = None) -> dict[str, int]:
        plan = self.plan
        sizes = hybrid_sizes(plan.planned, self.budget, plan.head_dim)
        return {"n1": plan.planned, "keep": plan.max_prompt, **sizes}

    def keep(self, head: int, q: Tensor, keys: Tensor) -> list[int]:
        return list(range(keys.shape[0]))


class SlowCompressing(SlowRanked):
    """The base of methods that may also compress while they generate: R-KV's decoding buffer (arXiv 2505.24133).

    With `every` = N > 0, a head of storage holds at most N tokens more than n (`prompt_share`), or than its latest
    choice kept if those are more. Before a step or a text that finds so many, and after a text that leaves more, the
    method chooses n of the held tokens, which take the place of a prompt in order of position: `ranks` gets the text's
    newest `observed` queries, and the held keys and values. With `every` = 0, every generated token stays.

    `kept` is what each head's latest choice kept: `stored` is that and all positions since. `compressions` are, by
    head, the lengths of the text at which it chose again.
    """

    defaults = {"every": 0, **HEADS}

    def observed(self, held: int) -> int:
        """How many of the text's newest queries the choice from `held` tokens gets: as many, so that the last line up.

        A choice that reads the last `window` queries finds query i of them at the held index held - window + i.
        """
        return held

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().prefill(q, k, v)
        self.compressions: list[list[int]] = [[] for _ in self.stored]

    def read(self, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int]) -> Tensor:
        self.compressions = [[] for _ in range(self.plan.n_kv_head if self.shared else self.plan.n_head)]
        return super().read(q, k, v, sizes)

    def compress(self, head: int) -> None:
        """Keeps n of the tokens that one head of storage holds."""
        held, share = self.stored[head], self.prompt_share(self.text.length)
        first = self.text.length - self.observed(len(held))
        queries = self.text.queries[self.query_heads(head), first:]
        indices = best(self.ranks(queries, self.keys(head)[held], self.values(head)[held]), share)
        self.kept[head] = [held[i] for i in indices]
        self.stored[head] = list(self.kept[head])
        self.compressions[head].append(self.text.length)

    def compress_from(self, least: int) -> None:
        """Compresses the heads of storage that hold at least `least` tokens more than they kept or may keep."""
        share = self.prompt_share(self.text.length)
        for head in range(len(self.stored)):
            if self.option["every"] and len(self.stored[head]) - max(len(self.kept[head]), share) >= least:
                self.compress(head)

    def decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.compress_from(self.option["every"])
        return super().decode(q, k, v)

    def extend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Continues the row by a text: q [Hq,n,D], k and v [Hk,n,D] -> [Hq,n,D].

        Each token attends to what was held before the text and to the text up to itself. `attended` holds the
        positions of the last one.
        """
        self.compress_from(self.option["every"])
        start = self.text.length
        for i in range(k.shape[1]):
            self.text.append(q[:, i], k[:, i], v[:, i])
        y, self.attended = torch.empty_like(q), []
        for head, held in enumerate(self.stored):
            heads = self.query_heads(head)
            for i in range(start, self.text.length):
                positions = [*held, *range(start, i + 1)]
                y[heads, i - start] = self.attend(head, self.text.queries[heads, i], positions).float()
            self.attended.append([*held, *range(start, self.text.length)])
        self.stored = [list(positions) for positions in self.attended]
        self.compress_from(self.option["every"] + 1)
        return y

    def run(self, q: Tensor, k: Tensor, v: Tensor, prompt: int, texts: Sequence[int] = ()) -> Tensor:
        """A row of N tokens, from its prompt to its end: q [Hq,N,D], k and v [Hk,N,D] -> [Hq,N - prompt,D].

        The tokens after the prompt are added in texts of the given lengths, in order; a text of one token is a step.
        Steps add what the texts leave.
        """
        steps = k.shape[1] - prompt - sum(texts)
        self.prefill(q[:, :prompt], k[:, :prompt], v[:, :prompt])
        end, found = prompt, []
        for count in [*texts, *[1] * steps]:
            start, end = end, end + count
            if count == 1:
                found.append(self.decode(q[:, start], k[:, start], v[:, start])[:, None])
            else:
                found.append(self.extend(q[:, start:end], k[:, start:end], v[:, start:end]))
        return torch.cat(found, 1)


class SlowSnap(SlowCompressing):
    """SnapKV: a group keeps t prompt tokens; without `gqa`, each query head keeps floor(t / G) of its own.

    `deduct` subtracts the room from t first.
    """

    defaults = {"window": 32, "kernel": 7, "gqa": True, "deduct": False, **SlowCompressing.defaults}

    def prompt_share(self, prompt: int) -> int:
        share = self.budget - (self.plan.room if self.option["deduct"] else 0)
        return share if self.shared else share // self.groups

    def ranks(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        window = min(self.option["window"], self.prompt_share(keys.shape[0]) // 2)
        return snap_ranks(q, keys, window, self.option["kernel"])


class SlowPyramid(SlowCompressing):
    """PyramidKV: SnapKV with choices shared by the group and budgets that fall from the first layer to the last."""

    defaults = {"window": 32, "kernel": 7, **SlowCompressing.defaults}

    def prompt_share(self, prompt: int) -> int:
        return pyramid_budgets(self.plan.n_layer, self.budget, self.option["window"], prompt)[self.layer]

    def ranks(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return snap_ranks(q, keys, min(self.option["window"], self.budget // 2), self.option["kernel"])


class SlowExactTopK(Slow):
    """The oracle: each query head attends to the t tokens with its highest exact softmax scores.

    With `shared`, a group attends to the t tokens with the highest sum over its query heads.
    """

    defaults = {"shared": False}

    def choose(self, head: int, q: Tensor) -> list[int]:
        return best(sum(probabilities(one, self.keys(head)) for one in q), self.budget)


class SlowQuest(Slow):
    """Quest: the newest page and the best others by the upper bound sum_i max(q_i min_i, q_i max_i)."""

    defaults = {"page": 16, "reach": 0.75}

    def sizes(self) -> tuple[int, int]:
        """(tokens per page, pages that a step attends to)"""
        page = self.option["page"]
        if page is None:
            page = max(1, half_up(Fraction(2 * self.plan.planned, self.budget)))
            return page, max(1, self.budget // (2 * page))
        return page, max(1, self.budget // page)

    def choose(self, head: int, q: Tensor) -> list[int]:
        page, count = self.sizes()
        keys = self.keys(head)
        pages = split_pages(keys.shape[0], page)
        scores = torch.zeros(len(pages), dtype=torch.float64)
        for one in q:
            logits = torch.zeros(len(pages), dtype=torch.float64)
            for i, tokens in enumerate(pages):
                low, high = bounds(keys, tokens, self.option["reach"])
                logits[i] = torch.maximum(one * low, one * high).sum() / math.sqrt(one.shape[0])
            scores += softmax(logits)
        chosen = best(scores[:-1], count - 1) + [len(pages) - 1]
        return [token for i in chosen for token in pages[i]]


class SlowSparQ(Slow):
    """SparQ: selects k = t / 2 tokens by approximate scores on r = D t / S channels; the mean of V replaces the rest.

    The newest k / 4 tokens are always selected, the others by the group's summed scores. y = a attention(selected) +
    (1 - a) mean V, where a is the query head's approximate mass on the selected tokens.
    """

    def step(self, head: int, q: Tensor) -> tuple[list[int], Tensor]:
        stored = list(self.stored[head])
        count = max(1, self.budget // 2)
        if count >= len(stored):
            return stored, self.attend(head, q, stored)
        keys, values = self.keys(head), self.values(head)
        channels = largest_channels(q, max(1, half_up(Fraction(q.shape[1] * self.budget, self.plan.planned))))
        approximate = [partial_weights(one, keys, channels) for one in q]
        older = len(stored) - count // 4
        positions = best(torch.stack(approximate).sum(0)[:older], count - count // 4) + stored[older:]
        y = self.attend(head, q, positions)
        for i in range(q.shape[0]):
            mass = approximate[i][positions].sum()
            y[i] = mass * y[i] + (1 - mass) * values.mean(0)
        return positions, y


class SlowDuo(Slow):
    """DuoAttention: retrieval heads attend to everything, streaming heads to the sinks and the most recent tokens.

    `heads` says for each KV head of this layer whether it is a retrieval head.
    """

    defaults = {"heads": None, "sinks": 128, "recent": 512}

    def visible(self, head: int, positions: list[int], length: int) -> list[int]:
        """The given positions that the head sees in a sequence of `length` tokens."""
        if self.option["heads"][head]:
            return list(positions)
        return [i for i in positions if i < self.option["sinks"] or i >= length - self.option["recent"]]

    def keep(self, head: int, q: Tensor, keys: Tensor) -> list[int]:
        return self.visible(head, list(range(keys.shape[0])), keys.shape[0])

    def choose(self, head: int, q: Tensor) -> list[int]:
        return self.visible(head, self.stored[head], self.text.length)


SLOW: dict[str, type[Slow]] = {
    "rocketkv": SlowRocket,
    "snapkv++": SlowSnapPlus,
    "hybrid": SlowHybrid,
    "snapkv": SlowSnap,
    "pyramidkv": SlowPyramid,
    "exact_topk": SlowExactTopK,
    "quest": SlowQuest,
    "sparq": SlowSparQ,
    "duo": SlowDuo,
}
