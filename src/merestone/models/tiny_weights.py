"""Weights for tiny models that make tests strong.

Knows the published tensor names of each family. Must not know files. Three properties are built
in, because a random model has none of them:

- *Memory.* Decays and write strengths of the recurrent heads are drawn so that some remember
  thousands of tokens. (A delta rule forgets by overwriting too: with K key channels and a write
  strength b, after about K / b tokens. Slow decays alone would not do.)
- *Spread.* Gains keep every sublayer's output comparable to its residual, attention peaked and
  logits apart, so that a wrong prefix changes the greedy output.
- *Text.* Only printable ASCII, newline and, rarely, the end tokens have a chance to be sampled, so
  that a reply read as text and sent back has the tokens that were generated.

The first and the last use a channel of the residual stream (number 0) that the embedding sets to a
constant and no sublayer writes: it serves as the bias that this family's projections lack.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from merestone.models.config import Glm5NextConfig

Named = Iterator[tuple[str, Tensor]]

BIAS = 2.0
"""The constant channel's value in every residual stream."""
SHORTEST, LONGEST = 16.0, 8192.0
"""Tokens that a model's most forgetful and its most lasting head remember."""
GROWTH = 0.3
"""Variance that one sublayer adds to the residual stream; the embedding's is 1."""


def draw(config: Glm5NextConfig, seed: int) -> Named:
    """All tensors of the text model in fp32, by published name relative to it.

    A tensor's values depend on ``seed``, its name and its shape only.
    """
    return _Glm5Next(config, seed).tensors()


class _Glm5Next:
    def __init__(self, config: Glm5NextConfig, seed: int) -> None:
        self.config = config
        self.seed = seed

    def tensors(self) -> Named:
        c = self.config
        embedding = self.normal("embed_tokens.weight", (c.vocab_size, c.hidden_size))
        embedding[:, 0] = BIAS
        yield "embed_tokens.weight", embedding
        for layer in range(c.num_layers):
            prefix = f"layers.{layer}."
            yield from self.hyper(prefix + "hc_attn")
            yield from self.norm(prefix + "input_layernorm.weight", c.hidden_size)
            attention = self.kda if c.layer_types[layer] == "kda" else self.mla
            yield from attention(prefix + "self_attn.", layer)
            yield from self.hyper(prefix + "hc_ffn")
            yield from self.norm(prefix + "post_attention_layernorm.weight", c.hidden_size)
            if c.mlp_types[layer] == "dense":
                yield from self.mlp(prefix + "mlp.", c.intermediate_size)
            else:
                yield from self.moe(prefix + "mlp.")
        yield from self.norm("norm.weight", c.hidden_size)
        yield "lm_head.weight", self.head()

    def normal(self, name: str, shape: tuple[int, ...], std: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}:{name}".encode()))
        return torch.randn(shape, generator=generator) * std

    def uniform(self, name: str, shape: tuple[int, ...], low: float, high: float) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}:{name}".encode()))
        return low + (high - low) * torch.rand(shape, generator=generator)

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> Named:
        """A projection that keeps a unit input's size, times ``gain``."""
        yield name, self.normal(name, (rows, columns), gain / math.sqrt(columns))

    def output(self, name: str, columns: int, gain: float = 1.0) -> Named:
        """A projection back to the residual stream, which leaves the constant channel alone."""
        weight = self.normal(name, (self.config.hidden_size, columns), gain / math.sqrt(columns))
        weight[0] = 0.0
        yield name, weight

    def norm(self, name: str, size: int) -> Named:
        weight = 1.0 + self.normal(name, (size,), 0.1)
        weight[0] = 1.0
        yield name, weight

    def hyper(self, name: str) -> Named:
        c = self.config
        outputs = (2 + c.hc_mult) * c.hc_mult
        yield name + "_fn", self.normal(name + "_fn", (outputs, c.hc_mult * c.hidden_size), 0.03)
        yield name + "_base", self.normal(name + "_base", (outputs,), 0.5)
        yield name + "_scale", 1.0 + self.normal(name + "_scale", (3,), 0.1)

    def kda(self, prefix: str, layer: int) -> Named:
        c = self.config
        width = c.kda_heads * c.kda_head_dim
        for part in "qkv":
            yield from self.matrix(f"{prefix}{part}_proj.weight", width, c.hidden_size)
            name = f"{prefix}{part}_conv1d.weight"
            yield name, self.normal(name, (width, 1, c.conv_kernel), 1.0 / math.sqrt(c.conv_kernel))
        yield from self.gate(prefix, layer)
        yield from self.matrix(prefix + "g_a_proj.weight", c.kda_head_dim, c.hidden_size)
        yield from self.matrix(prefix + "g_b_proj.weight", width, c.kda_head_dim)
        yield from self.norm(prefix + "o_norm.weight", c.kda_head_dim)
        yield from self.output(prefix + "o_proj.weight", width)

    def gate(self, prefix: str, layer: int) -> Named:
        """Decay and write strength of each head, from the number of tokens that it remembers."""
        c = self.config
        width = c.kda_heads * c.kda_head_dim
        # Spread over the heads evenly on a log scale, shaken a little in each layer.
        place = torch.linspace(0.0, 1.0, c.kda_heads)
        shake = self.uniform(prefix + "memory", (c.kda_heads,), -0.5, 0.5)
        memory = SHORTEST * (LONGEST / SHORTEST) ** place * shake.exp()
        a_log = self.uniform(prefix + "A_log", (c.kda_heads,), -0.3, 0.3)
        if c.gate_lower_bound is None:
            bias = -memory.log() - a_log  # exp(A_log) softplus(bias) is nearly 1 / memory
        else:
            bias = torch.logit(1.0 / (-c.gate_lower_bound * memory)) / a_log.exp()
        yield prefix + "A_log", a_log
        channels = self.normal(prefix + "dt_bias", (c.kda_heads, c.kda_head_dim), 0.5)
        yield prefix + "dt_bias", (bias[:, None] + channels).flatten()
        yield from self.matrix(prefix + "f_a_proj.weight", c.kda_head_dim, c.hidden_size)
        yield from self.matrix(prefix + "f_b_proj.weight", width, c.kda_head_dim, 0.5)
        strength = (c.kda_head_dim / memory).clamp(max=0.5)
        name = prefix + "b_proj.weight"
        weight = self.normal(name, (c.kda_heads, c.hidden_size), 0.5 / math.sqrt(c.hidden_size))
        # What is left of the constant channel after this layer's norm.
        weight[:, 0] = torch.logit(strength) * math.sqrt(1.0 + 2 * layer * GROWTH) / BIAS
        yield name, weight

    def mla(self, prefix: str, layer: int) -> Named:
        c = self.config
        yield from self.matrix(prefix + "q_a_proj.weight", c.q_lora_rank, c.hidden_size)
        yield from self.norm(prefix + "q_a_layernorm.weight", c.q_lora_rank)
        # Scores with a deviation of 2.5: a row attends to few of its keys.
        queries = c.num_heads * c.qk_nope_head_dim
        yield from self.matrix(prefix + "q_b_proj.weight", queries, c.q_lora_rank, 2.5)
        yield from self.matrix(prefix + "kv_a_proj_with_mqa.weight", c.kv_lora_rank, c.hidden_size)
        yield from self.norm(prefix + "kv_a_layernorm.weight", c.kv_lora_rank)
        rows = c.num_heads * (c.qk_nope_head_dim + c.v_head_dim)
        yield from self.matrix(prefix + "kv_b_proj.weight", rows, c.kv_lora_rank)
        yield from self.output(prefix + "o_proj.weight", c.num_heads * c.v_head_dim, 0.8)
        yield from self.index(prefix + "indexer.")

    def index(self, prefix: str) -> Named:
        c = self.config
        size = c.index_head_dim
        yield from self.matrix(prefix + "wq_b.weight", c.index_heads * size, c.q_lora_rank)
        yield from self.matrix(prefix + "wk.weight", size, c.hidden_size)
        yield from self.norm(prefix + "k_norm.weight", size)
        yield prefix + "k_norm.bias", self.normal(prefix + "k_norm.bias", (size,), 0.1)
        yield from self.matrix(prefix + "weights_proj.weight", c.index_heads, c.hidden_size)
        name = prefix + "index_kpool_compress_gate"
        yield from self.matrix(name, size, c.hidden_size)
        name = prefix + "index_kpool_compress_ape"
        yield name, self.normal(name, (c.index_kpool, size), 0.5)

    def mlp(self, prefix: str, size: int, gain: float = 0.45) -> Named:
        c = self.config
        yield from self.matrix(prefix + "gate_proj.weight", size, c.hidden_size, 2.0)
        yield from self.matrix(prefix + "up_proj.weight", size, c.hidden_size)
        yield from self.output(prefix + "down_proj.weight", size, gain)

    def moe(self, prefix: str) -> Named:
        c = self.config
        yield from self.matrix(prefix + "gate.weight", c.num_experts, c.hidden_size, 2.0)
        name = prefix + "gate.e_score_correction_bias"
        yield name, self.normal(name, (c.num_experts,), 0.05)
        for expert in range(c.num_experts):
            yield from self.mlp(f"{prefix}experts.{expert}.", c.moe_intermediate_size, 0.2)
        shared = c.moe_intermediate_size * c.num_shared_experts
        yield from self.mlp(prefix + "shared_experts.", shared)

    def head(self) -> Tensor:
        """The head: text is free, end tokens are rare, nothing else is ever the best."""
        c = self.config
        shape = (c.vocab_size, c.hidden_size)
        weight = self.normal("lm_head.weight", shape, 4.0 / math.sqrt(c.hidden_size))
        weight[:, 0] = -28.0
        weight[32:127, 0] = weight[ord("\n"), 0] = 0.0
        weight[list(c.eos_ids), 0] = -4.0
        return weight
