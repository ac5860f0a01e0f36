"""Fixtures: small checkpoints that the tests build, and one compile cache for the whole run."""

import io
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

# Set before torch is imported: all tests and the subprocesses they start share the compiled kernels.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "kv-fast-test-inductor"))
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / "kv-fast-test-cache")  # not the user's products.json
os.environ["KV_FAST_PACKAGES"] = "0"  # but for the tests of packages: to compile one takes longer
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads leave their core to the other test process

import pytest
import sentencepiece
import torch

from kv import Plan
from model import Transformer
from runtime.checkpoint import write_checkpoint
from runtime.hf_config import from_hf
from tasks import shipped_haystack

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs and their children ignore it
for function in (torch.cos, torch.sin, torch.exp):  # MKL's first multithreaded call can lose precision
    function(torch.ones(1))

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def llama_8b(**plan) -> Plan:
    """Llama-3.1-8B's, on the meta device: memory can be counted, and nothing is allocated."""
    return Plan(32, 32, 8, 128, 4096, "llama3", 5e5, torch.bfloat16, torch.device("meta"), **plan, max_length=131072)


def with_scores(name: str, options: dict, plan: Plan) -> dict:
    """The options, and for duo random `head_scores` of such a model."""
    scores = {"head_scores": torch.rand(plan.n_layer, plan.n_kv_head).tolist()}
    return options | (scores if name == "duo" else {})


def pytest_addoption(parser):
    how = "run all cases where a run otherwise samples them; takes hours"
    parser.addoption("--exhaustive", action="store_true", help=how)


def slow(*case):
    """A case of a test that `make test` leaves out."""
    return pytest.param(*case, marks=pytest.mark.slow)


def exhaustive(*case):
    """A case of a test that runs with --exhaustive alone."""
    return pytest.param(*case, marks=pytest.mark.exhaustive)


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--exhaustive"):
        left = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def offload_threads() -> Callable[[], list[threading.Thread]]:
    """Lists the offload threads that have started since; other tests' caches may await the garbage collector."""
    others = set(threading.enumerate())
    return lambda: [t for t in threading.enumerate() if t.name.startswith("kv-offload") and t not in others]


@pytest.fixture
def traced_only(monkeypatch):
    """Traced as for compiling, and then run by torch."""
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, examples, **options: graph)


def write_random(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> Path:
    """Writes a converted checkpoint with random weights and no tokenizer; its logits are far from uniform."""
    config = LLAMA | changes
    model = Transformer(from_hf(config))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        scale = 0.2 if parameter.dim() > 1 and "embeddings" not in name else 1.0
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
        parameter.data += parameter.dim() == 1  # norms around 1
    model.to(dtype)
    write_checkpoint(folder, config, model.config, model.state_dict(), model.state_dict().__getitem__)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A random two-layer GQA Llama in fp32."""
    return write_random(tmp_path_factory.mktemp("checkpoint") / "llama")


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory) -> Path:
    """A random checkpoint with a tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("checkpoint") / "text", io.BytesIO()
    sizes = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "head_dim": 64, "vocab_size": 1024}
    ends = {"max_position_embeddings": 32768, "bos_token_id": 1, "eos_token_id": 2}
    write_random(folder, dtype=torch.bfloat16, intermediate_size=768, **sizes, **ends)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(shipped_haystack().splitlines()),
        model_writer=tokenizer,
        vocab_size=1024,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        minloglevel=2,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
    )
    (folder / "tokenizer.model").write_bytes(tokenizer.getvalue())
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(text_checkpoint, tmp_path_factory) -> Path:
    """A random checkpoint with two small layers in fp32 and a tokenizer."""
    folder = write_random(
        tmp_path_factory.mktemp("checkpoint") / "tiny", vocab_size=1024, bos_token_id=1, eos_token_id=2
    )
    shutil.copy(text_checkpoint / "tokenizer.model", folder)
    return folder
