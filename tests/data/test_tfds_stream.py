"""A data set of tensorflow-datasets to a token store; one that its own writer made, without TensorFlow."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from hybrid_jax.data import prepare, train_tokenizer
from tests.data.test_prepare import ROOT, nothing_written, refused, run, start, texts, until_parts

INSTALLED = all(importlib.util.find_spec(name) for name in ("tensorflow_datasets", "array_record"))
with_package = pytest.mark.skipif(not INSTALLED, reason="tensorflow-datasets is not installed")
TRAIN = [f"row {i} é " + "x" * (i % 50) for i in range(1500)]
TEST = ["test 0", "test 1"]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A folder with the data set tiny/small:1.0.0, of the splits TRAIN and TEST."""
    import tensorflow_datasets as tfds

    class Tiny(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        BUILDER_CONFIGS = (tfds.core.BuilderConfig(name="small"),)

        def _info(self):
            text = tfds.features.Text()
            fields = {"text": text, "title": text, "label": tfds.features.ClassLabel(num_classes=3)}
            features = tfds.features.FeaturesDict(fields)
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, _):
            return {"train": self._generate_examples(TRAIN), "test": self._generate_examples(TEST)}

        def _generate_examples(self, rows):
            for number, text in enumerate(rows):
                yield number, {"text": text, "title": f"title {number}", "label": number % 3}

    folder = tmp_path_factory.mktemp("tfds")
    Tiny(data_dir=folder, config="small", file_format="array_record").download_and_prepare()
    return folder


def files_of(folder):
    return folder / "tiny" / "small" / "1.0.0"


@pytest.fixture
def command(tmp_path, data_dir):
    return ("--tfds", "tiny/small", "--data_dir", data_dir, "--output", tmp_path / "store")


@with_package
def test_rows_are_documents(tmp_path, command, data_dir, monkeypatch):
    monkeypatch.setattr(prepare, "PART_BYTES", 2**12)
    for workers, name in ((1, "tiny/small"), (2, "tiny:1.*.*")):
        command = ("--tfds", name, "--data_dir", data_dir, "--output", tmp_path / f"store{workers}")
        assert run(*command, workers=workers) == 0
        assert texts(tmp_path / f"store{workers}") == TRAIN
    for suffix in (".bin", ".idx", ".json"):
        assert (tmp_path / f"store1{suffix}").read_bytes() == (tmp_path / f"store2{suffix}").read_bytes()
    (source,) = json.loads((tmp_path / "store1.json").read_text())["sources"]
    assert source["path"] == "tfds:tiny/small/1.0.0:train" and source["size"] > sum(map(len, TRAIN))
    assert "tensorflow" not in sys.modules


@with_package
@pytest.mark.parametrize(
    "options, want",
    [
        (("--split", "test"), TEST),
        (("--split", "train[10:12]+test"), TRAIN[10:12] + TEST),
        (("--split", "test", "--text_field", "title"), ["title 0", "title 1"]),
    ],
)
def test_splits_slices_and_fields(tmp_path, command, options, want):
    assert run(*command, *options) == 0 and texts(tmp_path / "store") == want


@with_package
def test_bytes_that_are_no_text_are_counted_and_replaced(tmp_path, command, data_dir, capsys, monkeypatch):
    from tensorflow_datasets.core.features import FeaturesDict

    decode = FeaturesDict.deserialize_example_np

    def broken(self, record):
        found = decode(self, record)
        return found | {"text": found["text"].replace(b"test 0", b"a \xff\xe2\x82 \xc3\xa9")}

    monkeypatch.setattr(FeaturesDict, "deserialize_example_np", broken)
    assert run(*command, "--split", "test") == 0
    assert texts(tmp_path / "store") == ["a \ufffd\ufffd\ufffd é", "test 1"]
    assert "1 document with bytes that are no UTF-8, replaced" in capsys.readouterr().out


@with_package
def test_killed_it_goes_on_where_it_was(tmp_path, command):
    command = (*command, "--workers", 1)
    process = start(*command)
    until_parts(process, tmp_path / "store.parts", 1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = sorted(p.name for p in (tmp_path / "store.parts").glob("*.json") if p.stem.isdigit())
    assert kept and not (tmp_path / "store.bin").exists()
    again = start(*command)
    _, error = again.communicate()
    assert again.returncode == 0 and f"prepare: {len(kept)} parts are whole already" in error
    assert texts(tmp_path / "store") == TRAIN


@with_package
def test_a_sample_is_of_all_rows(tmp_path, command, monkeypatch):
    monkeypatch.setattr(train_tokenizer, "SAMPLE_BYTES", 2**13)
    stream = prepare.open_stream(prepare_options(command), ())
    take = prepare.Job("", None, "text", False, True, None, False).take
    found = list(train_tokenizer.sample([stream.source], stream, 2**22, take))
    numbers = [int(text.split()[1]) for text in found]
    assert [TRAIN[i] for i in numbers] == found and len(set(numbers)) == len(numbers)
    assert 2**13 <= sum(len(text.encode()) for text in found) < 2**13 + 64
    assert min(numbers) < 300 and max(numbers) > 1200
    assert list(train_tokenizer.sample([stream.source], stream, 2**22, take)) == found
    assert run(*command, "--train_tokenizer", 300) == 0
    about = json.loads((tmp_path / "store.json").read_text())
    assert about["documents"] == len(TRAIN) and about["tokenizer"]["vocab_size"] == 300


def prepare_options(command):
    import argparse

    return argparse.Namespace(dataset=None, tfds=command[1], split="train", data_dir=str(command[3]))


@with_package
def test_what_cannot_be_had_is_one_line(tmp_path, command, data_dir, capsys):
    build = f"--file_format=array_record --data_dir={data_dir}"
    installed = "where TensorFlow is installed, prepare it: tfds build"
    output = command[4:]

    def message(name, *options, folder=data_dir):
        return refused(capsys, "--tfds", name, "--data_dir", folder, *output, *options)

    for name in ("c4/en", "tiny/large", "tiny/small:2.0.0"):
        assert message(name) == f"--tfds: {name}: {data_dir} holds tiny/small:1.0.0; {installed} {name} {build}"
    for name in ("huggingface:c4", "a b", "", "tiny/small/1.0.0", "tiny:1"):
        assert message(name) == f"--tfds: {name!r}: is not NAME, NAME/CONFIG, NAME:VERSION or NAME/CONFIG:VERSION"
    assert message("tiny", "--split", "tset") == (
        "--tfds: tiny: Unknown split 'tset'. Should be one of ['train', 'test']; mend --split"
    )
    assert message("tiny", "--split", "train[2000:]").startswith("--tfds: tiny: Requested slice [2000:1500] incomp")
    assert message("tiny", "--split", "train[").startswith(
        "--tfds: tiny: Error parsing split 'train['. See format at: "
    )
    assert message("tiny", "--split", "train[:0]") == "--tfds: tiny: train[:0] has no row; mend --split"
    assert message("tiny", "--text_field", "label") == (
        "tfds:tiny/small/1.0.0:train: has no field 'label' (its fields: text, title; --text_field names another)"
    )
    none = tmp_path / "none"
    assert message("tiny", folder=none).startswith(f"--data_dir: there is no folder {none}; {installed} tiny --file_fo")
    assert (
        message("tiny", folder="gs://tfds-data") == "--data_dir: gs://tfds-data: is not on this machine; copy it here"
    )
    assert message("tiny", "--input", none) == "--input: give it, --dataset or --tfds, one of the three"
    assert nothing_written(tmp_path)


@with_package
def test_other_formats_are_one_line(tmp_path, command, data_dir, capsys):
    for name, remedy in (
        ("tfrecord", "which needs TensorFlow; where that is installed, convert it: tfds convert_format"),
        ("parquet", "give --input"),
    ):
        copy = tmp_path / name
        shutil.copytree(data_dir, copy)
        about = files_of(copy) / "dataset_info.json"
        about.write_text(about.read_text().replace("array_record", name))
        message = refused(capsys, "--tfds", "tiny", "--data_dir", copy, *command[4:])
        assert message.startswith(f"--tfds: tiny: is stored as {name}") and remedy in message


@with_package
@pytest.mark.parametrize("how", ["cut", "empty", "gone", "changed", "other rows"])
def test_damaged_files_are_one_line(tmp_path, command, data_dir, capsys, how):
    copy = tmp_path / "copy"
    shutil.copytree(data_dir, copy)
    (file,) = files_of(copy).glob("*train*")
    raw = bytearray(file.read_bytes())
    if how == "gone":
        file.unlink()
    elif how == "other rows":  # what is recorded of a split is not what it has
        about = files_of(copy) / "dataset_info.json"
        about.write_text(about.read_text().replace(f'"{len(TRAIN)}"', '"1499"'))
    else:
        middle = len(raw) // 4
        raw[middle : middle + 64] = bytes(64) if how == "changed" else raw[middle : middle + 64]
        file.write_bytes(raw[: {"cut": len(raw) // 2, "empty": 0}.get(how, len(raw))])
    message = refused(capsys, "--tfds", "tiny", "--data_dir", copy, *command[4:])
    ends = ("copy it again", "copy or prepare it again", "No such file or directory")
    assert message.endswith(ends) and len(message) < 400, message
    assert not (tmp_path / "store.bin").exists()


@with_package
def test_an_installed_tensorflow_is_not_imported(tmp_path, command):
    package = tmp_path / "packages" / "tensorflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w'); raise SystemExit('imported')")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{package.parent}"}
    command = [sys.executable, "-m", "hybrid_jax.data.prepare", *map(str, command), "--workers", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "store") == TRAIN and not (tmp_path / "imported").exists()
    again = "import hybrid_jax.data.tfds_stream as t; t._packages(); import tensorflow"
    done = subprocess.run([sys.executable, "-c", again], env=environment, capture_output=True, text=True)
    assert done.stderr.endswith("ImportError: TensorFlow is not imported here: it crashes beside ROCm\n")
    assert not (tmp_path / "imported").exists()


def test_without_the_package_it_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    message = refused(capsys, "--tfds", "tiny", "--output", tmp_path / "store")
    assert message == "--tfds: needs packages that are not installed: pip install 'hybrid_jax[tfds]'"
    message = refused(capsys, "--input", tmp_path, "--data_dir", tmp_path, "--output", tmp_path / "store")
    assert message == "--data_dir: is where --tfds finds its data sets; leave it out"
