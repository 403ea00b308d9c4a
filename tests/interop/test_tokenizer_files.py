"""What AutoTokenizer makes of a tokenizer's files is what the tokenizer makes: ids, text, and no tokens added."""

import json
import random
import subprocess
import sys

import pytest
import tokenizers

from hybrid_jax.data.tokenizer import BpeTokenizer, ByteTokenizer, IdTokenizer, from_definition
from hybrid_jax.errors import UserError
from hybrid_jax.interop import tokenizer as files_of

SOURCE = "def f(x):\n    return x + 1\n\nclass A:\n    '''It's 1e-5 of naïve café ☃ 北京'''\n" * 20
ODD = [
    "", " ", "\n", "\r\n", "a\r\nb\r\n", "\x00", "a\x00b\x00", "\t\t x", "  a  b ", "it's we'll", "1234567 3.14 1e-5",
    "é e\u0301 \u0301", "👩‍👩‍👧‍👦🇩🇪 🙂", "<|endoftext|>", "a<|endoftext|>b", "<|begin|> x </s>[INST]",
    "\u200b\ufeff x", "ÿ¡¬®\xad",
    "\ue000\U0010ffff\ufffd", "x " * 2000, "a" * 4000, "\n" * 500, " " * 500, "ab\n" * 3000,
]  # fmt: skip


def texts():
    draw = random.Random(0)
    letters = [chr(c) for c in (*range(0x250), *range(0x1F600, 0x1F650), 0x4E00, 0x3042, 0xFFFD)]
    yield from ODD
    for _ in range(300):
        yield "".join(draw.choices(letters, k=draw.randrange(1, 60)))
    for _ in range(100):
        start = draw.randrange(len(SOURCE))
        yield SOURCE[start : start + draw.randrange(200)]


def trained(source=SOURCE):
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator([source], trainer)
    return bpe


def own():
    return BpeTokenizer.from_bpe(from_definition(trained().to_str(), "own"))


def given():
    """As other people's are: it would begin texts with a token, and has added tokens, special and not."""
    bpe = trained()
    bpe.add_special_tokens(["<|begin|>", "<|end_of_text|>"])
    bpe.add_tokens(["    ", "return"])
    begin = ("<|begin|>", bpe.token_to_id("<|begin|>"))
    template = tokenizers.processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    keep = tokenizers.processors.ByteLevel(trim_offsets=False)
    bpe.post_processor = tokenizers.processors.Sequence([keep, template])
    bpe = from_definition(bpe.to_str(), "given")
    return BpeTokenizer(bpe, bpe.get_vocab_size(), bpe.token_to_id("<|end_of_text|>"))


def written(tokenizer, folder):
    for name, content in files_of.files(tokenizer).items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "make, end", [(ByteTokenizer, "<|endoftext|>"), (own, "<|endoftext|>"), (given, "<|end_of_text|>")]
)
def test_auto_tokenizer_gives_our_ids(make, end, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = make()
    theirs = transformers.AutoTokenizer.from_pretrained(written(ours, tmp_path))
    every = list(texts())
    assert theirs(every).input_ids == [ours.encode(text) for text in every]
    for text in every:
        ids = ours.encode(text)
        assert ours.decode(ids) == text == theirs.decode(ids)
        assert ours.end_of_document not in ids
    assert set(theirs("a")) == {"input_ids", "attention_mask"}
    assert (theirs.eos_token, theirs.eos_token_id) == (end, ours.end_of_document)
    assert theirs.bos_token is None and theirs.pad_token is None and theirs.padding_side == "left"
    assert theirs.decode([ours.end_of_document, *ours.encode("x")], skip_special_tokens=True) == "x"
    assert len(theirs) == ours.vocab_size
    draw = random.Random(1)
    for _ in range(200):  # mostly no UTF-8
        ids = draw.choices(range(256), k=draw.randrange(9))
        assert theirs.decode(ids) == ours.decode(ids)
    theirs.save_pretrained(tmp_path / "saved")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again(ODD).input_ids == theirs(ODD).input_ids


def test_the_end_of_a_document_has_a_name_of_its_own(tmp_path):
    """A BPE may have learnt the usual one as a piece of text."""
    bpe = trained("<|endoftext|> " * 300)
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    bpe.train_from_iterator(["<|endoftext|>"] * 300, tokenizers.trainers.BpeTrainer(show_progress=False))
    bpe.add_tokens(["<|endoftext|>"])
    ours = BpeTokenizer.from_bpe(from_definition(bpe.to_str(), "x"))
    written(ours, tmp_path)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext_1|>"
    assert made.token_to_id("<|endoftext_1|>") == ours.end_of_document
    assert made.token_to_id("<|endoftext|>") == bpe.token_to_id("<|endoftext|>") != ours.end_of_document


def test_an_end_that_can_be_no_token_is_refused():
    bpe = from_definition(trained().to_str(), "x")
    size = bpe.get_vocab_size()
    with pytest.raises(UserError, match=f"end-of-document id {size + 1} is none of its {size} tokens or the next"):
        files_of.files(BpeTokenizer(bpe, size + 2, size + 1))


def test_ids_without_text_have_no_files():
    assert files_of.files(IdTokenizer(9, 8)) == {}


def test_only_the_post_processor_that_adds_nothing_is_kept():
    assert json.loads(files_of.files(own())["tokenizer.json"])["post_processor"] is None
    kept = json.loads(files_of.files(given())["tokenizer.json"])["post_processor"]
    assert kept["type"] == "ByteLevel"


def test_the_files_are_the_same_in_any_process():
    """Bytes: no order of a set or dict in them."""
    code = "from hybrid_jax.interop.tokenizer import files; from hybrid_jax.data.tokenizer import ByteTokenizer as B;"
    code += "print(files(B()))"
    made = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": s}, capture_output=True).stdout
        for s in "12"
    }
    assert len(made) == 1 and made.pop()
