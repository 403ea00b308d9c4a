"""Text as it comes: nothing that later ids change, stop strings wherever tokens end."""

import random

import pytest

from hybrid_jax.data.tokenizer import BpeTokenizer, ByteTokenizer
from hybrid_jax.decoding.text import TextStream

WORDS = "déjà vu 😀 naïve 日本語 — 👩‍👩‍👧 family, ünïcödé\ttab\nline 🇨🇭 a b  c"


def byte_level() -> BpeTokenizer:
    """A BPE of bytes that cuts most of these characters between tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=275, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator([WORDS], trainer)
    return BpeTokenizer.from_bpe(bpe)


def with_byte_fallback() -> BpeTokenizer:
    """As Llama's: words begin with a mark for their space, the first loses it, and bytes stand for rare characters."""
    tokenizers = pytest.importorskip("tokenizers")
    pieces = [f"<0x{i:02X}>" for i in range(256)] + sorted(set(WORDS.replace(" ", "▁")) & set("abcdefghilmnotuvy▁,"))
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    bpe.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return BpeTokenizer.from_bpe(bpe)


TOKENIZERS = {"bytes": ByteTokenizer, "byte_level": byte_level, "byte_fallback": with_byte_fallback}


def stream(text: TextStream, ids, sizes) -> list[str]:
    """What is given out for ids in parts of these sizes, and at the end."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text.push(ids[at : at + size]))
        at += size
        if at >= len(ids):
            break
    return [*pieces, text.end()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_join_to_the_text(name):
    """Whatever the parts in which ids come, the pieces are the text of all of them, and none holds part of a
    character; the text that they follow is not in them, but decides whether the first begins with a space."""
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(WORDS)
    assert tokenizer.decode(ids) == WORDS and len(ids) > 60
    draw = random.Random(0)
    borders = [n for n in range(len(ids)) if "\ufffd" not in tokenizer.decode(ids[:n])]
    for before in (0, *draw.sample(borders, 6)):
        whole = WORDS[len(tokenizer.decode(ids[:before])) :]
        for most in (1, 3, 40):
            sizes = [draw.randint(1, most) for _ in ids]
            pieces = stream(TextStream(tokenizer, ids[:before]), ids[before:], sizes)
            assert "".join(pieces) == whole, (before, most)
            assert "\ufffd" not in "".join(pieces)


def test_an_emoji_over_four_tokens():
    text = TextStream(ByteTokenizer())
    assert [text.push([byte]) for byte in "a😀b".encode()] == ["a", "", "", "", "😀", "b"] and text.end() == ""
    cut = TextStream(ByteTokenizer())
    assert cut.push(list("a😀".encode())[:4]) == "a"
    assert cut.end() == "\ufffd" and cut.text == "a\ufffd"  # no more is to come


def test_bytes_that_are_no_text_do_not_hold_the_rest_up():
    """A model of bytes writes anything: pieces join to what Python makes of all of them, and lag by three at most."""
    draw = random.Random(1)
    for _ in range(40):
        ids = [draw.choice((draw.randrange(256), 0xE2, 0xF0, 0x80, 97)) for _ in range(60)]
        text = TextStream(ByteTokenizer())
        for i, byte in enumerate(ids):
            text.push([byte])
            whole = bytes(ids[: i + 1]).decode(errors="replace")
            assert whole.startswith(text.text) and len(whole) - len(text.text) <= 3
        text.end()
        assert text.text == bytes(ids).decode(errors="replace")


def test_ids_without_text_do_not_part_a_character():
    """A vocabulary may be larger than the tokenizer's; ids of no text in the middle of a character change nothing."""
    text = TextStream(ByteTokenizer())
    first, second = list("😀".encode())[:2], list("😀".encode())[2:]
    assert text.push([*first, *[300] * 30]) == "" and text.push([*second, 256]) == "😀"


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("stop", "want"),
    [
        (["END"], "one two EN three "),
        (["three"], "one two EN "),
        (["zzz", "two EN", "wo"], "one t"),  # the one that ends first, though another began before
        (["one two EN three EN", "D"], ""),
        (["o"], ""),
        (["D and"], "one two EN three EN"),
    ],
)
def test_stop_strings_over_borders(size, stop, want):
    """Wherever tokens end, the text is the same, never holds a part of the stop string, and nothing follows."""
    ids = list(b"one two EN three END and more")
    text = TextStream(ByteTokenizer(), stop=stop)
    pieces = stream(text, ids, [size] * 50)
    assert "".join(pieces) == text.text == want and text.stopped
    assert text.push([65]) == text.end() == "" and text.text == want
    # The ids end with the one that completed the stop string.
    whole = bytes(text.ids).decode()
    assert any(whole.endswith(s) for s in stop) and not any(s in whole[:-1] for s in stop)


def test_what_may_begin_a_stop_string_is_held_back():
    text = TextStream(ByteTokenizer(), stop=["abc"])
    assert [text.push([ord(c)]) for c in "xabab"] == ["x", "", "", "ab", ""]
    assert text.push([ord("d")]) == "abd" and not text.stopped
    assert text.push(list(b"yab")) == "y" and text.end() == "ab"


def test_a_stop_string_that_only_the_end_completes():
    text = TextStream(ByteTokenizer(), stop=["a\ufffd"])
    assert text.push(list("xa😀".encode())[:3]) == "x"
    assert text.end() == "" and text.stopped and text.text == "x"
