"""A tokenizer of ours as the files that transformers' AutoTokenizer reads: same ids, same text.

As in training, encoding adds no token to a text, and no text makes the end-of-document token, not even one that spells
it (split_special_tokens). No padding token is named: one that ends documents too would be masked out of the loss in
fine-tuning.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from hybrid_jax.data.interface import Tokenizer
from hybrid_jax.data.tokenizer import BpeTokenizer, ByteTokenizer, from_definition
from hybrid_jax.errors import UserError

END = "<|endoftext|>"  # what ends a document where the tokenizer has no name for it


def files(tokenizer: Tokenizer) -> dict[str, str]:
    """{name: content} of tokenizer.json and tokenizer_config.json; none for ids without text.

    Raises UserError for a BPE whose end-of-document id can be no token of it.
    """
    if isinstance(tokenizer, ByteTokenizer):
        definition, end = _with_end(_bytes(), tokenizer.end_of_document)
    elif isinstance(tokenizer, BpeTokenizer):
        definition, end = _with_end(json.loads(tokenizer.bpe.to_str()), tokenizer.end_of_document)
        # Ours never runs it; all it may do besides is to set offsets.
        definition["post_processor"] = _offsets_only(definition.get("post_processor"))
    else:
        return {}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return {
        "tokenizer.json": json.dumps(definition, ensure_ascii=False) + "\n",
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }


def _bytes() -> dict[str, Any]:
    """A byte-level BPE without merges, whose ids are the bytes."""
    letters = {byte: letter for letter, byte in _byte_of_letter().items()}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letters[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }


def _byte_of_letter() -> dict[str, int]:
    """The 256 letters that stand for bytes in byte-level BPE: printable Latin-1 for itself, the rest from U+0100 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def _with_end(definition: dict[str, Any], end: int) -> tuple[dict[str, Any], str]:
    """The definition with the id `end` as a special token, and that token's text. Raises UserError."""
    bpe = from_definition(json.dumps(definition), "tokenizer")
    token = bpe.id_to_token(end)
    if token is None:
        taken = bpe.get_vocab(with_added_tokens=True)
        names = itertools.chain([END], (f"<|endoftext_{number}|>" for number in itertools.count(1)))
        token = next(name for name in names if name not in taken)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = {one["id"]: one for one in definition["added_tokens"]}
    added[end] = {"id": end, "content": token, **flags, **added.get(end, {}), "special": True}
    definition = {**definition, "added_tokens": [added[id] for id in sorted(added)]}
    # A reader gives a token that is not in the vocabulary the next free id, whatever stands there.
    if from_definition(json.dumps(definition), "tokenizer").token_to_id(token) != end:
        raise UserError(
            f"tokenizer: its end-of-document id {end} is none of its {bpe.get_vocab_size()} tokens or the next"
        )
    return definition, token


def _offsets_only(processor: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a post-processor does without adding tokens."""
    parts = (processor or {}).get("processors", [processor])
    return next((one for one in parts if one and one["type"] == "ByteLevel"), None)
