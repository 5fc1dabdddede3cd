"""Weight files: every tensor accounted for, fused forms split as views, damage told by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from merestone.models.checkpoint import LoadError, read_weights
from merestone.models.config import Glm5NextConfig, read_config
from merestone.models.tiny import write_tiny

PREFIX = "model.language_model."


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_tiny(tmp_path, layers=4, experts=2)
    return tmp_path


def change(directory: Path, **tensors: Tensor | None) -> Glm5NextConfig:
    """Add tensors to the single file, or take out those given as None."""
    path = directory / "model.safetensors"
    stored = {name: value.clone() for name, value in load_file(path).items()}
    for name, value in tensors.items():
        if value is None:
            del stored[name]
        else:
            stored[name] = value
    save_file(stored, path)
    return read_config(directory)


def test_single_file(tiny: Path) -> None:
    config = read_config(tiny)
    loaded, mtp = read_weights(tiny, config), read_weights(tiny, config, mtp=True)
    stored = load_file(tiny / "model.safetensors")
    # Each part skips what the other one reads.
    assert {PREFIX + name for name in mtp.weights} == set(loaded.skipped)
    assert (
        {PREFIX + name for name in loaded.weights if name != "lm_head.weight"} | {"lm_head.weight"}
        == set(mtp.skipped)
        == set(stored) - set(loaded.skipped)
    )
    assert "layers.4.eh_proj.weight" in mtp.weights
    name = "layers.3.mlp.experts.1.gate_proj.weight"
    assert torch.equal(loaded.weights[name], stored[PREFIX + name])


def test_shards_equal_single_file(tiny: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    write_tiny(sharded, layers=4, experts=2, shards=3)
    assert len(list(sharded.glob("*.safetensors"))) == 3
    whole = read_weights(tiny, read_config(tiny)).weights
    parts = read_weights(sharded, read_config(sharded)).weights
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_fused_forms_are_views_of_the_published_parts(tiny: Path) -> None:
    config = read_config(tiny)
    published = read_weights(tiny, config).weights
    stored = load_file(tiny / "model.safetensors")
    fused = {}
    for name, value in stored.items():
        if ".experts." in name or "conv1d" in name:
            continue
        name = name.replace("hc_attn_", "attn_hc.").replace("hc_ffn_", "ffn_hc.")
        for gate in ("f_a_proj.", "f_b_proj.", "dt_bias", "A_log"):
            name = name.replace(f"self_attn.{gate}", f"self_attn.forget_gate.{gate}")
        fused[name] = value
    for layer in range(3):
        block = f"{PREFIX}layers.{layer}.self_attn."
        parts = [stored[f"{block}{part}_conv1d.weight"] for part in "qkv"]
        fused[block + "conv1d.weight"] = torch.cat(parts)
    block = f"{PREFIX}layers.3.mlp.experts."
    both = [[stored[f"{block}{e}.{p}_proj.weight"] for p in ("gate", "up")] for e in range(2)]
    fused[block + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in both])
    down = [stored[f"{block}{expert}.down_proj.weight"] for expert in range(2)]
    fused[block + "down_proj"] = torch.stack(down)
    save_file(fused, tiny / "model.safetensors")

    weights = read_weights(tiny, config).weights
    assert weights.keys() == published.keys()
    assert all(torch.equal(weights[name], published[name]) for name in weights)
    # One mapping of the file holds the gate of expert 0 and the up projection of expert 1.
    first = weights["layers.3.mlp.experts.0.gate_proj.weight"]
    last = weights["layers.3.mlp.experts.1.up_proj.weight"]
    assert first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()


def test_vision_and_copies_are_skipped_by_name(tiny: Path) -> None:
    mtp = f"{PREFIX}layers.4."
    copies = {
        "model.visual.patch_embed.proj.weight": torch.zeros(2, 2),
        mtp + "embed_tokens.weight": torch.zeros(2, 2),
        mtp + "shared_head.head.weight": torch.zeros(2, 2),
    }
    config = change(tiny, **copies)
    loaded = read_weights(tiny, config)
    assert set(copies) < set(loaded.skipped)
    assert mtp + "eh_proj.weight" in loaded.skipped
    assert not any(name.startswith("layers.4.") for name in loaded.weights)
    assert not set(copies) & {
        PREFIX + name for name in read_weights(tiny, config, mtp=True).weights
    }


def test_a_decoder_layer_too_many_is_no_mtp_layer(tiny: Path) -> None:
    """A count one too small must not drop a layer in silence: an MTP layer has an eh_proj."""
    name = f"{PREFIX}layers.4.eh_proj.weight"
    config = change(tiny, **{name: None})
    loaded = read_weights(tiny, config)
    assert "layers.4.self_attn.q_a_proj.weight" in loaded.weights


def test_tied_embeddings(tiny: Path) -> None:
    for part in (False, True):
        path = tiny / "config.json"
        config = json.loads(path.read_text())
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
        path.write_text(json.dumps(config))
        if part:
            change(tiny, **{"lm_head.weight": None})
            assert "lm_head.weight" not in read_weights(tiny, read_config(tiny)).weights
        else:
            with pytest.raises(LoadError, match=r"tied embeddings, but lm_head\.weight differs"):
                read_weights(tiny, read_config(tiny))


def test_no_weights(tiny: Path) -> None:
    config = read_config(tiny)
    (tiny / "model.safetensors").unlink()
    with pytest.raises(
        LoadError, match=r"neither model\.safetensors nor model\.safetensors\.index"
    ):
        read_weights(tiny, config)


@pytest.mark.parametrize("size", [0, 7, 1000, -1])
def test_truncated(tiny: Path, size: int) -> None:
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(LoadError, match=r"model\.safetensors: damaged or cut off"):
        read_weights(tiny, read_config(tiny))


def test_two_tensors_for_one_name(tiny: Path) -> None:
    config = change(tiny, **{"model.norm.weight": torch.ones(64)})
    with pytest.raises(LoadError, match=r"a second tensor for norm\.weight"):
        read_weights(tiny, config)


def test_unusable_dtype(tiny: Path) -> None:
    name = PREFIX + "norm.weight"
    config = change(tiny, **{name: torch.ones(64, dtype=torch.int8)})
    with pytest.raises(LoadError, match=r"norm\.weight is torch\.int8, not a plain float"):
        read_weights(tiny, config)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.0.self_attn.conv1d.weight", (64, 1, 4)),
        ("layers.3.mlp.experts.gate_up_proj", (2, 63, 64)),
        ("layers.3.mlp.experts.down_proj", (64, 32)),
    ],
)
def test_misshapen_fusion(tiny: Path, name: str, shape: tuple[int, ...]) -> None:
    config = change(tiny, **{PREFIX + name: torch.zeros(shape)})
    with pytest.raises(LoadError, match=name):
        read_weights(tiny, config)


class TestIndex:
    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        write_tiny(tmp_path, layers=4, experts=2, shards=2)
        return tmp_path

    def edit(self, directory: Path, name: str, file: str | None) -> Glm5NextConfig:
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        if file is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = file
        path.write_text(json.dumps(index))
        return read_config(directory)

    def test_missing_shard(self, sharded: Path) -> None:
        (sharded / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(LoadError, match=r"model-00002-of-00002\.safetensors: no such file"):
            read_weights(sharded, read_config(sharded))

    def test_promised_but_absent(self, sharded: Path) -> None:
        config = self.edit(sharded, "ghost.weight", "model-00001-of-00002.safetensors")
        with pytest.raises(LoadError, match=r"missing ghost\.weight, which the index promises"):
            read_weights(sharded, config)

    def test_present_but_not_promised(self, sharded: Path) -> None:
        config = self.edit(sharded, "lm_head.weight", None)
        with pytest.raises(LoadError, match=r"lm_head\.weight not placed here by the index"):
            read_weights(sharded, config)

    def test_outside_the_directory(self, sharded: Path) -> None:
        config = self.edit(sharded, "lm_head.weight", "../model-00002-of-00002.safetensors")
        with pytest.raises(LoadError, match="outside the directory"):
            read_weights(sharded, config)

    def test_ambiguous(self, sharded: Path) -> None:
        save_file({"a": torch.zeros(1)}, sharded / "model.safetensors")
        with pytest.raises(LoadError, match="both"):
            read_weights(sharded, read_config(sharded))
