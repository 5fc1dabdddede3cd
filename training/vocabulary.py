"""The tokenizer: byte-level BPE of 3,072 entries over generated conversations.

    python -m training.vocabulary --out DIR

Numbers are cut into groups of up to two digits from the left (the GLM tokenizer takes three), and
every group is one token: a hundred are learned from far fewer examples than a thousand. The control
tokens are those of the lead model, and a mask token for drafts. Ids: bytes, groups of digits,
learned merges, control tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from merestone.models.tiny_tokenizer import END, MARKUP, SPECIAL, chat_template
from training import prose, records, tools, words
from training.dialogue import tool_listing

SIZE = 3072
MASK = "<|mask|>"
CONTROL = (*SPECIAL, MASK, *MARKUP)
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MAX_LENGTH = 32768


def _splitter() -> Sequence:
    return Sequence(
        [Split(Regex(PATTERN), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _corpus(seed: int) -> Iterator[str]:
    rng = Random(seed)
    yield from prose.documentation()
    for asked, answer in (*words.SMALL_TALK, *words.FACTS):
        yield from [f"{asked}\n{answer}"] * 40
    for country, city in words.CAPITALS:
        text = f"What is the capital of {country}? Please reply with one word only. The {city} is"
        yield from [text] * 60
    for _ in range(1500):
        yield "\n".join(prose.sentence(rng) for _ in range(8))
        table = records.Table(rng)
        yield records.document(rng, table, 200)
        yield "\n".join("\n".join(records.question(rng, record)[:2]) for record in table.records)
        functions = tools.choose(rng)
        yield tool_listing([function.definition for function in functions])
        for function in functions:
            if function.draw is not None:
                request = function.draw(rng)
                yield f"{request.text}\n{request.name}\n{request.result}\n{request.answer}"
    for word in (*words.NAMES, *words.NOUNS, *words.ADJECTIVES, *words.PLACES, *words.VERBS):
        yield from [f" {word}"] * 60
    for word in (*words.SYMBOLS, *words.WEEKDAYS):
        yield from [f" {word} {word}-"] * 40


def train(seed: int = 0) -> Tokenizer:
    """Learn the merges and put the vocabulary together."""
    digits = [f"{number:02}" for number in range(100)]
    alphabet = sorted(ByteLevel.alphabet())
    learned = SIZE - len(CONTROL) - len(digits)
    apprentice = Tokenizer(BPE())
    apprentice.pre_tokenizer = _splitter()
    trainer = BpeTrainer(
        vocab_size=learned, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    # Digits are merged by hand below.
    texts = ("".join(c for c in text if not c.isdigit()) for text in _corpus(seed))
    apprentice.train_from_iterator(texts, trainer)
    state = json.loads(apprentice.to_str())["model"]
    assert len(state["vocab"]) == learned, len(state["vocab"])
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    for group in digits:
        vocabulary[group] = len(vocabulary)
    for entry in sorted(state["vocab"], key=state["vocab"].get):
        vocabulary.setdefault(entry, len(vocabulary))
    merges = [(group[:-1], group[-1]) for group in digits]
    merges += [tuple(pair) for pair in state["merges"]]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = ByteLevelDecoder()
    for names, special in (((*SPECIAL, MASK), True), (MARKUP, False)):
        added = [AddedToken(name, normalized=False, special=special) for name in names]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)
    assert tokenizer.get_vocab_size() == SIZE, tokenizer.get_vocab_size()
    return tokenizer


def write(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    special = {*SPECIAL, MASK}
    config = {
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(name)): {
                "content": name,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": name in special,
            }
            for name in CONTROL
        },
        "chat_template": chat_template(),
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": MAX_LENGTH,
        "pad_token": END,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(chat_template())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(train(arguments.seed), arguments.out)


if __name__ == "__main__":
    main()
