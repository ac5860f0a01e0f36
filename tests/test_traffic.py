"""The bytes that a step reads, by the papers' formulas, written with numbers."""

import pytest
from runs import LAYERS, MAX_PROMPT, D, make_plan

import kv
from kv.rocketkv import Split

HK, G, UNIT, SHAPE = 2, 3, 2 * D * 4, make_plan("gqa")  # 100 tokens of prompt, 30 generated
SPLIT = Split(SHAPE, 26, "even")
FIRST_HEADS = [[layer + 2.0, 0.0] for layer in range(LAYERS)]


def pages(tokens: int, size: int) -> int:
    return -(-tokens // size)


def fetched(length: int, ends: int, chosen: int, reach: int) -> tuple[int, int]:
    """(device, host) bytes of attention to both ends of a prompt, chosen tokens among `reach`, and generated ones."""
    prompt, chosen = min(length, MAX_PROMPT), min(chosen, max(0, min(length, reach) - ends))
    return HK * UNIT * (min(prompt, ends) + chosen + length - prompt), HK * UNIT * chosen


def plus(more: int, device: int, host: int, more_host: int = 0) -> tuple[int, int]:
    return device + more, host + more_host


def rocketkv(n: int) -> int:
    """r channels of every page's bounds, and half of the budget: 13 tokens, in whole pages."""
    page, channels = SPLIT.sizes()
    held = pages(min(n, SPLIT.slots(MAX_PROMPT) - 30 + max(0, n - MAX_PROMPT)), page)
    return HK * (channels * held * 4 + min(13 // page, held) * page * UNIT)


# name: (method, options, budget, (device, host) bytes of the last layer for a row of n tokens)
CASES = {
    "quest": ("quest", {"page": 4}, 24, lambda n: (HK * UNIT * (pages(n, 4) + 4 * min(6, pages(n, 4))), 0)),
    "sparq": ("sparq", {}, 26, lambda n: (HK * (3 * n * 4 + min(13, n) * UNIT + 4 * D), 0)),  # r = 16 x 26 / 130
    "exact_topk": ("exact_topk", {}, 24, lambda n: (HK * UNIT * n // 2 + HK * UNIT * min(G * 24, n), 0)),
    "shared": ("exact_topk", {"shared": True}, 24, lambda n: (HK * UNIT * n // 2 + HK * UNIT * min(24, n), 0)),
    "duo": (  # one of the two heads retrieves
        "duo",
        {"sinks": 2, "recent": 6, "head_scores": FIRST_HEADS},
        60,
        lambda n: (UNIT * (n + min(8, n)), 0),
    ),
    "brute_offload": ("brute_offload", {}, None, lambda n: (HK * UNIT * n, HK * UNIT * min(n, MAX_PROMPT))),
    "kivi": (  # a group: 8 x D codes of K and of V, a scale and zero point for each channel and for each token
        "kivi",
        {"bits": 4, "group": 8, "recent": 12},
        None,
        lambda n: (HK * (max(0, n - 12) // 8 * (8 * D + 4 * D + 4 * 8) + (20 + 8) * UNIT), 0),
    ),
    "kvarn": (  # a tile: 16 x D codes of K in 4 bits, of V in 2; three fp16 numbers for each channel and each token
        "kvarn",
        {"vbits": 2, "tile": 16},
        None,
        lambda n: (HK * (max(0, n - 18) // 16 * (16 * D * 6 // 8 + 6 * (D + 16)) + (16 + 18) * UNIT), 0),
    ),
    "rocketkv": ("rocketkv", {"split": "even"}, 26, lambda n: (rocketkv(n), 0)),
    "omnikv": ("omnikv", {}, 24, lambda n: (HK * UNIT * (min(n, 24) + max(0, n - MAX_PROMPT)), 0)),
    "omnikv:offload": (
        "omnikv",
        {"offload": True},
        24,
        lambda n: (HK * UNIT * (min(n, 24) + max(0, n - MAX_PROMPT)), HK * UNIT * min(n, 24)),
    ),
    "infllm": (  # 3 sinks, 15 local tokens, 2 blocks; a vector in fp32 for each block of the prompt
        "infllm",
        {"block": 6},
        30,
        lambda n: (fetched(n, 18, 12, MAX_PROMPT)[0] + HK * D * 4 * pages(max(0, min(n, MAX_PROMPT) - 18), 6), 0),
    ),
    "pqcache": (  # a byte for each part of every token, and 64 centroids
        "pqcache",
        {"codebits": 6},
        24,
        lambda n: plus(HK * (2 * n + 64 * D * 4), *fetched(n, 8, 16, 130)),
    ),
    "tailorkv": (  # 8 channels of the prompt's keys, on the host and where they arrive
        "tailorkv",
        {},
        24,
        lambda n: plus(HK * 8 * MAX_PROMPT * 4, *fetched(n, 8, 16, MAX_PROMPT), HK * 8 * MAX_PROMPT * 4),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_what_the_paper_says(case):
    name, options, budget, expected = CASES[case]
    layers = kv.build(name, SHAPE, budget, options)
    assert [layers[-1].step_bytes(n) for n in (5, 40, 100, 125)] == [expected(n) for n in (5, 40, 100, 125)]
    layers.close()
