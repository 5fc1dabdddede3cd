"""The plain loop agrees with itself, bit for bit, and tiny models write text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from merestone.models.interface import Model
from merestone.models.loader import load_model
from merestone.models.tiny import write_tiny
from merestone.models.tiny_tokenizer import EOS_IDS
from models.plain_loop import PlainLoop, Run, greedy

PROMPT = [256, 257, 258, *b"Answer with one word.", 259, *b"What stands at a boundary?", 260]
TEXT = [*range(32, 127), ord("\n")]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory, dtype=request.param, index_topk=64)
    return load_model(directory)


def test_decoding_is_prefilling(model: Model) -> None:
    """Every logit of a generation is that of a cold run of the same tokens."""
    loop = PlainLoop(model)
    ids, logits = loop.generate(PROMPT, 90)
    whole = loop.logits(PROMPT + ids[:-1])
    assert len(PROMPT) < 64 < 128 < len(PROMPT) + len(ids)
    assert torch.equal(whole[len(PROMPT) - 1 :], logits)
    assert ids == [greedy(row) for row in logits]
    assert loop.generate(PROMPT, 5)[0] == ids[:5]


@pytest.mark.parametrize("parts", [(1, 200), (63, 1, 137), (64, 64, 73), (65, 10, 126), (130, 71)])
def test_any_split_of_a_prompt(model: Model, parts: tuple[int, ...]) -> None:
    prompt = (PROMPT * 4)[:201]
    run = Run(model, len(prompt))
    pieces = []
    for part in parts:
        pieces.append(run.feed(prompt[run.length : run.length + part]))
    assert torch.equal(torch.cat(pieces), PlainLoop(model).hidden(prompt))


def test_replies_are_text(model: Model) -> None:
    """What is sampled at temperature 1 can be sent back as text, and ends now and then."""
    _, logits = PlainLoop(model).generate(PROMPT, 200)
    chances = logits.softmax(-1)
    end = chances[:, list(EOS_IDS)].sum(-1)
    assert (chances[:, TEXT].sum(-1) + end).min() > 0.999
    assert 1e-4 < end.mean() < 0.05


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert greedy(torch.tensor([0.0, 2.0, 1.0, 2.0])) == 1


def test_a_missing_row_is_noticed(tmp_path: Path) -> None:
    """Memory is poisoned: a state that lost rows gives NaN, not a plausible answer."""
    write_tiny(tmp_path)
    run = Run(load_model(tmp_path), 101)
    run.feed((PROMPT * 2)[:100])
    for rows in run.state.open_rows():
        rows[:] = torch.nan
    assert run.feed([65]).isnan().any()
