"""What a directory says about text and sampling, and what it may not say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from merestone.models.tiny_tokenizer import tokenizer_files
from merestone.serve.template import load_text
from merestone.serve.text import TextError


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("temperature", "hot", "is not a number"),
        ("temperature", True, "is not a number"),
        ("temperature", -1, "outside 0 to 2"),
        ("top_p", 1.5, "outside 0 to 1"),
        ("min_p", -0.1, "outside 0 to 1"),
        ("repetition_penalty", 0, "outside 0.01 to 100"),
        ("top_k", -2, "outside -1 to"),
    ],
)
def test_defaults_that_no_request_may_ask_for(
    tmp_path: Path, key: str, value: object, says: str
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(TextError, match=rf"generation_config\.json: {key} .*{says}"):
        load_text(tmp_path)


def test_a_list_of_templates_may_hold_anything_beside_the_default(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_files(64)["tokenizer.json"])
    for named in ([], ["x", None], [{"name": "rag", "template": "r"}]):
        config = {"chat_template": named}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert load_text(tmp_path).template is None
    config = {"chat_template": ["x", {"name": "default", "template": "hello"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_text(tmp_path).template
    assert template is not None
    assert template.render([], [], True, {}) == "hello"
