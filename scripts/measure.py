"""Measures what the engine promises, on this machine, with random weights. Nothing else should run meanwhile.

  python scripts/measure.py decode   ms/token of full at 16K tokens against transformers' caches, in one run
  python scripts/measure.py memory   peak memory of a 32K-token prompt above weights and full cache
  python scripts/measure.py floor    CUDA: ms/token of Llama-3.1-8B's shape against bytes / read bandwidth
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from decoder import CONTINUE, Sampling
from engine import Engine
from generate import peak_resident
from kv import ops
from model import ModelConfig, Transformer

SMALL = {  # 12 layers, 12 query and 4 KV heads of 64: 117 M parameters
    "architectures": ["LlamaForCausalLM"], "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 32000, "max_position_embeddings": 131072,
}  # fmt: skip
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}  # fmt: skip


def random_engine(
    config: dict, device: torch.device, dtype: torch.dtype = torch.bfloat16, compile: bool = True, **plan
) -> Engine:
    with torch.device("meta"):
        model = Transformer(ModelConfig.from_dict(config)).to(dtype)
    model = model.to_empty(device=device).requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return Engine(model, None, set(), {}, compile, seed=0).use("full", **plan)


def fill(engine: Engine, length: int) -> None:
    """Every row holds `length` random tokens, without the cost of a prefill."""
    c, attention = engine.config, ops.causal_attention
    ops.causal_attention = lambda q, k, v, window=None: q
    shapes = [(1, heads, length, c.head_dim) for heads in (c.n_head, c.n_kv_head, c.n_kv_head)]
    try:
        for row in range(engine.batch):
            for layer in engine.layers:
                layer.prefill(row, *(torch.randn(s, device=engine.device, dtype=engine.dtype) for s in shapes))
            engine.decoder.start(row, 1, length, row)
    finally:
        ops.causal_attention = attention


def median_ms(step, n: int = 15) -> float:
    """Median over n steps after two to warm up, each waited for."""
    times = []
    for _ in range(n + 2):
        begin = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[2:])


def read_bandwidth(device: torch.device) -> float:
    """Bytes/s of a large sum."""
    data = torch.ones(2**32 if device.type == "cuda" else 2**29, dtype=torch.float32, device=device)
    ms = median_ms(data.sum, 9)
    return data.nbytes / ms * 1e3


def step_bytes(engine: Engine, length: int) -> int:
    """Weights (with the head, without the embedding table) and cache that one step reads."""
    weights = sum(p.nbytes for p in engine.model.parameters())
    table = 0 if engine.config.tied else engine.model.tok_embeddings.weight.nbytes
    return weights - table + engine.batch * sum(layer.step_bytes(length)[0] for layer in engine.layers)


def ours(engine: Engine, length: int):
    """A decode step at `length` tokens, as a function to time."""
    engine._warm_up(Sampling(), length)
    fill(engine, length)
    new = 0

    def step() -> None:
        nonlocal new
        new += 1
        engine._copy(engine._step([CONTINUE] * engine.batch, length + new, new)[0])()

    return step


def theirs(config: dict, length: int, cache: str):
    """A decode step of transformers with sdpa attention, as a function to time."""
    import transformers

    keys = {k: v for k, v in config.items() if k != "architectures"}
    hf = transformers.LlamaConfig(**keys, torch_dtype="bfloat16", attn_implementation="sdpa")
    with torch.no_grad():
        model = transformers.LlamaForCausalLM(hf).to(torch.bfloat16).eval()
    heads = (1, hf.num_key_value_heads, length, hf.head_dim)
    kv = transformers.DynamicCache(config=hf)
    if cache.startswith("static"):
        kv = transformers.StaticCache(config=hf, max_cache_len=length + 64)
    for layer in range(hf.num_hidden_layers):
        kv.update(*(torch.randn(heads, dtype=torch.bfloat16) for _ in range(2)), layer)
    forward = torch.compile(model.forward) if cache == "static, compiled" else model.forward
    token = torch.tensor([[1]])

    @torch.no_grad()
    def step() -> None:
        nonlocal token
        logits = forward(input_ids=token, past_key_values=kv, use_cache=True).logits
        token = logits[:, -1:].argmax(-1)

    return step


def decode(length: int = 16384) -> None:
    engine = random_engine(SMALL, torch.device("cpu"), max_prompt=length, max_new_tokens=256)
    steps = {"kv-fast": ours(engine, length)}
    print(f"compiled {engine.stats.compiles} time(s), {engine.stats.compile_s:.1f} s")
    for cache in ("dynamic", "static", "static, compiled"):
        steps[f"transformers, {cache}"] = theirs(SMALL, length, cache)
    times = {name: [] for name in steps}
    for _ in range(3):  # in turns, so that a change of the machine's speed meets all of them
        for name, step in steps.items():
            times[name].append(median_ms(step))
    bandwidth = read_bandwidth(torch.device("cpu"))
    floor = step_bytes(engine, length) / bandwidth * 1e3
    threads = torch.get_num_threads()
    print(f"{threads} threads, bf16, {length} tokens, reads {bandwidth / 1e9:.0f} GB/s, floor {floor:.1f} ms")
    best = min(statistics.median(t) for name, t in times.items() if name != "kv-fast")
    for name, t in times.items():
        ms = statistics.median(t)
        print(f"{name:32} {ms:8.1f} ms/token ({min(t):.1f} to {max(t):.1f}), {ms / floor:.1f} times the floor")
    print(f"kv-fast decodes {best / statistics.median(times['kv-fast']):.2f} times as fast as the fastest of them")


def memory(length: int = 32768) -> None:
    before = peak_resident()
    engine = random_engine(SMALL, torch.device("cpu"), max_prompt=length, max_new_tokens=64)
    weights = sum(p.nbytes for p in engine.model.parameters())
    begin = time.perf_counter()
    engine.generate(torch.randint(32000, (length,)).tolist(), max_new_tokens=8)
    kv = engine.kv_bytes()[2]
    peak, mb, seconds = peak_resident() - before, 1e6, time.perf_counter() - begin
    print(f"{length} tokens in {seconds:.0f} s: weights {weights / mb:.0f} MB, full KV {kv / mb:.0f} MB")
    print(f"peak above the interpreter {peak / mb:.0f} MB: {(peak - weights - kv) / mb:.0f} MB more than these")


def floor() -> None:
    device = torch.device("cuda")
    bandwidth = read_bandwidth(device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, reads {bandwidth / 1e9:.0f} GB/s")
    for length in (1024, 16384, 65536, 131072 - 256):
        engine = random_engine(LLAMA_8B, device, max_prompt=length, max_new_tokens=256)
        ms = median_ms(ours(engine, length), 50)
        least = step_bytes(engine, length) / bandwidth * 1e3
        compile_s, peak = engine.stats.compile_s, torch.cuda.max_memory_allocated() / 1e9
        print(f"{length:7} tokens: {ms:.2f} ms/token, floor {least:.2f} ms, {ms / least:.2f} times the floor")
        print(f"        compiled {engine.stats.compiles}, {compile_s:.0f} s; peak {peak:.1f} GB", flush=True)
        del engine
        torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("decode", "memory", "floor"))
    {"decode": decode, "memory": memory, "floor": floor}[p.parse_args().what]()
