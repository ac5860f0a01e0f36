"""What each method's paper says of its memory and accuracy, for law 1 and law 7 of kv/base.py.

FORMULAS gives the bytes of all layers and rows; `overhead` names what a layer allocates beyond them. LOSSLESS switches
a method's lossy parts off.
"""

from collections import Counter
from collections.abc import Callable

from kv import KV, METHODS, Method, Shape
from kv.d2o import D2O
from kv.duo import Duo
from kv.full import Full
from kv.infllm import InfLLM
from kv.kivi import Quantized
from kv.kvarn import TILE
from kv.omnikv import BankSparse, Filter, Plan
from kv.parts.evicting import Evicting
from kv.parts.fetched import FetchedTokens, Parts
from kv.parts.offload import Pool
from kv.parts.quant import channels, stored_bytes
from kv.parts.scored import LAG, Scored
from kv.parts.speculation import Speculation
from kv.pqcache import PQCache
from kv.quest import Quest
from kv.rocketkv import MultiTurn, RocketKV, Split
from kv.simlayer import SimLayer
from kv.snapkv import SnapKV
from kv.sparq import SparQ
from kv.streaming import Streaming
from kv.tailorkv import Tailored

LOSSLESS: dict[str, dict] = {
    "full": {"bits": 16},
    "rocketkv": {"bits": 16},
    "hybrid": {"bits": 16},
    "omnikv": {"bits": 16, "prefill": None},
    "kivi": {"recent": 2**30},
    "kvarn": {"tile": 1024},
    "tailorkv": {"quant_layers": []},
    "simlayer": {"threshold": 1.0},
}

# The papers' formulas


def full(shape: Shape, bits: int = 16) -> int:
    """2 L B Hk S D values, S at most the model's window."""
    if bits < 16:
        return shape.n_layer * tiles(shape, bits, bits, TILE)
    return shape.full_bytes() * min(shape.window or shape.planned, shape.planned) // shape.planned


def tiles(shape: Shape, k_bits: int, v_bits: int, tile: int) -> int:
    """One layer of kvarn: bits / 8 bytes a channel; three 16-bit numbers for each token and each tile's channel."""
    unit = shape.head_dim * (k_bits + v_bits) / 8 + 6 + 6 * shape.head_dim / tile
    return int(shape.batch * shape.n_kv_head * shape.planned * unit)


def quantized(shape: Shape, bits: int, group: int) -> int:
    """One layer, by TailorKV's Table 2: 2 S Hk D (bits / 16 + 2 / group) values if K and V share `group`."""
    vector = shape.head_dim * bits / 8
    unit = 2 * vector + 4 * shape.head_dim / group + 4 * shape.head_dim / channels(shape.head_dim)
    return int(shape.batch * shape.n_kv_head * shape.planned * unit)


def kept(method: Method, shape: Shape, budget: int) -> int:
    """The budget's tokens in every layer."""
    return shape.n_layer * budget * shape.slot_bytes


def rocketkv(method: Method, shape: Shape, budget: int) -> int:
    """n1 + ceil(n1 / p) units per KV head; n1 + n1 / 2 if p is 1. With turns S more."""
    if budget >= shape.planned:
        return full(shape, method.bits)
    skip, split = method.skipped(shape), Split(shape, min(budget, shape.planned), method.split)
    slots, (page, _) = split.slots(shape.max_prompt), split.sizes()
    bounds = (1 if page == 1 else 2) * -(-slots // page) * shape.unit_bytes // 2
    slots += shape.planned * getattr(method, "turns", False)
    sparse = shape.batch * shape.n_kv_head * (2 * slots * stored_bytes(shape, method.bits) + bounds)
    return (shape.n_layer - skip) * sparse + skip * full(shape, method.bits) // shape.n_layer


def quest(method: Method, shape: Shape, budget: int) -> int:
    """S units per KV head, and one more per page."""
    pages = -(-shape.planned // method.page_of(shape, budget))
    return shape.full_bytes() + max(0, shape.n_layer - method.skip_layers) * pages * shape.slot_bytes


def omnikv(method: Method, shape: Shape, budget: int | None) -> int:
    """The full cache, in `bits` except filter layers and new tokens of sparse layers; offload adds chosen ones."""
    plan = Plan.of(shape, budget, method)
    sparse, filters = sum(map(len, plan.segments.values())), sum(map(bool, plan.segments.values()))
    layer = shape.max_prompt * 2 * stored_bytes(shape, method.bits) + shape.max_new_tokens * shape.unit_bytes
    layer += method.offload * plan.k * shape.unit_bytes
    layers = shape.batch * shape.n_kv_head * sparse * layer
    others = (shape.n_layer - sparse - filters) * full(shape, method.bits) // shape.n_layer
    return layers + filters * shape.full_bytes() // shape.n_layer + others


def infllm(method: Method, shape: Shape, budget: int) -> int:
    """The full cache, and one fp32 vector per block and KV head."""
    _, blocks = method.blocks(shape, budget)
    return shape.full_bytes() + shape.n_layer * shape.batch * shape.n_kv_head * blocks * shape.head_dim * 4


def d2o(method: Method, shape: Shape, budget: int) -> int:
    _, _, uncounted = method.layers(shape)
    return ((shape.n_layer - uncounted) * budget + uncounted * shape.planned) * shape.slot_bytes


def tailorkv(method: Method, shape: Shape, budget: int) -> int:
    """Table 2, and K, V and K again on the host."""
    dense = len(method.quantized_layers(shape))
    sparse = shape.n_layer - dense
    prompt = shape.max_prompt * shape.slot_bytes
    buffers = 2 * shape.batch * shape.n_kv_head * method.fetched_channels(shape) * shape.max_prompt
    layers = dense * quantized(shape, method.bits, method.group) + sparse * prompt * 3 // 2
    return layers + buffers * shape.dtype.itemsize * (sparse > 0)


def pqcache(method: Method, shape: Shape, budget: int) -> int:
    """K and V of the prompt, one byte per part and token, and the centroids in fp32."""
    codes = method.partitions * shape.planned + 4 * 2**method.codebits * shape.head_dim
    heads = shape.n_layer * shape.batch * shape.n_kv_head
    return heads * (shape.max_prompt * shape.unit_bytes + codes)


def simlayer(method: Method, shape: Shape, budget: int) -> int:
    large, window = method.plan(shape, budget)
    return (large * shape.planned + (shape.n_layer - large) * window) * shape.slot_bytes


def duo(method: Method, shape: Shape, budget: int) -> int:
    """Every token in retrieval heads (this rank's), sinks and the recent window in the others."""
    count, sinks, recent = method.plan(shape, budget)
    count = sum(map(sum, method.choose(shape, count)))
    rest = shape.n_layer * shape.n_kv_head - count
    units = count * shape.planned + rest * min(sinks + recent, shape.planned)
    return shape.batch * units * shape.unit_bytes


FORMULAS: dict[str, Callable[[Method, Shape, int | None], int]] = {name: kept for name in METHODS} | {
    "full": lambda method, shape, budget: full(shape, method.bits),
    "brute_offload": lambda method, shape, budget: shape.full_bytes(),
    "exact_topk": lambda method, shape, budget: shape.full_bytes(),
    "sparq": lambda method, shape, budget: shape.full_bytes() * 3 // 2,
    "kivi": lambda method, shape, budget: shape.n_layer * quantized(shape, method.bits, method.group),
    "kvarn": lambda method, shape, budget: shape.n_layer * tiles(shape, method.kbits, method.vbits, method.tile),
    "rocketkv": rocketkv,
    "hybrid": rocketkv,
    "quest": quest,
    "omnikv": omnikv,
    "infllm": infllm,
    "d2o": d2o,
    "tailorkv": tailorkv,
    "pqcache": pqcache,
    "simlayer": simlayer,
    "duo": duo,
}


def paper_bytes(name: str, method: Method, shape: Shape, budget: int | None) -> int:
    """Bytes of all layers and rows by the paper's formula; a larger budget than `build` takes is one for everything."""
    most = budget if budget is None else max(method.minimum(shape), min(budget, method.most(shape)))
    return FORMULAS[name](method, shape, most)


# What layers allocate beyond the formulas


def staged_bytes(pool: Pool) -> int:
    """Bytes of the device buffer where fetched entries arrive, which the first of the pools that share it counts."""
    staged = getattr(pool, "staged", None)
    return staged.slots.nbytes if staged and vars(staged).setdefault("counted_by", pool.handle) == pool.handle else 0


def staging(pool: Pool) -> int:
    """Bytes of buffers beside the pool itself, on the device and on the host."""
    return pool.host_bytes - pool.memory.nbytes * pool.on_host + staged_bytes(pool)


def state_bytes(layer: KV, name: str) -> int:
    """Bytes of what describes the rows: an int64 for each row, but for a few."""
    shape = layer.shape
    if name == "position":
        each = 4 * shape.n_kv_head * (layer.slots if isinstance(layer, MultiTurn) else layer.kept)
    elif name == "index":
        each = 8 * (layer.most if isinstance(layer, Filter) else shape.n_kv_head * layer.count)
    elif name in ("newest_k", "newest_v"):
        each = shape.n_kv_head * layer.ring * shape.unit_bytes // 2
    elif name == "past":
        each = shape.n_head * (layer.queries + LAG) * shape.head_dim * shape.dtype.itemsize
    else:
        each = {"spare": 8 * shape.n_kv_head, "threshold": 4 * shape.n_kv_head}.get(name, 8)
    return shape.batch * each


def overhead(layer: KV) -> Counter[str]:
    """Bytes that a layer allocates beyond the paper's formula, by name."""
    shape, slot = layer.shape, layer.shape.slot_bytes
    named = Counter({"row state": sum(state_bytes(layer, name) for name in layer.states)})

    def buffers(kind: str, *names: str) -> None:
        named[kind] += sum(getattr(layer, name).nbytes for name in names if getattr(layer, name, None) is not None)

    buffers("RoPE frequencies", "inv_freq")
    for part in layer.children():  # a store of packed vectors
        if getattr(part, "rotation", None) is not None:
            named["rotation and bias"] += sum(
                x.nbytes for x in (part.rotation, part.bias, part.inv_freq) if x is not None
            )
    buffers("random numbers", "salt")
    buffers("owners of cells", "owner")
    if isinstance(layer, Duo):
        buffers("order of heads", "order", "back")
        return sum(map(overhead, layer.parts), named)
    if isinstance(layer, Speculation):
        named += overhead(layer.draft)
        named["the full cache"] = 0 if layer.draft.holds_all else sum(layer.full.storages().values())
        return named
    if not isinstance(layer, Quantized | SimLayer | D2O):
        named["slot past the end"] = 2 * layer.k[:, :, 0].nbytes
    if isinstance(layer, Full) and not layer.holds_all:
        named["tokens given back"] = min(shape.rewind, shape.planned - layer.recent - layer.sinks) * slot
    if isinstance(layer, Streaming):
        named["unmoved sinks"] = layer.sinks * slot // 2
    if isinstance(layer, Scored) and not isinstance(layer, RocketKV):  # rocketkv's n1 slots include them
        named["generated"] = shape.max_new_tokens * slot
        if isinstance(layer, SnapKV):  # pyramidkv
            named["what a shorter prompt keeps"] = (layer.kept - layer.kept_of(shape.max_prompt)) * slot
    if isinstance(layer, Quantized):
        buffers("tokens that wait", "k", "v")
        named["group past the end"] = shape.batch * shape.n_kv_head * layer.packed.group_bytes
    if isinstance(layer, Quest):
        named["page past the end"] = layer.low[:, :, 0].nbytes + layer.high[:, :, 0].nbytes
    if isinstance(layer, RocketKV):
        named["page past the end"] = layer.bounds[..., 0].nbytes
    if isinstance(layer, SparQ):
        named["slot past the end"] += layer.kt[..., 0].nbytes
        buffers("mean of V", "mean")
    if isinstance(layer, Evicting):
        named["spare slot"] = slot
        if not isinstance(layer, D2O) or layer.index == 0:  # d2o's layers share them
            buffers("sums and positions", *layer.sums, "position")
    if isinstance(layer, SimLayer) and layer.index == 0:
        regions = layer.regions
        capacity = regions.large * shape.planned + (shape.n_layer - regions.large) * regions.window
        named["slot past the end"] = slot
        named["whole blocks"] = (regions.starts[-1] - capacity) * slot
    if isinstance(layer, Filter):
        named["ticket"] = 0 if layer.bank is None else layer.bank.ticket.nbytes
        buffers("past scores", "past")
    named["staging"] = sum(map(staging, layer.pools))
    if isinstance(layer, Parts):
        buffers("ticket", "ticket")
    if isinstance(layer, BankSparse):
        buffers("column", "column")
        named["chosen tokens"] = 0 if layer.bank.pool.on_host else layer.bank.k * slot
    if isinstance(layer, FetchedTokens):
        named["slots"] = layer.slots * slot
    if isinstance(layer, InfLLM):
        named["chosen blocks"] = layer.count * layer.block * slot
        named["ends of blocks"] = (layer.blocks * layer.block - max(0, shape.max_prompt - layer.end_slots)) * slot
        named["ends of a short prompt"] = max(0, layer.end_slots - shape.max_prompt) * slot
    if isinstance(layer, PQCache):
        named["code past the end"] = layer.codes[..., 0].nbytes
    if isinstance(layer, Tailored):
        named["staging"] -= staged_bytes(layer.channel_pool)  # Table 2 counts those
        buffers("max |K|", "largest")
        buffers("channels", "channel")
    return Counter({kind: size for kind, size in named.items() if size})
