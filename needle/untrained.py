"""A checkpoint with random weights, made on the spot: the engine's demo until a trained one lies in this folder."""

import io
from pathlib import Path

import sentencepiece
import torch

from checkpoint import write_checkpoint
from model import ModelConfig, Transformer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "vocab_size": 1024,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_untrained(out: Path, seed: int = 0) -> None:
    """Writes a checkpoint to `out`: random weights, and a tokenizer of this folder's demo text."""
    text, tokenizer = (Path(__file__).parent / "demo.txt").read_text(), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()), model_writer=tokenizer, vocab_size=CONFIG["vocab_size"],
        model_type="bpe", byte_fallback=True, split_digits=True, hard_vocab_limit=True, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = Transformer(ModelConfig.from_dict(CONFIG)).to(torch.bfloat16)

    def random(name: str) -> torch.Tensor:
        shape = model.state_dict()[name].shape
        weight = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return weight.to(torch.bfloat16)

    write_checkpoint(out, CONFIG, model.state_dict(), random)
    (out / "tokenizer.model").write_bytes(tokenizer.getvalue())
