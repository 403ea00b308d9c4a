"""Batches made ahead of the step that needs them, by one thread."""

import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from hybrid_jax.data.interface import Batches

_POLL_SECONDS = 0.1


class prefetch(Iterator[dict[str, np.ndarray]]):
    """Iterates over `dataset.batch(step, rows, global_batch_size)` for step = start_step, start_step + 1, ...

    At most `depth` batches wait. An exception of the dataset is raised by the `next` that would have returned
    its batch. `close`, leaving the `with` block, dropping the iterator or the end of the program stop the
    thread.
    """

    def __init__(self, dataset: Batches, start_step: int, rows: Sequence[int], global_batch_size: int, depth: int = 2):
        if depth < 1:
            raise ValueError(f"depth {depth}: at least 1")
        self._ready: queue.Queue[dict[str, np.ndarray] | BaseException] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_produce,  # no reference to self: a dropped iterator can be collected
            args=(dataset, start_step, list(rows), global_batch_size, self._ready, self._stop),
            name="hybrid_jax-prefetch",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, _end, self._thread, self._ready, self._stop)
        self._thread.start()

    def __next__(self) -> dict[str, np.ndarray]:
        if not self._finalizer.alive:
            raise StopIteration
        while True:
            alive = self._thread.is_alive()  # asked before looking: its last item may arrive in between
            try:
                item = self._ready.get(timeout=_POLL_SECONDS)
                break
            except queue.Empty:
                if not alive:
                    raise RuntimeError("the prefetch thread is gone") from None
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def close(self) -> None:
        """Stops the thread and waits for it; after that the iterator is exhausted. May be called again."""
        self._finalizer()

    def __enter__(self) -> "prefetch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _produce(
    dataset: Batches,
    step: int,
    rows: list[int],
    global_batch_size: int,
    ready: "queue.Queue[dict[str, np.ndarray] | BaseException]",
    stop: threading.Event,
) -> None:
    while not stop.is_set():
        item: dict[str, np.ndarray] | BaseException
        try:
            item = dataset.batch(step, rows, global_batch_size)
        except BaseException as error:
            item = error
        while not stop.is_set():
            try:
                ready.put(item, timeout=_POLL_SECONDS)
                break
            except queue.Full:
                pass
        if isinstance(item, BaseException):
            return
        step += 1


def _end(thread: threading.Thread, ready: "queue.Queue[Any]", stop: threading.Event) -> None:
    stop.set()
    while not ready.empty():  # wakes a producer that waits for room
        try:
            ready.get_nowait()
        except queue.Empty:
            break
    if thread is not threading.current_thread():
        thread.join()
