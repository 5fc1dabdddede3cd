"""What ``--speculate`` and ``--draft`` may say, and what a draft directory must."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from merestone.engine.build import EngineOptions, gate_setup
from merestone.models.dflash_config import read_dflash_config
from merestone.models.loader import LoadError, load_dflash, load_model, load_mtp
from merestone.models.strict_json import ConfigError
from merestone.models.tiny import write_tiny, write_tiny_kimi
from merestone.spec.build import Speculation, load_drafter, parse_speculation
from spec_models.targets import BUNDLED, target


def test_words() -> None:
    assert parse_speculation("none") == Speculation()
    assert parse_speculation("mtp:1") == Speculation("mtp", 1)
    assert parse_speculation("mtp:auto") == Speculation("mtp", 7, adaptive=True)
    assert parse_speculation("dflash") == Speculation("dflash")
    assert gate_setup(EngineOptions(speculate="mtp:3")).speculation == "mtp"
    assert gate_setup(EngineOptions(speculate="mtp:auto")).speculation == "dynamic"


@pytest.mark.parametrize("text", ["", "mtp", "mtp:0", "mtp:8", "mtp:x", "mtp:-1", "dflash:3", "no"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--speculate"):
        parse_speculation(text)


def test_drafters_have_the_asked_depth() -> None:
    _, model = target("bundled")
    mtp = load_drafter(Speculation("mtp", 5), None, BUNDLED, model)
    assert mtp is not None
    assert (mtp.depth, mtp.lag, [group.name for group in mtp.groups]) == (5, 1, ["mtp"])
    for draft in (None, "bundled", str(BUNDLED / "draft")):
        dflash = load_drafter(Speculation("dflash"), draft, BUNDLED, model)
        assert dflash is not None
        assert (dflash.depth, dflash.lag, dflash.groups[0].window) == (7, 0, 511)
    assert load_drafter(Speculation(), None, BUNDLED, model) is None


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    _, bundled = target("bundled")
    directory, tiny = target("dense")
    with pytest.raises(ValueError, match="--draft is for"):
        load_drafter(Speculation("mtp", 1), "somewhere", BUNDLED, bundled)
    with pytest.raises(ValueError, match=r"--draft: .* is no directory"):
        load_drafter(Speculation("dflash"), None, directory, tiny)
    with pytest.raises(ValueError, match=r"--draft: .* has vocab_size 3072, the model 320"):
        load_drafter(Speculation("dflash"), str(BUNDLED / "draft"), directory, tiny)
    write_tiny(tmp_path / "plain", layers=4, mtp=False)
    with pytest.raises(ConfigError, match="needs one MTP layer, the model has 0"):
        load_drafter(
            Speculation("mtp", 1), None, tmp_path / "plain", load_model(tmp_path / "plain")
        )
    write_tiny_kimi(tmp_path / "kimi", layers=4)
    with pytest.raises(ConfigError, match="needs one MTP layer, the model has 0"):
        load_drafter(Speculation("mtp", 1), None, tmp_path / "kimi", load_model(tmp_path / "kimi"))


def test_a_layer_that_selects_in_every_pass_is_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path, layers=4)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["index_share_for_mtp_iteration"] = False
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="index_share_for_mtp_iteration"):
        load_mtp(tmp_path, load_model(tmp_path).info.dtype)


def test_random_weights_have_an_mtp_layer() -> None:
    directory, model = target("dense")
    assert load_drafter(Speculation("mtp", 2), None, directory, model, "random") is not None


@pytest.mark.parametrize(
    ("where", "key", "value", "message"),
    [
        ("", "architectures", ["LlamaForCausalLM"], "no DFlash draft"),
        ("", "is_causal", True, "is_causal"),
        ("", "is_causal", None, "is_causal"),
        ("", "attention_bias", True, "attention_bias"),
        ("", "layer_types", ["sliding_attention", "chunked"], "chunked"),
        ("", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1.0}, "rope_type"),
        ("", "sliding_window", 4, "smaller than a block"),
        ("", "head_dim", 63, "halves"),
        ("dflash_config", "causal", True, "causal"),
        ("dflash_config", "final_logit_softcapping", 30.0, "final_logit_softcapping"),
        ("dflash_config", "target_layer_ids", [1, 8], "below 8"),
        ("dflash_config", "mask_token_id", 5000, "outside"),
        ("dflash_config", "conv_group_size", 24, "does not divide"),
        ("dflash_config", "block_size", 1, "at least 2"),
    ],
)
def test_variants_of_drafts_are_refused_by_name(
    where: str, key: str, value: object, message: str, tmp_path: Path
) -> None:
    config = json.loads((BUNDLED / "draft" / "config.json").read_text())
    (config[where] if where else config)[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        read_dflash_config(tmp_path)


def test_a_draft_without_convolutions_leaves_weights_over(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED / "draft", tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = ["DFlashDraftModel"]
    path.write_text(json.dumps(config))
    with pytest.raises(LoadError, match="unknown to the model"):
        load_dflash(tmp_path / "draft", target("bundled")[1].info.dtype)
