"""hybrid_jax.data.prepare with parts so small that a little text makes many; kills itself where it is told."""

import sys

from hybrid_jax.data import prepare
from tests.chaos import process

process.kill_as_asked("command" if __name__ == "__main__" else "worker")
prepare.PART_BYTES = 2**15

if __name__ == "__main__":
    sys.exit(prepare.main(sys.argv[1:]))
