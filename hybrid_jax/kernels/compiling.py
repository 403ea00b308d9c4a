"""One kernel compiled for an AMD GPU as jax-triton would compile it there, and many of them in worker processes.

Needs Triton, and neither a GPU nor ROCm. Results are kept in a folder, named by all that they depend on.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from hybrid_jax.errors import UserError

WAVE = 64


@dataclasses.dataclass(frozen=True)
class Job:
    """One compilation, in words that another process understands. `key` names its result in the cache."""

    op: str
    module: str
    kernel: str
    pointers: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int
    options: tuple[tuple[str, int], ...]
    arch: str
    key: str


@dataclasses.dataclass(frozen=True)
class Binary:
    """What a compiled kernel needs. vgpr and agpr are architectural and accumulation registers of a lane; scratch
    is in bytes a lane, lds in bytes a workgroup; slow_dots are dots that got no matrix instruction."""

    vgpr: int
    agpr: int
    vgpr_spills: int
    sgpr_spills: int
    scratch: int
    lds: int
    dots: int
    slow_dots: int
    mfma: int
    seconds: float


def as_job(op: str, launch: Any) -> Job:
    """The compilation that a recorded launch (kernels.launch.Launch) needs."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars

    function, tile = launch.kernel.fn, launch.tile
    fields = dict(
        op=op,
        module=function.__module__,
        kernel=function.__name__,
        pointers=launch.pointers,
        constants=launch.constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        options=tile.options,
        arch=launch.arch,
    )
    # cache_key: the source of the kernel, of the functions it calls and of the globals it reads.
    source = (launch.kernel.cache_key, Path(__file__).read_text(), triton.__version__)
    text = repr((source, sorted(fields.items()), sorted(get_cache_invalidating_env_vars().items())))
    return Job(**fields, key=hashlib.sha256(text.encode()).hexdigest())


def build(job: Job) -> Any:
    """Triton's compiled kernel, as jax-triton would build it on that GPU; needs neither the GPU nor ROCm."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hybrid_jax.kernels.launch import FP_FUSION

    kernel = getattr(importlib.import_module(job.module), job.kernel)
    signature = {name: f"*{kind}" for name, kind in zip(kernel.arg_names, job.pointers, strict=False)}
    signature |= {name: "constexpr" for name, _ in job.constants}
    # jax-triton takes every array to be aligned to 16 bytes, and makes no promise about its size.
    aligned_16 = {(i,): [["tt.divisibility", 16]] for i in range(len(job.pointers))}
    options = dict(num_warps=job.num_warps, num_stages=job.num_stages, num_ctas=1, debug=False)
    options |= {"enable_fp_fusion": FP_FUSION, **dict(job.options)}
    source = ASTSource(kernel, signature, dict(job.constants), aligned_16)
    return triton.compile(source, target=GPUTarget("hip", job.arch, WAVE), options=options)


def read(asm: Mapping[str, str], lds: int, seconds: float) -> Binary:
    """Reads a Binary from the compiler's outputs "ttgir" and "amdgcn". Raises ValueError if a field is not there."""

    def field(name: str) -> int:
        found = re.findall(rf"\.{name}:\s+(\d+)\s*$", asm["amdgcn"], re.MULTILINE)
        if len(found) != 1:
            raise ValueError(f"the assembly has {len(found)} fields .{name}")
        return int(found[0])

    dots = re.findall(r"= tt\.dot(?:_scaled)? .*-> tensor<[^#]*#(\w+)", asm["ttgir"])
    if len(dots) != asm["ttgir"].count(" tt.dot"):
        raise ValueError("the ttgir has dots of unknown layout")
    agpr = field("agpr_count")
    return Binary(
        vgpr=field("vgpr_count") - agpr,
        agpr=agpr,
        vgpr_spills=field("vgpr_spill_count"),
        sgpr_spills=field("sgpr_spill_count"),
        scratch=field("private_segment_fixed_size"),
        lds=lds,
        dots=len(dots),
        slow_dots=sum(not layout.startswith("mma") for layout in dots),
        mfma=len(re.findall(r"^\s+v_s?mfmac?_", asm["amdgcn"], re.MULTILINE)),
        seconds=seconds,
    )


def compile_all(
    jobs: Sequence[Job], workers: int, cache: Path | None
) -> Generator[tuple[Job, Binary | str, bool], None, None]:
    """(job, its binary or why there is none, whether it came from the cache) in the order they are done.

    `cache` is a folder that exists. Closing the iterator, or an exception in it, stops the compilers.
    """
    todo = []
    for job in jobs:
        if cache and (kept := _kept(cache / f"{job.key}.json")):
            yield job, kept, True
        else:
            todo.append(job)
    with contextlib.closing(_in_processes(todo, workers)) as done:
        for job, result in done:
            if cache and isinstance(result, Binary):
                _keep(cache / f"{job.key}.json", result)
            yield job, result, False


def _kept(path: Path) -> Binary | None:
    """What the cache has; None for nothing and for what no Binary can be read from."""
    try:
        fields = json.loads(path.read_text())
        found = Binary(**fields)
    except (OSError, ValueError, TypeError):
        return None
    counts = {name: value for name, value in fields.items() if name != "seconds"}
    good = all(type(x) is int and x >= 0 for x in counts.values()) and type(found.seconds) in (int, float)
    return found if good else None


def _keep(path: Path, result: Binary) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_text(json.dumps(dataclasses.asdict(result)))
        part.replace(path)
    except OSError as error:
        raise _bad_cache(path.parent, error) from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def make_cache(folder: Path) -> None:
    """Raises UserError if results cannot be kept in `folder`, which it makes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _bad_cache(folder, error) from None


def _bad_cache(folder: Path, error: OSError) -> UserError:
    why = "not a folder" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror or str(error)
    return UserError(f"--cache {folder}: results cannot be kept there ({why}); name another folder or use --no-cache")


def _in_processes(jobs: list[Job], workers: int) -> Generator[tuple[Job, Binary | str], None, None]:
    left = dict.fromkeys(jobs)
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.closing(_pool(list(left), workers, folder)) as done:
            for job, result in done:
                if result is not None:
                    del left[job]
                    yield job, result
        # A compiler that crashes takes its pool with it: each of the rest gets a process of its own.
        for job in left:
            with contextlib.closing(_pool([job], 1, folder)) as done:
                for _, result in done:
                    yield job, result or "the compiler crashed"


def _pool(jobs: list[Job], workers: int, folder: str) -> Generator[tuple[Job, Binary | str | None], None, None]:
    if not jobs:
        return
    others = multiprocessing.active_children()
    spawn = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, spawn, _start, (folder,))
    try:
        # Ctrl-C reaches every process of the terminal: the workers start with it held back, this process decides.
        with _no_interrupt():
            futures = {pool.submit(_attempt, job): job for job in jobs}
        for future in concurrent.futures.as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:
                yield futures[future], None
    except BaseException:
        with _no_interrupt():
            pool.shutdown(wait=False, cancel_futures=True)
            _end([process for process in multiprocessing.active_children() if process not in others])
        raise
    pool.shutdown()


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + 1
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Holds Ctrl-C back until it ends; processes that start within never see it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TRITON_CACHE_DIR"] = folder  # the results here are all that is kept
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _attempt(job: Job) -> Binary | str:
    start = time.perf_counter()
    try:
        compiled = build(job)
        return read(compiled.asm, compiled.metadata.shared, time.perf_counter() - start)
    except Exception as error:
        return one_line(error)


def one_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(getattr(error, "error_message", None) or error).split())
    text = text if len(text) < 400 else text[:200] + " ... " + text[-200:]
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
