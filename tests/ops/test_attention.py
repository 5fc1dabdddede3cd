import pytest
import torch
from torch import Tensor

from merestone.ops.attention import TILE, attend, in_order
from merestone.ops.naive import attention

pytestmark = pytest.mark.usefixtures("threads")
WIDTH, HEADS = 32, 4


def draw(rows: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(rows)
    q = torch.randn(rows, HEADS, WIDTH, generator=source) * 2
    latents = torch.randn(keys, WIDTH, generator=source)
    return q, latents, torch.randint(1, keys + 1, (rows,), generator=source)


def run(q: Tensor, latents: Tensor, seen: Tensor, tiles: int) -> Tensor:
    """Rows [R, H, L] over keys padded with zeros to ``tiles`` tiles, as one group."""
    keys = torch.zeros(1, tiles * TILE, WIDTH)
    count = min(latents.shape[0], keys.shape[1])
    keys[0, :count] = latents[:count]
    flat = q.reshape(1, -1, WIDTH)
    return attend(flat, keys, seen.repeat_interleave(HEADS)[None], 0.25).view(q.shape)


def test_near_the_definition() -> None:
    q, latents, seen = draw(40, 300)
    allowed = torch.arange(300) < seen[:, None]
    assert torch.allclose(run(q, latents, seen, 5), attention(q, latents, allowed, 0.25), atol=1e-5)


def test_neither_mates_nor_masked_tiles_matter() -> None:
    q, latents, seen = draw(70, 300)
    out = run(q, latents, seen, 5)
    for part in (slice(0, 1), slice(3, 20), slice(69, 70)):
        least = -(-int(seen[part].max()) // TILE)
        for tiles in (least, 7):
            assert torch.equal(run(q[part], latents, seen[part], tiles), out[part])


def test_own_keys_have_the_bits_of_shared_keys() -> None:
    """A row with gathered keys of its own computes as one of many rows over common keys."""
    q, latents, seen = draw(20, 128)
    out = run(q, latents, seen, 2)
    keys = latents.expand(20, 128, WIDTH).contiguous()
    keys[torch.arange(128) >= seen[:, None]] = 7.0
    alone = attend(q, keys, seen[:, None].expand(-1, HEADS), 0.25)
    assert torch.equal(alone, out)


def test_in_order() -> None:
    parts = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    total = in_order(parts)
    assert torch.equal(in_order(torch.cat([parts, torch.zeros(3, 4, 7)], 1)), total)
    assert torch.allclose(total, parts.sum(1), atol=1e-6)


def test_values_and_a_first_key() -> None:
    """Keys and values apart, each row from its own first key: the definition, alone and beside."""
    source = torch.Generator().manual_seed(1)
    q, keys, values = (torch.randn(3, n, WIDTH, generator=source) for n in (10, 192, 192))
    first = torch.randint(0, 100, (3, 10), generator=source)
    seen = first + torch.randint(1, 93, (3, 10), generator=source)
    out = attend(q, keys, seen, 0.25, values, first)
    places = torch.arange(192)
    allowed = (places >= first[..., None]) & (places < seen[..., None])
    scores = (q @ keys.transpose(1, 2) * 0.25).masked_fill(~allowed, float("-inf"))
    assert torch.allclose(out, scores.softmax(-1) @ values, atol=1e-5)
    for group in range(3):
        one = slice(group, group + 1)
        rows = slice(2, 9)
        alone = attend(
            q[one, rows], keys[one], seen[one, rows], 0.25, values[one], first[one, rows]
        )
        assert torch.equal(alone, out[one, rows])
