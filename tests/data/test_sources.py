import dataclasses
import json

import numpy as np
import pytest

from hybrid_jax import data
from hybrid_jax.config import DataConfig
from hybrid_jax.data import sources
from hybrid_jax.errors import UserError


def write(folder, **texts):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        content = text if isinstance(text, bytes) else text.encode()
        (folder / name.replace("_dot_", ".")).write_bytes(content)
    return str(folder)


def open_files(path, *, split="train", length=16, vocab_size=300, seed=1, **settings):
    settings = DataConfig(source="files", path=str(path), **settings)
    return data.open(settings, sequence_length=length, vocab_size=vocab_size, seed=seed, split=split)


def text_of(dataset):
    return dataset.tokenizer.decode(dataset.store.tokens.tolist())


def one_line_error(call):
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_python_library_is_split_by_file_without_overlap():
    corpus = sources.python_library(0.05)
    again = sources.python_library(0.05)
    assert corpus == again
    names, held_out = ([d.name for d in side] for side in (corpus.train, corpus.validation))
    assert names == sorted(names) and held_out == sorted(held_out)
    assert not set(names) & set(held_out)
    assert not {d.text for d in corpus.train} & {d.text for d in corpus.validation}
    assert {"ast.py", "json/decoder.py"} <= {*names, *held_out}
    for name in names + held_out:
        assert not {"site-packages", "dist-packages", "test", "tests"} & set(name.split("/")), name
    share = sum(len(d.text) for d in corpus.validation) / sum(len(d.text) for d in corpus.train)
    assert 0.01 < share < 0.12
    assert sum(len(d.text) for d in corpus.train) > 5e6


def test_a_new_file_moves_no_old_one(tmp_path):
    names = [f"f{i:03d}_dot_txt" for i in range(60)]
    folder = write(tmp_path / "a", **{n: f"text {n}" for n in names})
    before = {d.name for d in sources.files(folder, 0.3).validation}
    write(tmp_path / "a", new_dot_txt="a new one", sub_dot_md="and another")
    after = {d.name for d in sources.files(folder, 0.3).validation}
    assert 5 < len(before) < 30
    assert before <= after <= before | {"new.txt", "sub.md"}


def test_folder_reads_the_kinds_it_names_and_nothing_else(tmp_path):
    write(
        tmp_path,
        a_dot_txt="alpha",
        b_dot_MD="beta",
        c_dot_py="gamma",
        skip_dot_bin="never",
        empty_dot_txt=" \n",
    )
    write(tmp_path / "deep" / "er", d_dot_jsonl='{"text": "delta"}\n\n{"text": "epsilon", "id": 3}\n')
    write(tmp_path / ".git", hidden_dot_txt="never")
    corpus = sources.files(str(tmp_path), 0.0)
    assert {d.text for d in corpus.train} == {b"alpha", b"beta", b"gamma", b"delta", b"epsilon"}
    assert corpus.validation == []
    found = sources.files(str(tmp_path / "**" / "*.jsonl"), 0.0)
    assert [d.name for d in found.train] == ["deep/er/d.jsonl:1", "deep/er/d.jsonl:3"]


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.5, 0.999])
def test_few_files_still_fill_both_splits(tmp_path, count, fraction):
    folder = write(tmp_path, **{f"{i}_dot_txt": f"text {i}" for i in range(count)})
    corpus = sources.files(folder, fraction)
    assert corpus.train and corpus.validation
    assert len(corpus.train) + len(corpus.validation) == count


def test_one_file_is_split_by_position(tmp_path):
    lines = [f"line {i} é\n" for i in range(1000)]
    folder = write(tmp_path, book_dot_txt="".join(lines))
    corpus = sources.files(folder + "/book.txt", 0.1)
    train, held_out = corpus.train[0].text.decode(), corpus.validation[0].text.decode()
    assert train + held_out == "".join(lines)
    assert train.endswith("\n") and 0.08 < len(held_out) / len(train + held_out) < 0.12
    assert sources.files(folder, 0.1).validation[0].text.decode() == held_out  # a folder with only that file


def test_one_file_without_lines_is_cut_between_characters(tmp_path):
    for length in range(20, 26):
        folder = write(tmp_path, book_dot_txt="é" * length)
        corpus = sources.files(folder, 0.3)
        train, held_out = corpus.train[0].text.decode(), corpus.validation[0].text.decode()
        assert set(train) == set(held_out) == {"é"} and len(train + held_out) == length


def test_one_jsonl_is_split_by_document_and_copies_stay_on_one_side(tmp_path):
    documents = [f"document {i % 50}" for i in range(100)]
    folder = write(tmp_path, d_dot_jsonl="".join(json.dumps({"text": t}) + "\n" for t in documents))
    corpus = sources.files(folder, 0.3)
    train, held_out = ({d.text for d in side} for side in (corpus.train, corpus.validation))
    assert not train & held_out and len(train | held_out) == 50 and len(held_out) > 5
    assert len(corpus.train) == 2 * len(train)


def test_validation_drops_texts_that_training_holds(tmp_path):
    folder = write(tmp_path, **{f"{i:03d}_dot_txt": f"text {i // 2}" for i in range(100)})
    corpus = sources.files(folder, 0.4)
    assert corpus.validation
    assert not {d.text for d in corpus.train} & {d.text for d in corpus.validation}


def test_undecodable_bytes_are_replaced_and_counted(tmp_path):
    folder = write(tmp_path, a_dot_txt=b"r\xe9 \xff end", b_dot_txt=b"\xef\xbb\xbfmarked", c_dot_txt="fine")
    dataset = open_files(folder, validation_fraction=0.0)
    assert text_of(dataset) == "r\ufffd \ufffd endmarkedfine"
    assert "undecodable bytes replaced in 1" in dataset.description


@pytest.mark.parametrize("line", ["{broken", '{"txt": "a"}', '{"text": 3}', '["text"]'])
def test_bad_jsonl_line_is_named(tmp_path, line):
    folder = write(tmp_path, good_dot_txt="a", bad_dot_jsonl='{"text": "a"}\n' + line + "\n")
    message = one_line_error(lambda: sources.files(folder, 0.1))
    assert "bad.jsonl: line 2" in message and '"text"' in message


def test_nothing_to_read_says_what_is_accepted(tmp_path):
    write(tmp_path / "other", x_dot_bin="a")
    write(tmp_path / "blank", x_dot_txt="  \n")
    for path in (tmp_path / "other", tmp_path / "missing", tmp_path / "*.txt"):
        message = one_line_error(lambda path=path: sources.files(str(path), 0.1))
        assert str(path) in message and ".txt, .md, .py, .jsonl" in message and "config.data.path" in message
    assert "config.data.path: empty" in one_line_error(lambda: sources.files("", 0.1))
    assert str(tmp_path / "blank") in one_line_error(lambda: sources.files(str(tmp_path / "blank"), 0.1))


def test_errors_name_the_key(tmp_path):
    folder = write(tmp_path, a_dot_txt="alpha", b_dot_txt="beta")
    config = DataConfig(source="store", prepare="--input fineweb-edu --tokenizer t.json")
    message = one_line_error(lambda: data.open(config, sequence_length=8, vocab_size=300, seed=1))
    assert message == (
        "config.data.path: empty; make this recipe's data with `python -m hybrid_jax.data.prepare --input fineweb-edu "
        "--tokenizer t.json --output PREFIX` and give --config.data.path=PREFIX, or add ':smoke' to the config to run "
        "without it"
    )
    assert "config.model.vocab_size: 256" in one_line_error(lambda: open_files(folder, vocab_size=256))
    assert "config.data.validation_fraction" in one_line_error(
        lambda: open_files(folder, split="validation", validation_fraction=0.0)
    )
    assert "config.data.source" in one_line_error(
        lambda: data.open(dataclasses.replace(config, source="web"), sequence_length=8, vocab_size=300, seed=1)
    )
    with pytest.raises(ValueError, match="split"):
        open_files(folder, split="test")


def test_library_without_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "config.data.source" in one_line_error(lambda: sources.python_library(0.1))


def test_fingerprint_follows_everything_that_decides_a_sample(tmp_path):
    texts = {"a_dot_txt": "alpha beta gamma", "b_dot_txt": "delta epsilon", "c_dot_txt": "zeta eta"}
    folder, same = write(tmp_path / "a", **texts), write(tmp_path / "b", **texts)
    changed = write(tmp_path / "c", **(texts | {"c_dot_txt": "zeta ETA"}))
    base = open_files(folder).fingerprint
    assert open_files(same).fingerprint == base
    others = [
        open_files(changed, validation_fraction=0.0).fingerprint,
        open_files(folder, validation_fraction=0.0).fingerprint,
        open_files(folder, length=8).fingerprint,
        open_files(folder, seed=2).fingerprint,
        open_files(folder, isolate_documents=False).fingerprint,
        open_files(folder, split="validation").fingerprint,
    ]
    assert len({base, *others}) == 7


def test_tokens_are_small(tmp_path):
    assert open_files(write(tmp_path, a_dot_txt="alpha", b_dot_txt="b")).store.tokens.dtype == np.uint16


def test_files_may_be_validated_on_others(tmp_path):
    folder = write(tmp_path / "a", a_dot_txt="alpha beta gamma", b_dot_txt="delta epsilon")
    other = write(tmp_path / "b", c_dot_txt="alpha beta gamma", d_dot_txt="zeta")
    train, validation = (open_files(folder, split=s, validation_path=str(other)) for s in ("train", "validation"))
    assert (train.num_tokens, validation.num_tokens) == (len("alpha beta gammadelta epsilon") + 2, len("zeta") + 1)
    assert train.identity["data.validation_fraction"] == "0, as data.validation_path is set"
    for path, words in (
        (tmp_path / "none", f"config.data.validation_path: {tmp_path}/none: no such file or folder"),
        (folder, f"config.data.validation_path: every text of {folder} (2 files) is in config.data.path too"),
    ):
        message = one_line_error(lambda path=path: open_files(folder, split="validation", validation_path=str(path)))
        assert message.startswith(words)
