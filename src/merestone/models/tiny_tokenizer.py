"""The tokenizer and chat template of tiny checkpoints: bytes, and the lead model's control tokens.

Knows the GLM text format (4.5 and later). Must not know a model's shape beyond its length.
"""

from __future__ import annotations

import json
from importlib import resources

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

# A byte's id is its value; control tokens follow in this order. The first seven vanish from
# decoded text, the others are part of what a client reads.
SPECIAL = (
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|endoftext|>",
)
MARKUP = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
)
CONTROL_IDS = {token: 256 + number for number, token in enumerate(SPECIAL + MARKUP)}
END = "<|endoftext|>"
EOS_IDS = tuple(CONTROL_IDS[token] for token in (END, "<|user|>", "<|observation|>"))


def chat_template() -> str:
    """The Jinja source of the chat template."""
    source = resources.files("merestone.models").joinpath("chat_template.jinja")
    return source.read_text(encoding="utf-8")


def tokenizer_files(max_length: int) -> dict[str, str]:
    """File names and contents of the tokenizer: byte-level BPE without merges, 275 tokens.

    ``max_length``: tokens, for tokenizer_config.json.
    """
    tokenizer = Tokenizer(BPE(vocab=_byte_alphabet(), merges=[]))
    # No regular expression: nothing is merged, so there is nothing to keep apart.
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([_added(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([_added(token, special=False) for token in MARKUP])
    config = {
        "added_tokens_decoder": {
            str(number): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token in SPECIAL,
            }
            for token, number in CONTROL_IDS.items()
        },
        "chat_template": chat_template(),
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": max_length,
        "pad_token": END,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "chat_template.jinja": chat_template(),
    }


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, normalized=False, special=special)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's printable stand-in for each byte (GPT-2's table), in the order of bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    alphabet, spare = {}, 256
    for byte in range(256):
        if byte in printable:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(spare)] = byte
            spare += 1
    return alphabet
