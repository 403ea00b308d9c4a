import math
import subprocess
import sys

import numpy as np
import pytest
import tokenizers

from hybrid_jax import data
from hybrid_jax.config import DataConfig
from hybrid_jax.data import manifest, prepare
from hybrid_jax.data import tokenizer as tokenizer_module
from hybrid_jax.data.sources import Document
from hybrid_jax.data.store import StoreReader
from hybrid_jax.data.tokenizer import ByteTokenizer, cache_folder, from_manifest, load, pieces
from hybrid_jax.errors import UserError

TEXTS = [
    "def f(x):\n    return x + 1\n" * 40,
    "class A:\n    pass\n" * 30,
    "naïve café ☃ 北京\n" * 20,
    "x = 1\n" * 9,
]


@pytest.fixture
def folder(tmp_path):
    for i, text in enumerate(TEXTS * 3):
        (tmp_path / f"{i:02d}.txt").write_text(f"{i}\n{text}", encoding="utf-8")
    return tmp_path


def open_bpe(folder, *, split="train", vocab_size=400, **settings):
    settings = {"cache_dir": str(folder / "cache"), "bpe_vocab_size": 320, **settings}
    config = DataConfig(source="files", path=str(folder), tokenizer="bpe", validation_fraction=0.3, **settings)
    return data.open(config, sequence_length=16, vocab_size=vocab_size, seed=1, split=split)


def documents_of(dataset):
    store = dataset.store
    return [store.tokens[a:b].tolist() for a, b in zip(store.starts, store.starts[1:], strict=False)]


def test_bytes_round_trip_and_foreign_ids():
    t = ByteTokenizer()
    for text in TEXTS:
        assert t.decode(t.encode(text)) == text
    assert max(t.encode("\x00ÿ☃")) < 256
    assert t.decode([72, 256, 105, 300, -1]) == "Hi"
    assert t.decode([0xE2, 0x98]) == "\ufffd"
    assert t.encode("\ud800") == [ord("?")]


def test_byte_store_holds_the_documents():
    texts = [b"ab", b"c", "é".encode()]
    store = ByteTokenizer().store([Document(str(i), t) for i, t in enumerate(texts)])
    assert store.tokens.tolist() == [97, 98, 256, 99, 256, 0xC3, 0xA9, 256]
    assert store.starts.tolist() == [0, 3, 5, 8]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_bpe_store_decodes_to_the_documents(folder, split):
    dataset = open_bpe(folder, split=split)
    t = dataset.tokenizer
    originals = {p.read_text(encoding="utf-8") for p in folder.glob("*.txt")}
    documents = documents_of(dataset)
    assert len(documents) > 1
    decoded = [t.decode(d) for d in documents]
    assert set(decoded) <= originals and len(set(decoded)) == len(decoded)
    for d in documents:
        assert d.index(t.end_of_document) == len(d) - 1
    assert t.end_of_document == t.vocab_size - 1 and dataset.store.tokens.max() < t.vocab_size <= 320
    size = sum(len(text.encode()) for text in decoded)
    assert t.bytes_per_token == pytest.approx(size / dataset.num_tokens)
    assert t.bytes_per_token > 1.3
    assert t.decode(t.encode(TEXTS[2])) == TEXTS[2]
    assert t.decode([*t.encode("pass"), t.end_of_document, 399]) == "pass"


def test_no_text_can_spell_the_end_of_a_document(folder):
    t = open_bpe(folder).tokenizer
    for text in ("<|endoftext|>", "</s>", "<eod>", "\x00"):
        ids = t.encode(text)
        assert max(ids) < t.end_of_document and t.decode(ids) == text


def test_bpe_is_trained_once_and_encoded_once(folder, monkeypatch):
    first, first_validation = open_bpe(folder), open_bpe(folder, split="validation")

    def never(*_):
        raise AssertionError("done again")

    monkeypatch.setattr(tokenizer_module, "_train", never)
    monkeypatch.setattr(tokenizer_module.BpeTokenizer, "store", never)
    again = open_bpe(folder)
    assert again.fingerprint == first.fingerprint
    assert np.array_equal(again.store.tokens, first.store.tokens)
    assert again.store.tokens.dtype == first.store.tokens.dtype == np.uint16
    assert open_bpe(folder, split="validation").fingerprint == first_validation.fingerprint
    with pytest.raises(AssertionError):  # another vocabulary is another tokenizer
        open_bpe(folder, bpe_vocab_size=300)
    trained_on = data.sources.files(str(folder), 0.3).train[0].name
    (folder / trained_on).write_text("something else entirely")
    with pytest.raises(AssertionError):  # so is other text
        open_bpe(folder)


def test_training_sees_only_the_training_split(folder):
    marker = "zqzqzqzq" * 50
    held_out = sorted({d.name for d in data.sources.files(str(folder), 0.3).validation})
    before = open_bpe(folder).fingerprint
    (folder / held_out[0]).write_text(marker)
    assert open_bpe(folder).fingerprint == before


def test_damaged_cache_is_made_again(folder):
    first = open_bpe(folder)
    (cache,) = (folder / "cache").iterdir()
    for file in [cache / "tokenizer.json", *cache.glob("*.npz")]:
        file.write_bytes(file.read_bytes()[:100])
    assert open_bpe(folder).fingerprint == first.fingerprint
    assert not [f.name for f in cache.iterdir() if f.name.startswith(".")]


def test_crash_while_writing_leaves_nothing_to_read(folder, monkeypatch):
    def save(file, store):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_module, "_save_store", save)
        with pytest.raises(KeyboardInterrupt):
            open_bpe(folder)
    (cache,) = (folder / "cache").iterdir()
    assert sorted(f.name for f in cache.iterdir()) == ["lock", "tokenizer.json"]
    assert open_bpe(folder).num_tokens > 0


SECOND_PROCESS = """
import sys
from hybrid_jax.data import tokenizer
from hybrid_jax.data.sources import Document
train = tokenizer._train
def count(*args):
    print("trained", flush=True)
    train(*args)
tokenizer._train = count
documents = [Document(str(i), f"text number {i} again and again\\n".encode() * 400) for i in range(300)]
print(tokenizer.cached_bpe(documents, documents, 400, sys.argv[1])[1].tokens.sum())
"""


def test_of_two_processes_one_trains(tmp_path):
    command = [sys.executable, "-c", SECOND_PROCESS, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    words = [p.communicate(timeout=60)[0].split() for p in running]
    assert [p.returncode for p in running] == [0, 0]
    assert sum(w.count("trained") for w in words) == 1
    assert words[0][-1] == words[1][-1]


def test_pieces_are_bounded_and_lossless():
    limit = tokenizer_module.PIECE_CHARACTERS
    for text in (
        "",
        "a",
        "line\n" * 50_000,
        "x" * (3 * limit + 5),
        "\n" + "y" * (2 * limit),
        "z" * limit + "\n" * 9,
    ):
        cut = list(pieces(text))
        assert "".join(cut) == text
        assert all(0 < len(p) <= limit for p in cut)
    assert all(p.endswith("\n") for p in pieces("line\n" * 50_000))


def test_long_text_without_spaces_keeps_memory_bounded(tmp_path):
    rng = np.random.default_rng(0)
    text = rng.integers(97, 123, 6_000_000).astype(np.uint8).tobytes()
    code = (
        "import resource, sys\n"
        "from hybrid_jax.data.sources import Document\n"
        "from hybrid_jax.data.tokenizer import cached_bpe\n"
        "text = open(sys.argv[2], 'rb').read()\n"
        "small, large = [Document('a', text[:100_000])], [Document('b', text)]\n"
        "cached_bpe(small, small, 400, sys.argv[1])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "cached_bpe(small, large, 400, sys.argv[1])\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)\n"
    )
    (tmp_path / "text").write_bytes(text)
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), str(tmp_path / "text")]
    megabytes = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert megabytes < 200, megabytes  # 640 when encoded in one call, 50 in bounded ones


def test_errors_name_the_key(folder, monkeypatch):
    for settings, words in (
        ({"vocab_size": 300}, "config.data.bpe_vocab_size: 320"),
        ({"bpe_vocab_size": 256}, "config.data.bpe_vocab_size: 256"),
        ({"cache_dir": str(folder / "00.txt" / "x")}, "config.data.cache_dir"),
    ):
        with pytest.raises(UserError) as caught:
            open_bpe(folder, **settings)
        assert words in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="pip install tokenizers"):
        open_bpe(folder)


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("") == tmp_path / "hybrid_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("") == tmp_path / ".cache" / "hybrid_jax"
    assert cache_folder("~/x") == tmp_path / "x"


def test_importing_the_data_does_not_import_jax_or_tokenizers():
    code = "import sys, hybrid_jax.data; sys.exit('jax' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Of a store's manifest.


@pytest.fixture
def store(folder):
    """A prepared store of the texts, with a tokenizer whose end-of-document id is not the last."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(TEXTS, trainer)
    bpe.save(str(folder / "tokenizer.json"))
    prefix = folder / "corpus.v1"
    assert prepare.main(["--input", str(folder), "--output", str(prefix), "--tokenizer", str(folder)]) == 0
    (folder / "tokenizer.json").unlink()
    return prefix


@pytest.mark.parametrize("suffix", ["", ".idx", ".bin"])
def test_manifest_gives_the_tokenizer_that_made_the_store(folder, store, suffix):
    t = from_manifest(f"{store}{suffix}")
    assert (t.vocab_size, t.end_of_document) == (300, 1)
    reader = StoreReader(store)
    texts = [p.read_text() for p in sorted(folder.glob("*.txt"))]
    assert [t.decode(reader.document(i)) for i in range(len(texts))] == [text + "</s>" for text in texts]
    for text in (*texts, "</s><pad>"):
        assert 1 not in t.encode(text) and t.decode(t.encode(text)) == text
    assert t.bytes_per_token == sum(len(text.encode()) for text in texts) / reader.num_tokens
    assert math.isnan(load(manifest.tokenizer_path(store)).bytes_per_token)
    # A store may be moved and renamed, with what belongs to it.
    for path in folder.glob("corpus.v1.*"):
        path.rename(folder / path.name.replace("corpus.v1", "web"))
    assert from_manifest(folder / "web").encode(texts[0]) == t.encode(texts[0])


def test_manifest_of_bytes_and_none(folder):
    assert from_manifest(folder / "corpus") is None
    assert prepare.main(["--input", str(folder / "00.txt"), "--output", str(folder / "corpus")]) == 0
    size = (folder / "00.txt").stat().st_size
    assert from_manifest(folder / "corpus") == ByteTokenizer(bytes_per_token=size / (size + 1))
    (folder / "corpus.json").write_text('{"format": "of another program"}')
    assert from_manifest(folder / "corpus") is None


def test_manifest_that_cannot_be_kept_is_named(store):
    about, file = manifest.path_of(store), manifest.tokenizer_path(store)
    whole, content = about.read_text(), file.read_text()
    file.write_text(content.replace("</s>", "</t>"))
    with pytest.raises(UserError, match=r"corpus\.v1\.tokenizer\.json: is not the tokenizer that made the store"):
        from_manifest(store)
    file.unlink()
    with pytest.raises(UserError, match=r"corpus\.v1\.tokenizer\.json: no such file; it is the tokenizer of the store"):
        from_manifest(store)
    file.write_text(content)
    assert from_manifest(store) is not None
    for bad, what in (
        (whole[:-20], "is no JSON"),
        (whole.replace('"version": 2', '"version": 3'), "is a manifest of version 3, not 2"),
        (whole.replace('"sha256"', '"md5"'), "does not say which tokenizer"),
        (whole.replace('"tokenizer"', '"other"'), "does not say which tokenizer"),
    ):
        about.write_text(bad)
        with pytest.raises(UserError, match=rf"corpus\.v1\.json: {what}"):
            from_manifest(store)
