"""Tokens of a proposal: each from the candidates and the one before, with the target's noise."""

import torch

from merestone.ops.triton.draw import draw as draw_tokens
from merestone.ops.triton.draw import draws
from merestone.ops.triton.follow import Noise, Odds, add_noise, among, follow
from merestone.ops.triton.judge import best
from merestone.sched.plan import SamplingParams

VOCAB, DEPTH, CHOSEN, RANK = 50, 3, 5, 6
SEEDS, POSITIONS, CHOICES, HEATS = [3, -7, 11], [4, 90, 0], [0, 2, 1], [0.0, 0.8, 1.3]


def noise(device: str) -> Noise:
    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    heats = torch.tensor(HEATS, device=device)
    return Noise(torch.tensor(SEEDS, device=device), ints(POSITIONS), ints(CHOICES), heats)


def test_noise_is_the_targets(draw, device: str) -> None:
    """Without cuts, the best of noisy rows is what the target draws from the same ones."""
    logits = draw(3 * DEPTH, VOCAB) * 3
    wanted = []
    for row in range(DEPTH, 3 * DEPTH):
        i, place = row // DEPTH, row % DEPTH
        params = SamplingParams(temperature=HEATS[i], seed=SEEDS[i])
        wanted.append((row, params, POSITIONS[i] + 1 + place, CHOICES[i]))
    drawn = draw_tokens(logits, draws(wanted, VOCAB)).tolist()
    noisy = logits.clone()
    add_noise(noisy, noise(device), DEPTH)
    ids, bad = torch.zeros(2, 3 * DEPTH, dtype=torch.int32, device=device)
    best(noisy, ids, bad)
    assert ids[DEPTH:].tolist() == drawn
    assert torch.equal(noisy[:DEPTH], logits[:DEPTH])


def odds_of(device: str) -> Odds:
    kept = torch.zeros(3 * DEPTH, CHOSEN, device=device)
    return Odds(kept.to(torch.int32), kept)


def test_a_few_candidates_are_drawn_from(draw, device: str) -> None:
    """The best ones; each token is the target's, were there no others."""
    logits, odds = draw(3 * DEPTH, VOCAB) * 3, odds_of(device)
    out = torch.zeros(3, DEPTH, dtype=torch.int32, device=device)
    among(logits, noise(device), DEPTH, 1, out, odds)
    values, ids = logits.topk(CHOSEN)
    assert torch.equal(odds.candidates.long(), ids.sort().values)
    cut = torch.full_like(logits, float("-inf")).scatter(1, ids, values)
    assert torch.equal(odds.scores, cut.gather(1, ids.sort().values) - values[:, :1])
    assert torch.equal(out[0], ids[:DEPTH, 0].int())
    for row in range(DEPTH, 3 * DEPTH):
        i, place = row // DEPTH, row % DEPTH
        params = SamplingParams(temperature=HEATS[i], seed=SEEDS[i])
        key = (row, params, POSITIONS[i] + 1 + place, CHOICES[i])
        assert draw_tokens(cut, draws([key], VOCAB)).tolist() == [int(out[i, place])]


def test_each_token_follows_the_one_before(draw, device: str) -> None:
    logits, projected = draw(3 * DEPTH, VOCAB), draw(3 * DEPTH, RANK)
    before, after = draw(VOCAB, RANK), draw(VOCAB, RANK)
    source = torch.Generator().manual_seed(2)
    candidates = torch.stack(
        [torch.randperm(VOCAB, generator=source)[:CHOSEN].sort().values for _ in logits]
    )
    candidates = candidates.to(torch.int32).to(device)
    newest = torch.tensor([1, 2, 3], dtype=torch.int32, device=device)
    out = torch.zeros(3, DEPTH, dtype=torch.int32, device=device)
    follow(logits, candidates, projected, (before, after), newest, noise(device), out)
    weighed, odds = torch.zeros_like(out), odds_of(device)
    follow(logits, candidates, projected, (before, after), newest, noise(device), weighed, odds)
    assert torch.equal(weighed, out)
    assert torch.equal(odds.candidates, candidates)
    seen = set()
    for i in range(3):
        token = int(newest[i])
        for place in range(DEPTH):
            row = i * DEPTH + place
            own = candidates[row].long()
            scores = logits[row].clone()
            scores[own] += after[own] @ (before[token] * projected[row])
            kept = torch.full((1, VOCAB), float("-inf"), device=device)
            kept[0, own] = scores[own]
            torch.testing.assert_close(odds.scores[row], scores[own] - scores[own].max())
            token = int(kept.argmax())
            if HEATS[i]:
                params = SamplingParams(temperature=HEATS[i], seed=SEEDS[i])
                key = (0, params, POSITIONS[i] + 1 + place, CHOICES[i])
                token = int(draw_tokens(kept, draws([key], VOCAB))[0])
            assert int(out[i, place]) == token
            seen.add(token)
    assert len(seen) > 3


def test_rows_that_are_not_finite_give_ids_all_the_same(draw, device: str) -> None:
    nan = torch.full((3 * DEPTH, VOCAB), float("nan"), device=device)
    book, newest = draw(VOCAB, RANK), torch.zeros(3, dtype=torch.int32, device=device)
    candidates = torch.full((3 * DEPTH, CHOSEN), -1, dtype=torch.int32, device=device)
    out = torch.full((3, DEPTH), -9, dtype=torch.int32, device=device)
    follow(nan, candidates, draw(3 * DEPTH, RANK), (book, book), newest, noise(device), out)
    assert ((out >= 0) & (out < VOCAB)).all()
