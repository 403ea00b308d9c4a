"""Timing of the GPU kernels: `python -m hybrid_jax.bench`.

There are no GPU kernels yet, so there is nothing to time: every op runs its pure JAX form.
"""


def main() -> None:
    print("bench: no kernels yet, nothing to time")


if __name__ == "__main__":
    main()
