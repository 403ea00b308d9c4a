"""An endless source that needs no text: a random Markov chain whose best possible loss is known.

B rows, T window length, A ids in use, S successors of an id. A document ends after each token with
probability END; else the next token is one of the S successors of the last one, with fixed probabilities.
"""

from collections.abc import Sequence

import numpy as np

from hybrid_jax.data.interface import check_rows, fingerprint
from hybrid_jax.data.packing import finish
from hybrid_jax.data.tokenizer import IdTokenizer
from hybrid_jax.errors import UserError

END = 1 / 128
SUCCESSORS = (0.6, 0.2, 0.15, 0.05)
MAX_ALPHABET = 256  # few enough that the chain is learnt in some 100k tokens, whatever the model's vocabulary
_TABLE, _TRAINING, _VALIDATION = 1, 2, 3  # separate random streams


class SyntheticDataset:
    """A `Dataset` whose samples are a pure function of (seed, split, window); both splits share the chain."""

    num_tokens = 0
    num_windows = 0

    def __init__(self, *, vocab_size: int, sequence_length: int, seed: int, training: bool, isolate_documents: bool):
        if vocab_size <= len(SUCCESSORS):
            raise UserError(
                f"config.model.vocab_size: {vocab_size}: the synthetic source needs {len(SUCCESSORS) + 1} ids"
            )
        self.tokenizer = IdTokenizer(vocab_size=vocab_size, end_of_document=vocab_size - 1)
        self.isolate_documents = isolate_documents
        self._length = sequence_length
        self._seed = seed % 2**64
        self._split = _TRAINING if training else _VALIDATION
        self._alphabet = min(vocab_size - 1, MAX_ALPHABET)
        raw_AA = self._random(_TABLE, 0, (self._alphabet, self._alphabet))
        self.successors_AS = np.argsort(raw_AA, axis=1, kind="stable")[:, : len(SUCCESSORS)].astype(np.int32)
        p = np.array([END] + [(1 - END) * s for s in SUCCESSORS])
        self.best_loss = float(-(p * np.log(p)).sum())
        """Entropy of a target after the token before it, nats: the best loss on isolated documents."""
        self.description = (
            f"synthetic Markov chain over {self._alphabet} ids, endless, "
            f"best possible loss {self.best_loss:.4f} nats/token"
        )
        self.identity = {
            "data.source": "synthetic",
            "model.vocab_size": str(vocab_size),
            "the order of the data (train.seed)": f"synthetic 1, seed {self._seed}" + ", validation" * (not training),
            "train.sequence_length": str(sequence_length),
            "data.isolate_documents": str(isolate_documents),
        }

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.identity)

    def batch(self, step: int, rows: Sequence[int], global_batch_size: int) -> dict[str, np.ndarray]:
        """See `Dataset.batch`."""
        windows = check_rows(step, rows, global_batch_size).tolist()
        length = self._length + 1
        uniform_BT2 = np.empty((len(windows), length, 2))
        for row, window in enumerate(windows):
            uniform_BT2[row] = self._random(self._split, window, (length, 2))
        choice_BT = np.searchsorted(np.cumsum(SUCCESSORS)[:-1], (uniform_BT2[:, :, 0] - END) / (1 - END), "right")
        end_BT = uniform_BT2[:, :, 0] < END
        start_BT = (uniform_BT2[:, :, 1] * self._alphabet).astype(np.int32)
        end_of_document = self.tokenizer.end_of_document
        tokens_BT1 = np.empty((len(windows), length), np.int32)
        segments_BT1 = np.empty_like(tokens_BT1)
        last, segment = np.full(len(windows), end_of_document), np.zeros(len(windows), np.int32)
        for t in range(length):
            opens = last == end_of_document
            segment = segment + opens
            follows = self.successors_AS[np.where(opens, 0, last), choice_BT[:, t]]
            last = np.where(opens, start_BT[:, t], np.where(end_BT[:, t], end_of_document, follows))
            tokens_BT1[:, t], segments_BT1[:, t] = last, segment
        return finish(tokens_BT1, segments_BT1, self.isolate_documents)

    def _random(self, stream: int, index: int, shape: tuple[int, ...]) -> np.ndarray:
        """Uniform in [0, 1), float64."""
        raw = np.random.Philox(np.random.SeedSequence([self._seed, stream, index])).random_raw(int(np.prod(shape)))
        return ((raw >> np.uint64(11)) * 2.0**-53).reshape(shape)
