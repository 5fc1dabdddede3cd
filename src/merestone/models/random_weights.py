"""Random weights, made as a model asks for them, that keep tests strong and true sizes finite.

Knows what each weight does, by its published name. Must not know files, nor how a model is put
together: names and shapes come from the model. Three properties are built in, because a plainly
random model has none of them:

- *Memory.* Decays and write strengths of the recurrent heads are drawn so that some remember
  thousands of tokens. (A delta rule forgets by overwriting too: with K key channels and a write
  strength b, after about K / b tokens. Slow decays alone would not do.)
- *Spread.* Gains keep every sublayer's output comparable to its residual, attention peaked and
  logits apart, so that a wrong prefix changes the greedy output.
- *Text*, if asked for. Only printable ASCII, newline and, rarely, the end tokens have a chance to
  be sampled, so that a reply read as text and sent back has the tokens that were generated.

The first and the last use a channel of the residual stream (number 0) that the embedding sets to a
constant and no sublayer writes: it serves as the bias that these families' projections lack.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from merestone.models.config import Glm5NextConfig
from merestone.models.kimi_config import KimiLinearConfig

BIAS = 2.0
"""The constant channel's value in every residual stream."""
SHORTEST, LONGEST = 16.0, 8192.0
"""Tokens that a model's most forgetful and its most lasting head remember."""
GROWTH = 0.3
"""Variance that one sublayer adds to the residual stream; the embedding's is 1."""

_QUERY_GAIN = 2.5
"""Of latent attention's queries, and the deviation of its scores: a row attends to few keys."""
# By the last part of a name (before ".weight"): deviations of what is no matrix, and gains of
# matrices, which keep a unit input's size otherwise.
_DEVIATIONS = {"bias": 0.1, "e_score_correction_bias": 0.05, "index_kpool_compress_ape": 0.5}
_GAINS = {"f_b_proj": 0.5, "gate_proj": 2.0, "w1": 2.0, "gate": 2.0, "q_b_proj": _QUERY_GAIN}


class RandomWeights:
    """A :class:`merestone.layers.weights.Source` for the text model of ``config``.

    A tensor's values depend on ``seed``, its name, its shape, the configuration and the kind of
    ``device`` only, where it is made. ``text``: ids are bytes, and replies are to be text.
    """

    def __init__(
        self,
        config: Glm5NextConfig | KimiLinearConfig,
        seed: int,
        text: bool = False,
        device: str = "cpu",
    ) -> None:
        self._config = config
        self._seed = seed
        self._device = device
        self._text = text
        self._bound = config.gate_lower_bound if isinstance(config, Glm5NextConfig) else None

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor ``name`` (relative to the text model), [*shape] fp32."""
        prefix, _, leaf = name.removesuffix(".weight").rpartition(".")
        match leaf:
            case "embed_tokens":
                embedding = self._normal(name, shape)
                embedding[:, 0] = BIAS
                return embedding
            case "lm_head":
                return self._head(name, shape)
            case "A_log":
                return self._rates(prefix).view(shape)
            case "dt_bias":
                return self._decays(name, prefix)
            case "b_proj":
                return self._strengths(name, prefix, shape)
            case "o_proj" | "down_proj" | "w2":
                # Back to the residual stream, whose constant channel is left alone.
                weight = self._matrix(name, shape, self._output_gain(name, leaf))
                weight[0] = 0.0
                return weight
            case "q_proj" if self._layer_type(name) == "mla":
                return self._matrix(name, shape, _QUERY_GAIN)
        return self._plain(name, leaf, shape)

    def _plain(self, name: str, leaf: str, shape: tuple[int, ...]) -> Tensor:
        """What needs no other weight and no place: norms, convolutions, most projections."""
        if leaf.endswith("norm"):
            weight = 1.0 + self._normal(name, shape, 0.1)
            weight[0] = 1.0
            return weight
        if leaf.endswith("_scale"):
            return 1.0 + self._normal(name, shape, 0.1)
        if leaf.endswith("_base"):
            return self._normal(name, shape, 0.5)
        if leaf.endswith("_fn"):
            return self._normal(name, shape, 0.03)
        if leaf in _DEVIATIONS:
            return self._normal(name, shape, _DEVIATIONS[leaf])
        if leaf.endswith("_conv1d"):
            return self._normal(name, shape, 1.0 / math.sqrt(shape[-1]))
        assert len(shape) == 2, f"{name} {shape} has no known role"
        return self._matrix(name, shape, _GAINS.get(leaf, 1.0))

    # -- the recurrent heads --------------------------------------------------------------------

    def _memory(self, prefix: str) -> Tensor:
        """Tokens that each head remembers, [H]: even on a log scale, shaken in each layer."""
        heads = self._config.kda_heads
        shake = self._uniform(f"{prefix}.memory", (heads,), -0.5, 0.5)
        even = torch.linspace(0.0, 1.0, heads, device=self._device)
        return SHORTEST * (LONGEST / SHORTEST) ** even * shake.exp()

    def _rates(self, prefix: str) -> Tensor:
        return self._uniform(f"{prefix}.A_log", (self._config.kda_heads,), -0.3, 0.3)

    def _decays(self, name: str, prefix: str) -> Tensor:
        """The gate's bias for each head's memory, shaken in each channel, [H K]."""
        c = self._config
        memory, rates = self._memory(prefix), self._rates(prefix)
        if self._bound is None:
            bias = -memory.log() - rates  # exp(A_log) softplus(bias) is nearly 1 / memory
        else:
            bias = torch.logit(1.0 / (-self._bound * memory)) / rates.exp()
        channels = self._normal(name, (c.kda_heads, c.kda_head_dim), 0.5)
        return (bias[:, None] + channels).flatten()

    def _strengths(self, name: str, prefix: str, shape: tuple[int, ...]) -> Tensor:
        """The projection to each head's write strength, [H, D]."""
        strength = (self._config.kda_head_dim / self._memory(prefix)).clamp(max=0.5)
        weight = self._matrix(name, shape, 0.5)
        # What is left of the constant channel after this layer's norm.
        weight[:, 0] = torch.logit(strength) * math.sqrt(1.0 + 2 * _layer(name) * GROWTH) / BIAS
        return weight

    # -- pieces ---------------------------------------------------------------------------------

    def _head(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """End tokens are rare; as text, printable ids are free and no other is ever the best."""
        weight = self._matrix(name, shape, 4.0)
        weight[:, 0] = -28.0 if self._text else 0.0
        if self._text:
            weight[32:127, 0] = weight[ord("\n"), 0] = 0.0
        weight[list(self._config.eos_ids), 0] = -4.0
        return weight

    def _output_gain(self, name: str, leaf: str) -> float:
        if leaf == "o_proj":
            return 0.8 if self._layer_type(name) == "mla" else 1.0
        return 0.2 if ".experts." in name else 0.45

    def _layer_type(self, name: str) -> str:
        layer, types = _layer(name), self._config.layer_types
        return types[layer] if layer < len(types) else "mla"  # the MTP layer

    def _matrix(self, name: str, shape: tuple[int, ...], gain: float) -> Tensor:
        return self._normal(name, shape, gain / math.sqrt(shape[1]))

    def _normal(self, name: str, shape: tuple[int, ...], std: float = 1.0) -> Tensor:
        source = self._generator(name)
        return torch.randn(shape, generator=source, device=self._device).mul_(std)

    def _uniform(self, name: str, shape: tuple[int, ...], low: float, high: float) -> Tensor:
        source = self._generator(name)
        return low + (high - low) * torch.rand(shape, generator=source, device=self._device)

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(
            zlib.crc32(f"{self._seed}:{name}".encode())
        )


def _layer(name: str) -> int:
    """N of "layers.N.rest"."""
    return int(name.split(".")[1])
