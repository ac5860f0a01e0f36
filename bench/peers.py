"""Other engines as contenders, on random weights of the same shape.

transformers, with sdpa attention and each of its caches, and with a budget of tokens in the dynamic one: so kvpress
leaves it, whose methods for prompts change no later step unless heads differ. And llama.cpp, with its full cache in 16
bits and the weights in a GGUF file, for one row on a CPU. There bf16, fp16 and fp32 weights keep their dtype; int8
becomes Q8_0 and int4 Q4_0, whose blocks of 32 weights share a scale.
"""

import ctypes
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from bench.contenders import Case, seconds

NEEDED = {  # packages by module
    "transformers": {"transformers": "transformers"},
    "llama.cpp": {"llama_cpp": "llama-cpp-python", "gguf": "gguf"},
}
TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", "int8": "Q8_0", "int4": "Q4_0"}


def check(case: Case) -> None:
    """Raises ValueError for a model that is not a Llama: peers have Llama's weights and attention."""
    if case.sizes.window or case.sizes.unrotated:
        raise ValueError("other engines are measured with full attention and RoPE in every layer")


def llama(case: Case):
    """A Llama of Hugging Face's transformers with sdpa attention and random weights."""
    import transformers

    check(case)
    keys = {key: value for key, value in case.config.items() if key != "architectures"}
    config = transformers.LlamaConfig(**keys, dtype=case.dtype, attn_implementation="sdpa")
    with torch.device(case.device):
        return transformers.LlamaForCausalLM(config).to(case.dtype).eval()


class Transformers:
    """A model of transformers, which `model` returns, with one of its caches.

    kept: how many tokens the cache holds of the context; None: all.
    """

    def __init__(self, case: Case, model: Callable, cache: str, kept: int | None = None):
        import transformers

        self.case, self.label = case, f"transformers, {cache}" + f", {kept} tokens" * (kept is not None)
        self.kept, self.position = case.context if kept is None else kept, case.context
        self.model = model()
        config = self.model.config
        self.cache = transformers.DynamicCache(config=config)
        if cache.startswith("static"):
            self.cache = transformers.StaticCache(config=config, max_cache_len=case.context + case.steps)
        self.forward = torch.compile(self.model.forward) if cache == "static, compiled" else self.model.forward
        self.token = torch.ones(case.batch, 1, dtype=torch.int64, device=case.device)

    def start(self) -> None:
        c, case = self.model.config, self.case
        shape = (case.batch, c.num_key_value_heads, self.kept, c.head_dim)
        for layer in range(c.num_hidden_layers):
            self.cache.update(*(torch.randn(shape, dtype=case.dtype, device=case.device) for _ in range(2)), layer)

    @torch.no_grad()
    def step(self) -> None:
        position = torch.full_like(self.token, self.position)  # otherwise it would follow from the tokens held
        inputs = {"input_ids": self.token, "position_ids": position, "past_key_values": self.cache}
        logits = self.forward(**inputs, use_cache=True).logits
        self.position += 1
        self.token = logits[:, -1:].argmax(-1)
        self.token[0].tolist()


def write_gguf(case: Case, path: Path) -> None:
    """Writes a model without a vocabulary; all norm weights are 1, in fp32."""
    import gguf
    import numpy

    c, kind = case.sizes, gguf.GGMLQuantizationType[TYPES[case.quantize or case.dtype]]
    out, generator = gguf.GGUFWriter(path, "llama", use_temp_file=True), numpy.random.default_rng(0)
    for key, value in {
        "context_length": c.max_length,
        "embedding_length": c.dim,
        "block_count": c.n_layer,
        "feed_forward_length": c.ffn_dim,
        "head_count": c.n_head,
        "head_count_kv": c.n_kv_head,
        "key_length": c.head_dim,
        "value_length": c.head_dim,
        "rope_dimension_count": c.head_dim,
        "rope_freq_base": c.rope["rope_theta"],
        "layer_norm_rms_eps": c.norm_eps,
        "vocab_size": c.vocab_size,
        "tokenizer_model": "no_vocab",
    }.items():
        getattr(out, f"add_{key}")(value)
    linear = {"attn_q": (c.n_head * c.head_dim, c.dim), "attn_output": (c.dim, c.n_head * c.head_dim)}
    linear |= dict.fromkeys(("attn_k", "attn_v"), (c.n_kv_head * c.head_dim, c.dim))
    linear |= {"ffn_gate": (c.ffn_dim, c.dim), "ffn_up": (c.ffn_dim, c.dim), "ffn_down": (c.dim, c.ffn_dim)}
    shapes = {"token_embd": (c.vocab_size, c.dim)} | ({} if c.tied else {"output": (c.vocab_size, c.dim)})
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(c.n_layer) for name, shape in linear.items()}
    for name, shape in shapes.items():
        values = generator.standard_normal(shape, dtype=numpy.float32) * numpy.float32(0.02)
        out.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    for name in ["output_norm", *(f"blk.{i}.{norm}_norm" for i in range(c.n_layer) for norm in ("attn", "ffn"))]:
        out.add_tensor(f"{name}.weight", numpy.ones(c.dim, dtype=numpy.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


class LlamaCpp:
    """llama.cpp's decoding of one row, with or without its flash attention. Raises ValueError for other cases."""

    def __init__(self, case: Case, flash: bool):
        import llama_cpp as api

        check(case)
        if case.batch != 1 or case.device.type != "cpu":
            raise ValueError("llama.cpp is measured with one row on a CPU")
        self.case, self.api, self.label = case, api, "llama.cpp, flash" if flash else "llama.cpp"
        self.quiet = api.llama_log_callback(lambda *_: None)  # referenced as long as llama.cpp may call it
        api.llama_log_set(self.quiet, None)
        api.llama_backend_init()
        how = api.llama_model_default_params()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(case, path)
            how.use_mmap = False
            self.model = api.llama_model_load_from_file(str(path).encode(), how)
        plan = api.llama_context_default_params()
        plan.n_ctx = -(-(case.context + case.steps) // 256) * 256
        plan.n_batch = plan.n_ubatch = 512
        plan.n_threads = plan.n_threads_batch = torch.get_num_threads()
        plan.flash_attn_type = int(flash)
        self.context = self.model and api.llama_init_from_model(self.model, plan)
        if not self.context:
            raise ValueError(f"{self.label} cannot load this shape")
        self.vocab, self.token = case.config["vocab_size"], 1

    def feed(self, tokens: list[int]) -> None:
        """Adds tokens to the row and takes the best next one."""
        ids = (ctypes.c_int32 * len(tokens))(*tokens)  # referenced here until the batch has been read
        if self.api.llama_decode(self.context, self.api.llama_batch_get_one(ids, len(tokens))) != 0:
            raise ValueError(f"{self.label} failed at {len(tokens)} tokens")
        logits = self.api.llama_get_logits_ith(self.context, -1)
        values = torch.frombuffer(
            (ctypes.c_float * self.vocab).from_address(ctypes.addressof(logits.contents)), dtype=torch.float32
        )
        self.token = int(values.argmax())

    def start(self) -> float:
        tokens = torch.randint(self.vocab, (self.case.context,)).tolist()
        return seconds(lambda: [self.feed(tokens[i : i + 512]) for i in range(0, len(tokens), 512)])

    def step(self) -> None:
        self.feed([self.token])
