"""The rows that each process reads make the same global batch, whatever their number and whatever the source."""

import dataclasses

import numpy as np
import pytest

from hybrid_jax import data, feed
from hybrid_jax.config import DataConfig
from hybrid_jax.data import shuffle
from hybrid_jax.data.store import StoreWriter
from tests.data.test_records import masked_store

ROWS, LENGTH, DEVICES = 16, 16, 8
KEYS = ("tokens", "targets", "segment_ids", "positions")


@dataclasses.dataclass(frozen=True)
class Share:
    """What NamedSharding says to one of `processes` of [A, B, T] with B split over 8 devices."""

    process: int
    processes: int

    def addressable_devices_indices_map(self, shape):
        each, mine = shape[1] // DEVICES, DEVICES // self.processes
        devices = range(self.process * mine, (self.process + 1) * mine)
        return {d: (slice(None), slice(d * each, (d + 1) * each), slice(None)) for d in devices}


def global_batch(dataset, step, processes, accumulation):
    """[A * B, T] of a step, each process having read its own rows."""
    shape = (accumulation, ROWS // accumulation, LENGTH)
    whole = {name: np.full(shape, -7, np.int32) for name in KEYS}
    for process in range(processes):
        placement = feed.Placement(shape, Share(process, processes))
        batch = dataset.batch(step, placement.rows, placement.global_batch_size)
        columns = sorted({row % shape[1] for row in placement.rows})
        assert len(placement.rows) == ROWS // processes
        for name in KEYS:
            assert (whole[name][:, columns] == -7).all()  # a row is read by one process
            whole[name][:, columns] = batch[name].reshape(accumulation, len(columns), LENGTH)
    return {name: array.reshape(ROWS, LENGTH) for name, array in whole.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for name, documents in (("large", 150), ("small", 12)):
        lengths = rng.integers(0, 40, documents)
        with StoreWriter(folder / name, vocab_size=300) as writer:
            writer.extend(rng.integers(0, 300, lengths.sum()), lengths)
    masked_store(folder / "masked")
    (folder / "text").mkdir()
    for number in range(30):
        (folder / "text" / f"{number}.txt").write_bytes(bytes(rng.integers(97, 122, number * 7 + 5).tolist()))
    return folder


SOURCES = {
    "synthetic": dict(source="synthetic"),
    "files": dict(source="files", path="text"),
    "store": dict(source="store", path="small"),
    "masked": dict(source="store", path="masked"),
    "mixture": dict(source="store", path="large:0.5,small:0.3,masked:0.2"),
}


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("table", [2**20, 0])
@pytest.mark.parametrize("source", SOURCES)
def test_any_number_of_processes_and_any_restart_see_the_same_batches(folder, source, isolate, table, monkeypatch):
    monkeypatch.setattr(shuffle, "TABLE", table)  # with 0, stores of this size are shuffled as large ones are
    settings = dict(SOURCES[source])
    if path := settings.get("path"):
        settings["path"] = ",".join(str(folder / part) for part in path.split(","))
    config = DataConfig(isolate_documents=isolate, **settings)

    def fresh():
        return data.open(config, sequence_length=LENGTH, vocab_size=70_000, seed=3)

    straight = fresh()
    steps = 30
    expected = [straight.batch(step, range(ROWS), ROWS) for step in range(steps)]
    if source != "synthetic":
        assert source == "mixture" or steps * ROWS > 2 * straight.num_windows  # epochs
    # Each of these runs begins where the one before was ended, on another number of processes.
    for begin, processes, accumulation in ((0, 8, 1), (7, 2, 2), (11, 1, 1), (12, 4, 2), (20, 8, 2), (29, 1, 16 // 8)):
        dataset = fresh()
        for step in range(begin, min(begin + 9, steps)):
            got = global_batch(dataset, step, processes, accumulation)
            for name in KEYS:
                np.testing.assert_array_equal(got[name], expected[step][name])
