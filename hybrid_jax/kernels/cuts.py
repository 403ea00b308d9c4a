"""Into what pieces operations cut their tokens: plain numbers, from which memory is planned too. No jax here."""

import json
from pathlib import Path
from typing import NamedTuple

CHUNK = 64  # tokens
BLOCKS = 8  # at most, of a row
_LOGIT_BYTES = 2**31  # of one chunk of the loss, fp32
_LONG_ROW = 2048
_SMALLEST_BLOCK = 128  # of attention: shorter ones leave a GPU's matrix units idle
_TABLES = Path(__file__).parent


class Cut(NamedTuple):
    """How a row is cut: `blocks` blocks of `chunks` chunks of `chunk` tokens, together at least its length."""

    blocks: int
    chunks: int
    chunk: int

    @property
    def tokens(self) -> int:
        """Of a block."""
        return self.chunks * self.chunk


def chunk_of(length: int, largest: int) -> int:
    """Tokens of a delta rule's chunk in a row of `length` tokens: 16, 32 or 64, at most `largest`."""
    return next(size for size in (16, 32, 64) if size >= min(length, largest))


def blocks_of(length: int, chunk: int) -> Cut:
    """At most BLOCKS blocks of chunks of `chunk` tokens."""
    total = -(-length // chunk)
    chunks = -(-total // BLOCKS)
    return Cut(-(-total // chunks), chunks, chunk)


def block_sizes(T: int) -> tuple[int, int]:
    """Tokens in a query block and in a key block of attention; one is a multiple of the other.

    Few large blocks are fastest on a GPU, as each pair reads and writes the accumulators. Where T is long,
    the scores of such a pair would take more memory than the inputs.
    """
    if T <= 2 * _SMALLEST_BLOCK:
        return T, T
    block = _SMALLEST_BLOCK
    while block * (4 if T <= _LONG_ROW else 8) < T:
        block *= 2
    return block, block if T <= _LONG_ROW else 256


def chunk_tokens(tokens: int, vocab_size: int, wanted: int = 0) -> int:
    """Tokens of a chunk of the loss: `wanted`, or a power of two with at most 2 GiB of logits and at least four
    chunks."""
    if wanted:
        return min(wanted, tokens)
    chunk = 1
    while 2 * chunk * vocab_size * 4 <= _LOGIT_BYTES and 2 * chunk <= tokens // 4:
        chunk *= 2
    return chunk


def triton_class(op: str, K: int, bytes_: int) -> str:
    """The row of the tile tables of `op`, gdn or kda, for key dim K and inputs of 2 or 4 bytes."""
    width = max({"gdn": 64, "kda": 32}[op], 1 << (K - 1).bit_length())
    return f"k{width}" + ("_fp32" if bytes_ == 4 else "")


def triton_chunk(op: str, arch: str, K: int, bytes_: int, length: int) -> int:
    """Tokens of a chunk of the Triton kernels of `op` on an architecture such as "gfx942" (see launch.tiles)."""
    path = _TABLES / op / "tiles" / f"{arch}.json"
    table = json.loads(path.read_text())
    return chunk_of(length, table[triton_class(op, K, bytes_)]["prepare"]["constants"]["C"])
