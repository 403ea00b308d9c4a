"""A table of what people give prepare: each row ends in one clear line with nothing half written, or in documents."""

import gzip
import io
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import tokenizers

from hybrid_jax.data import documents, prepare
from hybrid_jax.data.inputs import ACCEPTED
from hybrid_jax.data.store import StoreReader
from tests.data.test_prepare import lines, nothing_written, refused, run, texts, write

FINE = lines({"text": "fine"}).encode()
RANDOM = os.urandom(3000).hex().encode()
PACKED = gzip.compress(RANDOM, mtime=0)
LIMIT = 4000  # of a line or row, in these tests
TOO_LONG = (
    f"has over {LIMIT:,} bytes, more than is held in memory at once; make it a text file of its own (.txt), which"
)
NOTHING = "--input: no document with a token in it"
DAMAGED = "is damaged and cannot be decompressed ("
NO_FIELD = "has no field 'text' (its fields: "


def zst(raw):
    return pytest.importorskip("zstandard").ZstdCompressor().compress(raw)


def parquet(columns, **settings):
    pyarrow, module = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    out = io.BytesIO()
    module.write_table(pyarrow.table(columns), out, **settings)
    return out.getvalue()


def bad_line(content, what):
    """Two rows of the table: in a file, and packed."""
    raw = 20 * FINE + b"\n" + content + FINE
    line = f"IN: line 22: {what}"
    return [("a.jsonl", raw, line), ("a.jsonl.gz", gzip.compress(raw), line)]


# Name and content of the file IN, and the line of the error, or what the documents are.
TABLE = [
    ("a.txt", b"", NOTHING),
    ("a.jsonl", b"", NOTHING),
    ("a.jsonl", b"\n\n\n", NOTHING),
    ("a.jsonl", b" \r\n\t\n  ", NOTHING),
    ("a.jsonl", b'{"text": ""}\n', NOTHING),
    ("a.txt.gz", b"", NOTHING),
    ("a.txt.gz", gzip.compress(b""), NOTHING),
    ("a.txt", b"\xef\xbb\xbf", NOTHING),
    ("a.txt", b" \n\n", [" \n\n"]),
    ("a.txt", b"\n", ["\n"]),
    # Characters.
    ("a.txt", "größer".encode("latin-1"), ["gr\ufffd\ufffder"]),
    ("a.txt", b"ends in half \xf0\x9f\x98", ["ends in half \ufffd"]),
    ("a.jsonl", b'{"text": "\xe9t\xe9"}\n', ["\ufffdt\ufffd"]),
    ("a.jsonl", b'{"text": "\\ud800x"}\n', ["\ufffdx"]),
    ("a.jsonl", b'{"text": "\\ud83d\\ude00"}\n', ["😀"]),
    ("a.txt", b"\xef\xbb\xbfmarked\n", ["marked\n"]),
    ("a.jsonl", b"\xef\xbb\xbf" + FINE, ["fine"]),
    ("a.jsonl.gz", gzip.compress(b"\xef\xbb\xbf" + FINE), ["fine"]),
    ("a.txt", b"\xef\xbb\xbf\xef\xbb\xbftwice", ["\ufefftwice"]),
    ("a.txt", b"one\r\ntwo\r", ["one\r\ntwo\r"]),
    ("a.jsonl", FINE.replace(b"\n", b"\r\n") * 2, ["fine", "fine"]),
    ("a.jsonl", FINE.strip(), ["fine"]),
    ("a.txt", b"a\0b\0", ["a\0b\0"]),
    ("a.jsonl", b'{"text": "a\\u0000b"}\n', ["a\0b"]),
    ("a.txt", "text".encode("utf-16"), "IN: is UTF-16 or UTF-32, not UTF-8; convert it first (iconv"),
    ("a.txt", b"\xfe\xff" + "text".encode("utf-16-be"), "IN: is UTF-16 or UTF-32, not UTF-8; convert it first"),
    ("a.jsonl", FINE.decode().encode("utf-16"), "IN: is UTF-16 or UTF-32, not UTF-8; convert it first"),
    ("a.txt", "text".encode("utf-32"), "IN: is UTF-16 or UTF-32, not UTF-8; convert it first"),
    # Lines.
    *bad_line(b"{broken\n", "is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    *bad_line(b'{"text": "cut off\n', "is not JSON: Invalid control character"),
    *bad_line(b'{"text": "a\0b"}\n', "is not JSON: Invalid control character"),
    *bad_line(b"\0\0\0\n", "is not JSON: Expecting value"),
    *bad_line(FINE.strip() * 2 + b"\n", "is not JSON: Extra data"),
    *bad_line(b"just text\n", "is not JSON: Expecting value"),
    *bad_line(b'["text"]\n', "is not a JSON object; mend or remove the line"),
    *bad_line(b"null\n", "is not a JSON object"),
    *bad_line(b'"text"\n', "is not a JSON object"),
    *bad_line(b"{}\n", f"{NO_FIELD}none; --text_field names another)"),
    *bad_line(b'{"txt": "a", "id": 1}\n', f"{NO_FIELD}txt, id; --text_field names another); mend or remove the line"),
    *bad_line(b'{"text": null}\n', "its field 'text' is null, not a string"),
    *bad_line(b'{"text": 3.5}\n', "its field 'text' is a number, not a string"),
    *bad_line(b'{"text": NaN}\n', "its field 'text' is a number, not a string"),
    *bad_line(b'{"text": false}\n', "its field 'text' is true or false, not a string"),
    *bad_line(b'{"text": ["a"]}\n', "its field 'text' is an array, not a string"),
    *bad_line(b'{"text": {"a": 1}}\n', "its field 'text' is an object, not a string"),
    *bad_line(b'{"text": %s%s}\n' % (b"[" * 1900, b"]" * 1900), ""),  # too deep for a Python, or an array
    *bad_line(b'{"text": "%s"}\n' % (b"x" * LIMIT), TOO_LONG),
    *bad_line(b" " * (LIMIT + 1) + b"\n", TOO_LONG),
    ("a.jsonl", b'{"text": "%s"}\n' % (b"x" * (LIMIT - 12)), ["x" * (LIMIT - 12)]),  # as long as may be
    ("a.jsonl", b'{"text": "%s"}' % (b"x" * (LIMIT - 12)), ["x" * (LIMIT - 12)]),
    ("a.jsonl", b"\0" * 10 * LIMIT, f"IN: line 1: {TOO_LONG}"),
    ("a.txt", b"x" * 10 * LIMIT, ["x" * 10 * LIMIT]),
    # Compressed files.
    ("a.txt.gz", PACKED[:-4], f"IN: {DAMAGED}Compressed file ended before the end-of-stream marker was reached); copy"),
    ("a.txt.gz", PACKED[: len(PACKED) // 2], f"IN: {DAMAGED}Compressed file ended before"),
    ("a.txt.gz", PACKED[:1000] + b"\xff\xff\xff" + PACKED[1003:], f"IN: {DAMAGED}"),
    ("a.txt.gz", PACKED[:-5] + b"\xff" + PACKED[-4:], f"IN: {DAMAGED}CRC check failed"),
    ("a.txt.gz", b"plain text", f"IN: {DAMAGED}Not a gzipped file"),
    ("a.txt.gz", PACKED + b"more", f"IN: {DAMAGED}Not a gzipped file"),
    ("a.txt.gz", gzip.compress(b"one ") + gzip.compress(b"two"), ["one two"]),
    ("a.jsonl.zst", lambda: zst(FINE * 99)[:-3], f"IN: {DAMAGED}it ends too early)"),
    ("a.jsonl.zst", lambda: b"plain text", f"IN: {DAMAGED}"),
    ("a.jsonl.zst", lambda: zst(FINE) + b"more", f"IN: {DAMAGED}"),
    ("a.jsonl.zst", lambda: zst(FINE) + zst(FINE), ["fine", "fine"]),
    ("a.jsonl.zst", lambda: zst(b"") + b"", NOTHING),
    # Tables.
    ("a.parquet", lambda: parquet({"text": ["a", "b", ""]}, row_group_size=1), ["a", "b"]),
    ("a.parquet", lambda: parquet({"text": ["x" * LIMIT]}), ["x" * LIMIT]),
    ("a.parquet", lambda: parquet({"text": ["a", "x" * (LIMIT + 1)]}), f"IN: row 2: {TOO_LONG}"),
    ("a.parquet", lambda: parquet({"text": ["b" * LIMIT] * 9, "id": ["x" * LIMIT] * 9}), ["b" * LIMIT] * 9),
    ("a.parquet", lambda: parquet({"text": ["a" * 20 * LIMIT]}), f"IN: row group 1 has a row of {TOO_LONG[4:]}"),
    (
        "a.parquet",
        lambda: parquet({"text": ["a"] * 700 + [None]}, row_group_size=100),
        "IN: row 701: its field 'text' is",
    ),
    ("a.parquet", lambda: parquet({"text": [1]}), "IN: row 1: its field 'text' is a number, not a string"),
    ("a.parquet", lambda: parquet({"body": ["a"]}), f"IN: {NO_FIELD}body; --text_field names another)"),
    ("a.parquet", lambda: parquet({"text": ["a"]})[:0], "IN: is not a whole .parquet file: "),
    ("a.parquet", lambda: parquet({"text": ["a" * 99]})[:-10], "IN: is not a whole .parquet file: "),
    ("a.parquet", lambda: parquet({"text": ["a" * 99]})[:60], "IN: is not a whole .parquet file: "),
    ("a.parquet", lambda: parquet({"text": ["a"]})[:0] + b"text", "IN: is not a whole .parquet file: "),
    ("a.parquet", lambda: parquet({"text": ["a"]}).replace(b"PAR1", b"PAR0"), "IN: is not a whole .parquet file: "),
    ("a.parquet", lambda: parquet({"text": [""]})[:] + b"", NOTHING),
    # Names.
    ("a.csv", b"text", f"--input: IN: this kind of file cannot be read ({ACCEPTED} can)"),
    ("a", b"text", f"--input: IN: this kind of file cannot be read ({ACCEPTED} can)"),
    ("two\nlines.jsonl", b"[]\n", "OUT/two lines.jsonl: line 1: is not a JSON object"),
    (os.fsdecode(b"fil\xe9.txt"), b"text", ["text"]),
    (os.fsdecode(b"fil\xe9.jsonl"), b"[]\n", "OUT/fil"),
    ("UPPER.TXT", b"text", ["text"]),
]


@pytest.mark.parametrize("row", range(len(TABLE)))
def test_a_file_makes_documents_or_one_line(tmp_path, capsys, monkeypatch, row):
    name, content, wanted = TABLE[row]
    content = content() if callable(content) else content
    monkeypatch.setattr(documents, "RECORD_BYTES", LIMIT)
    monkeypatch.setattr(prepare, "PART_BYTES", 64 + len(content) // 30)  # so that most parts do not begin with it
    path = tmp_path / name
    write(tmp_path, {name: content})
    arguments = ("--input", path, "--output", tmp_path / "store")
    if isinstance(wanted, list):
        assert run(*arguments) == 0
        assert texts(tmp_path / "store") == wanted
        return
    message = refused(capsys, *arguments)
    assert message.startswith(wanted.replace("OUT", str(tmp_path)).replace("IN:", f"{path}:")), message
    assert not [*tmp_path.glob("store.[bijm]*"), *tmp_path.glob(".store*")]
    assert not list(tmp_path.glob("store.parts/.*"))


# What the name of an input is.


def input_rows():
    """Name of a row: how it is set up, what is given as inputs, and the line or documents."""

    def files(folder):
        write(folder, {"one.txt": "one", "sub/two.txt": "two"})

    def link(name, target):
        def make(folder):
            files(folder)
            (folder / name).symlink_to(target)

        return make

    def pipe(folder):
        files(folder)
        os.mkfifo(folder / "pipe.txt")

    both, file = ["one", "two"], "is a pipe or device and not a file; write what it gives into a file first"
    return {
        "missing": (files, ["none.txt"], "--input: IN/none.txt: no such file or folder, and no file matches it"),
        "no match": (files, ["*.md"], "--input: IN/*.md: no such file or folder, and no file matches it"),
        "nothing to read": (files, ["sub/*.md", "."], "--input: IN/sub/*.md: no such file or folder"),
        "twice": (files, ["one.txt", "one.txt", "sub/two.txt"], both),
        "by its folder too": (files, ["one.txt", ".", "sub"], both),
        "by a glob too": (files, ["*.txt", "**/*.txt", "./sub/../one.txt"], both),
        "by a link too": (link("link.txt", "one.txt"), ["one.txt", "link.txt", "sub"], both),
        "a link alone": (link("link.txt", "one.txt"), ["link.txt", "sub"], both),
        "a link to nothing": (link("link.txt", "gone.txt"), ["."], "IN/link.txt: No such file or directory"),
        "a link to itself": (link("link.txt", "link.txt"), ["."], "IN/link.txt: Too many levels of symbolic links"),
        "a folder in itself": (link("sub/loop", ".."), ["."], both),
        "a folder in itself, by a glob": (link("sub/loop", ".."), ["**/*.txt"], both),
        "a pipe": (pipe, ["pipe.txt"], f"--input: IN/pipe.txt: {file}"),
        "a pipe in a folder": (pipe, ["."], f"IN/./pipe.txt: {file}"),
        "a device": (files, ["/dev/null"], f"--input: /dev/null: {file}"),
        "a folder that is named as a file": (lambda f: write(f, {"x.txt/a.txt": "one"}), ["x.txt"], ["one"]),
        "a name that is too long": (files, ["x" * 300 + ".txt"], "--input: IN/xxx"),
    }


@pytest.mark.parametrize("row", input_rows())
def test_an_input_names_documents_or_is_one_line(tmp_path, capsys, row):
    make, inputs, wanted = input_rows()[row]
    folder = tmp_path / "in"
    folder.mkdir()
    make(folder)
    named = [folder / name if name != "." else f"{folder}/." for name in inputs]
    arguments = ("--input", *named, "--output", tmp_path / "store")
    if isinstance(wanted, list):
        assert run(*arguments) == 0 and texts(tmp_path / "store") == wanted
    else:
        message = refused(capsys, *arguments).replace(f"{folder}/./", f"{folder}/")
        assert message.startswith(wanted.replace("IN/./", "IN/").replace("IN", str(folder))), message
        assert nothing_written(tmp_path)


def test_an_input_in_the_output(tmp_path, capsys):
    write(tmp_path, {"a.txt": "alpha", "store.parts/mine.txt": "beta"})
    assert run("--input", tmp_path, "--output", tmp_path / "store") == 0  # its files are no kind that is read
    assert texts(tmp_path / "store") == ["alpha", "beta"]
    assert (tmp_path / "store.parts" / "mine.txt").read_text() == "beta"
    assert run("--input", tmp_path, "--output", tmp_path / "store", "--overwrite") == 0
    assert texts(tmp_path / "store") == ["alpha", "beta"]
    (tmp_path / "b.txt").symlink_to("store.bin")
    before = (tmp_path / "store.bin").read_bytes()
    message = refused(capsys, "--input", tmp_path, "--output", tmp_path / "store", "--overwrite")
    assert message == f"--input: {tmp_path / 'store.bin'} is a file of the store that --output names; name another"
    assert (tmp_path / "store.bin").read_bytes() == before


# While it is read.


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"])
@pytest.mark.parametrize("how", ["grows", "shrinks", "is written again", "is gone"])
def test_a_file_that_changes(tmp_path, capsys, monkeypatch, name, how):
    if name == "a.parquet":
        content = parquet({"text": ["fine"] * 99})
    else:
        content = gzip.compress(FINE) if name.endswith(".gz") else 99 * FINE
    path = tmp_path / name
    path.write_bytes(content)
    cut = prepare.cut

    def later(*arguments):
        found = cut(*arguments)
        if how == "is gone":
            path.unlink()
        elif how == "is written again":
            path.write_bytes(content[::-1])
            os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))  # were its clock too coarse
        else:
            path.write_bytes(content + b"x" if how == "grows" else content[:-9])
        return found

    monkeypatch.setattr(prepare, "cut", later)
    message = refused(capsys, "--input", path, "--output", tmp_path / "store")
    what = "No such file or directory" if how == "is gone" else "changed while it was being prepared; start again"
    assert message == f"{path}: {what}"
    assert nothing_written(tmp_path)


def test_a_file_that_grows_under_the_reader(tmp_path):
    """After it was opened, also where its end would be a bad line."""
    path = tmp_path / "a.jsonl"
    for added, count in ((b"", 99), (b"{half", 0), (FINE, 0)):
        path.write_bytes(99 * FINE)
        ((span,),) = prepare.cut(prepare.sources([str(path)]), 10**6)
        found = documents.Reader(documents.Field("text")).documents(span)
        next(found)
        with path.open("ab") as file:
            file.write(added)
        os.utime(path, ns=(1, path.stat().st_mtime_ns + bool(added)))
        if count:
            assert len(list(found)) == count - 1
        else:
            with pytest.raises(prepare.UserError, match="changed while it was being prepared; start again"):
                list(found)


# Without permission.


@pytest.fixture
def unprivileged():
    """A folder, while this process may do no more than other users may in it."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if user == 0:
            os.seteuid(0)
        shutil.rmtree(folder)


def test_without_permission(unprivileged, capsys):
    folder = unprivileged
    write(folder, {"in/a.txt": "alpha", "in/sub/b.txt": "beta", "readonly/c": ""})
    for path, mode, what in (
        (folder / "in" / "a.txt", 0, "{}: Permission denied"),
        (folder / "in" / "sub", 0, "--input: {}: Permission denied"),
        (folder / "in", 0o444, "{}/a.txt: Permission denied"),
    ):
        before = path.stat().st_mode
        path.chmod(mode)
        message = refused(capsys, "--input", folder / "in", "--output", folder / "store")
        path.chmod(before)
        assert message.endswith("Permission denied") and str(path) in message, (message, what)
    (folder / "readonly").chmod(0o555)
    message = refused(capsys, "--input", folder / "in", "--output", folder / "readonly" / "store")
    assert message == f"--output: {folder / 'readonly' / 'store.parts'}: Permission denied"
    assert nothing_written(folder) and nothing_written(folder / "readonly")
    (folder / "readonly").chmod(0o755)
    assert run("--input", folder / "in", "--output", folder / "store") == 0


# Outputs.


def test_outputs_that_cannot_be(tmp_path, capsys):
    write(tmp_path, {"a.txt": "alpha", "file": "", "folder.bin/x": "", "taken.parts": "mine"})
    for name, what in (
        ("none/store", "--output: there is no folder OUT/none; make it first"),
        ("file/store", "--output: there is no folder OUT/file; make it first"),
        ("folder", "--output: OUT/folder.bin is a folder; name another, or move it"),
        ("taken", "--output: OUT/taken.parts: File exists"),
        ("x" * 300, "OUT/xxx"),
        (".", "--output: 'OUT/.' is a folder; name the store in it, as OUT/./corpus"),
    ):
        output = f"{tmp_path}/{name}"
        for more in ((), ("--overwrite",)):
            message = refused(capsys, "--input", tmp_path / "a.txt", "--output", output, *more)
            assert message.startswith(what.replace("OUT", str(tmp_path))), message
    assert (tmp_path / "taken.parts").read_text() == "mine" and (tmp_path / "folder.bin" / "x").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "file", "folder.bin", "taken.parts"]
    strange = f"{tmp_path}/{os.fsdecode(bytes([233]))}"  # no UTF-8
    assert run("--input", tmp_path / "a.txt", "--output", strange) == 0
    assert run("--input", tmp_path / "a.txt", "--output", strange) == 0 and texts(strange) == ["alpha"]
    assert "\\udce9: is whole already" in capsys.readouterr().out


# Tokenizers.


def tokenizer_rows():
    vocab = {"a": 0, "b": 1, "</s>": 2}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    whole = words.to_str()
    return {
        "empty": ("", "is not a tokenizer.json: "),
        "cut": (whole[:-30], "is not a tokenizer.json: "),
        "no JSON": ("version: 1", "is not a tokenizer.json: "),
        "other JSON": ('{"text": "a"}', "is not a tokenizer.json: "),
        "a list": ("[]", "is not a tokenizer.json: "),
        "without a model": (json.dumps({**json.loads(whole), "model": {}}), "is not a tokenizer.json: "),
        "not UTF-8": (b"\xff\xfe{}", "is not UTF-8; give a tokenizer.json or a folder with one"),
        "without an end-of-document token": (whole.replace("</s>", "<x>"), "has none of <|endoftext|>, "),
    }


@pytest.mark.parametrize("row", tokenizer_rows())
def test_a_tokenizer_that_is_none(tmp_path, capsys, row):
    content, what = tokenizer_rows()[row]
    write(tmp_path, {"a.txt": "alpha", "tokenizer.json": content})
    arguments = ("--input", tmp_path / "a.txt", "--output", tmp_path / "store", "--tokenizer")
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        message = refused(capsys, *arguments, name)
        assert message.startswith(("--tokenizer: ", "--eod_token: ")) and what in message and str(name) in message
    assert nothing_written(tmp_path)


def test_ids_over_65535(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 65_534, "</s>": 65_535}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, {"a.txt": "b a b", "b.txt": "c b"})
    assert run("--input", tmp_path / "*.txt", "--output", tmp_path / "store", "--tokenizer", tmp_path, workers=2) == 0
    reader = StoreReader(tmp_path / "store")
    assert reader.dtype == "<i4" and reader.tokens.tolist() == [65_534, 0, 65_534, 65_535, 0, 65_534, 65_535]
