"""The training code on a CPU: its text is the template's, its model is transformers', and the
shipped weights do what the model card says, on a small sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from training.acceptance import Acceptance
from training.dialogue import Dialogue, Weights, call_text, load_tokenizer
from training.evaluate import PARIS, RECORDS, TOOLS, Shipped, acceptance, ask
from training.export import published, read_shards, restored, write_shards
from training.kernels import kda_torch, sinkhorn_torch
from training.layers import Rows
from training.model import Target
from training.rows import make
from training.scenes import Mix, converse
from training.shape import SMOKE, TINY

import merestone
from merestone.models.loader import load_model
from merestone.serve.template import ChatTemplate
from merestone.serve.text import Vocabulary
from models.plain_loop import PlainLoop

MODEL = Path(merestone.__file__).parent / "assets" / "merestone-tiny"
TOKENIZER = MODEL / "tokenizer.json"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def shipped() -> Shipped:
    return Shipped.load(MODEL, torch.device("cpu"))


def test_dialogue_is_what_the_template_writes() -> None:
    talk = Dialogue(load_tokenizer(TOKENIZER), limit=1000, thinking="kept")
    talk.tools([WEATHER])
    talk.system("Be brief. Record K7 holds 48213.")
    talk.user("What is the weather in Paris?")
    talk.reply(call_text("get_weather", {"city": "Paris"}), "call", thought="I call it.")
    talk.result("21 degrees")
    talk.reply("It is 21 degrees.", "answer", thought="I have it.")
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [
        {"role": "system", "content": "Be brief. Record K7 holds 48213."},
        {"role": "user", "content": "What is the weather in Paris?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I call it.",
            "tool_calls": [call],
        },
        {"role": "tool", "content": "21 degrees"},
        {"role": "assistant", "content": "It is 21 degrees.", "reasoning_content": "I have it."},
    ]
    template = ChatTemplate((MODEL / "chat_template.jinja").read_text(encoding="utf-8"), {})
    text = template.render(messages, [WEATHER], False, {"clear_thinking": False})
    assert tuple(talk.ids) == Vocabulary.load(MODEL).encode(text)


def test_conversations_repeat_and_fill_their_row() -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    one, two = (converse(("seed", 3), tokenizer, 700) for _ in range(2))
    assert one.ids == two.ids
    assert len(one.ids) == 700
    assert converse(("seed", 4), tokenizer, 700).ids != one.ids


def test_weights_count_replies_and_their_end() -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    talk = Dialogue(tokenizer, limit=100, thinking="none")
    talk.user("Hello")
    talk.reply("Hello! How can I help you?", "small_talk")
    talk.close()
    span = talk.spans[0]
    weights = Weights.of(tokenizer)(np.array([talk.ids], dtype=np.uint16))[0]
    assert (weights[span.start - 1 : span.end] == 1.0).all()
    assert (weights[span.start - 3 : span.start - 1] == 0.0).all()  # the empty block
    assert (weights[: span.start - 3] < 0.1).all()


def test_chunked_kda_is_the_recurrence() -> None:
    torch.manual_seed(0)
    q, k, v, f = (torch.randn(1, 128, 2, 8) for _ in range(4))
    b, a_log, bias = torch.randn(1, 128, 2), torch.randn(2) * 0.3, torch.randn(16) - 2
    got = kda_torch(q, k, v, f, b, a_log, bias, -5.0)
    g = -5.0 * torch.sigmoid(a_log.exp()[:, None] * (f + bias.view(2, 8)))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state = torch.zeros(1, 2, 8, 8)
    for t in range(128):
        state = state * g[:, t].exp()[..., None]
        seen = (state * k[:, t][..., None]).sum(-2)
        fresh = torch.sigmoid(b[:, t])[..., None] * (v[:, t] - seen)
        state = state + k[:, t][..., None] * fresh[..., None, :]
        out = (state * q[:, t][..., None]).sum(-2) * 8**-0.5
        torch.testing.assert_close(got[:, t], out, atol=2e-6, rtol=1e-4)


def test_sinkhorn_columns_sum_to_one() -> None:
    matrix = sinkhorn_torch(torch.randn(50, 4, 4), 20, 1e-6)
    torch.testing.assert_close(matrix.sum(-2), torch.ones(50, 4), atol=1e-5, rtol=0)


def test_export_loses_nothing(tmp_path: Path) -> None:
    state = Target(SMOKE).state_dict()
    write_shards(dict(published(state, SMOKE)), tmp_path)
    back = restored(read_shards(tmp_path), state, SMOKE)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_shipped_model_equals_transformers(shipped: Shipped) -> None:
    """In fp32, past the length at which attention becomes sparse."""
    transformers = pytest.importorskip("transformers")
    ids = torch.from_numpy(make(-5, 0, 1, 512, TOKENIZER).ids[0, :512].astype(np.int64))
    reference = transformers.Glm5NextForConditionalGeneration.from_pretrained(
        MODEL, dtype=torch.float32
    ).eval()
    assert len(ids) > TINY.index_topk + TINY.pool
    with torch.no_grad():
        hidden, _, _ = shipped.model(ids, shipped.rows(1, len(ids)), torch.float32)
        ours = shipped.model.logits(hidden)
        theirs = reference(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_shipped_model_equals_the_served_one(shipped: Shipped) -> None:
    """The package's own arithmetic, in fp32, past the length at which attention becomes sparse."""
    length = 320
    ids = make(-6, 0, 1, length, TOKENIZER).ids[0, :length].astype(np.int64)
    served = PlainLoop(load_model(MODEL, torch.float32)).logits(ids.tolist())
    with torch.no_grad():
        rows = shipped.rows(1, length)
        hidden, _, _ = shipped.model(torch.from_numpy(ids), rows, torch.float32)
        ours = shipped.model.logits(hidden)
    torch.testing.assert_close(ours, served, atol=1e-3, rtol=0)


def test_training_lowers_the_loss() -> None:
    torch.manual_seed(0)
    model = Target(SMOKE)
    examples = make(1, 0, 2, 128, TOKENIZER, Mix(tools=0.0))
    ids = torch.from_numpy(examples.ids.astype(np.int64))
    probes = torch.from_numpy(examples.probes)
    rows = Rows(2, 128, torch.arange(128).repeat(2), probes, sparse=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(5):
        hidden, lessons, _ = model(ids[:, :-1].flatten(), rows, torch.float32)
        logits = model.logits(hidden)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()) + lessons
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.balance(1e-3)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_acceptance_walk() -> None:
    good = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1], [1, 0, 1], [1, 1, 1]]).bool()
    found = Acceptance()
    found.walk(good, 0, 4)  # two drafts and a token, then one draft up to the end
    assert (found.accepted, found.steps) == (3, 2)


def test_sample_of_the_model_card(shipped: Shipped) -> None:
    assert shipped.reply(PARIS) == "Paris"
    records = ask(shipped, RECORDS, 2, 1024)
    assert records.asked["retrieval"] >= 20
    assert records.share("retrieval") >= 0.99
    tools = ask(shipped, TOOLS, 3, 512)
    assert tools.asked["call"] >= 5
    assert tools.share("call") >= 0.95
    assert tools.share("answer") >= 0.95
    mtp, draft = acceptance(shipped, [(4, 256)])
    assert mtp.mean >= 1.5
    assert draft.mean >= 2.0
