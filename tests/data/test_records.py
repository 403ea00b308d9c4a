"""Prompt and response records: what is learnt, in the store and in a batch."""

import numpy as np
import pytest

from hybrid_jax.data import records
from hybrid_jax.data.store import StoreReader, StoreWriter
from hybrid_jax.data.tokenizer import ByteTokenizer
from hybrid_jax.errors import UserError
from tests.data.test_store import one_line
from tests.data.test_store_source import open_store

BYTES = ByteTokenizer()
CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "!"},
    ]
}


def written(record):
    """The document with what is learnt in capitals, its ends as # (learnt) and ~."""
    ids, learn = records.encode(record, BYTES.encode, BYTES.end_of_document)
    assert ids.dtype == np.int64 and learn.dtype == bool and ids.shape == learn.shape
    text = [
        ("#" if on else "~") if i == 256 else chr(i).upper() if on else chr(i) for i, on in zip(ids, learn, strict=True)
    ]
    return "".join(text)


def test_what_is_learnt_of_a_record():
    assert written({"prompt": "ab ", "response": "cd"}) == "ab CD#"
    assert written({"prompt": "", "completion": "cd", "id": 3}) == "CD#"
    assert written(CHAT) == "<|system|>\ns\n<|user|>\nhi\n<|assistant|>\nYO#\n<|user|>\n?\n<|assistant|>\n!#"
    unanswered = {"messages": CHAT["messages"][:4]}
    assert written(unanswered) == "<|system|>\ns\n<|user|>\nhi\n<|assistant|>\nYO#\n<|user|>\n?~"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ([], "is no JSON object"),
        ({"text": "a"}, 'has no text "prompt"'),
        ({"prompt": "a"}, 'has no text "response"'),
        ({"prompt": "a", "response": None}, 'has no text "response"'),
        ({"prompt": "a", "response": ""}, "its response is empty"),
        ({"messages": "hi"}, 'its "messages" are no list'),
        ({"messages": []}, 'its "messages" are no list'),
        ({"messages": ["hi"]}, "its message 1 is no object"),
        ({"messages": [{"role": "user", "content": [1]}]}, "its message 1 is no object"),
        ({"messages": [{"role": "user", "content": "a"}]}, 'none of its messages has the role "assistant"'),
    ],
)
def test_what_is_no_record(record, words):
    with pytest.raises(UserError, match=words) as caught:
        records.encode(record, BYTES.encode, 256)
    assert "\n" not in str(caught.value)


def masked_store(prefix, count=40, seed=0):
    """Documents of tokens that count up from 1000: a token tells where it came from. Returns what is learnt of each."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 25, count)
    learn = rng.random(lengths.sum()) < 0.4
    learn[0] = True
    with StoreWriter(prefix, vocab_size=70_000, masked=True) as writer:
        writer.extend(np.arange(1000, 1000 + lengths.sum()), lengths, learn)
    return learn


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_only_what_is_learnt_is_a_target(tmp_path, isolate, split):
    learn = masked_store(tmp_path / "s")
    settings = dict(split=split, validation_fraction=0.3, isolate_documents=isolate)
    masked = open_store(tmp_path / "s", **settings)
    assert ", loss mask" in masked.description
    (tmp_path / "s.mask.bin").rename(tmp_path / "aside")
    plain = open_store(tmp_path / "s", **settings)
    count = 3 * plain.num_windows  # epochs
    got, all_targets = (dataset.batch(0, range(count), count) for dataset in (masked, plain))
    for name in ("tokens", "segment_ids", "positions"):
        np.testing.assert_array_equal(got[name], all_targets[name])
    targets = all_targets["targets"]
    expected = np.where((targets >= 0) & learn[np.maximum(targets - 1000, 0)], targets, -1)
    np.testing.assert_array_equal(got["targets"], expected)
    assert 0 < (expected >= 0).sum() < (targets >= 0).sum()
    changed = {name for name, value in masked.identity.items() if plain.identity[name] != value}
    assert changed == {"the loss mask of data.path"}


def test_a_masked_store_is_written_whole_or_not_at_all(tmp_path):
    documents = [records.encode(r, BYTES.encode, 256) for r in ({"prompt": "ab", "response": "c"}, CHAT)]
    with StoreWriter(tmp_path / "s", vocab_size=257, masked=True) as writer:
        for ids, learn in documents:
            writer.append(ids, learn)
        with pytest.raises(ValueError, match="learn: is given for every document"):
            writer.append([1, 2])
        with pytest.raises(ValueError, match="no array of 2 bools"):
            writer.append([1, 2], [1, 0])
    reader = StoreReader(tmp_path / "s")
    assert reader.learn.tolist() == [int(on) for _, learn in documents for on in learn]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.bin", "s.idx", "s.mask.bin"]
    with pytest.raises(ValueError, match="and for no other"), StoreWriter(tmp_path / "t", vocab_size=257) as writer:
        writer.append([1], [True])
    with pytest.raises(ZeroDivisionError), StoreWriter(tmp_path / "t", vocab_size=257, masked=True) as writer:
        writer.append([1], [True])
        raise ZeroDivisionError

    def unlearnt():
        with StoreWriter(tmp_path / "t", vocab_size=257, masked=True) as writer:
            writer.append([1, 2], [False, False])

    assert "its loss mask leaves no token to learn" in one_line(unlearnt)
    assert len(list(tmp_path.iterdir())) == 3
    (tmp_path / "t.mask.bin").write_bytes(b"")
    assert "t.mask.bin: is there already" in one_line(StoreWriter, tmp_path / "t", vocab_size=257)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\1\0", "s.mask.bin: is cut short: it has 2 bytes, s.idx makes it 3"),
        (b"\1\0\1\0", "s.mask.bin: goes on after its end"),
        (b"\1\0\7", "s.mask.bin: byte 2 is 7, neither 0 nor 1"),
        (b"\0\0\0", "s.mask.bin: holds no 1, so there is no token to learn"),
        (None, "s.mask.bin: is a folder, not the loss mask of s.bin"),
    ],
)
def test_a_damaged_mask_is_one_line(tmp_path, content, words):
    with StoreWriter(tmp_path / "s", vocab_size=257) as writer:
        writer.append([1, 2, 3])
    if content is None:
        (tmp_path / "s.mask.bin").mkdir()
    else:
        (tmp_path / "s.mask.bin").write_bytes(content)
    assert one_line(open_store, tmp_path / "s").startswith(f"config.data.path: {tmp_path}/{words}")
