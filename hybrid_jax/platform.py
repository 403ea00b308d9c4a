"""Which accelerator a run uses, and the XLA and driver environment it wants, settled before jax is imported.

XLA reads XLA_FLAGS once, at jax's import, and aborts the process on a flag it does not know, so the table
below holds only flags that jax 0.10 to 0.12 accept on every platform. Whatever the user has set wins: a
variable that exists is left alone, and of XLA_FLAGS only flags that are not there yet are added.
"""

import dataclasses
import importlib.util
import mmap
import os
import pkgutil
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from hybrid_jax.errors import UserError

REQUESTS = ("auto", "cpu", "gpu", "cuda", "rocm")
_TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
_DRI = Path("/dev/dri")
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
# Each one limits what a process sees, within what the ones before it leave.
_VISIBLE = {
    "rocm": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "cuda": ("CUDA_VISIBLE_DEVICES",),
}
_ROCM_VERSION = Path("/opt/rocm/.info/version")
_FLAG_OF_ANY_XLA = b"xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True)
class Setting:
    """An XLA flag (its name starts with --) or an environment variable, for one platform, and why."""

    name: str
    value: str
    platform: str
    reason: str
    architectures: tuple[str, ...] = ()  # empty = all
    several: bool = False  # only where several processes make the run


_COMBINED = f"{256 * 2**20}"  # bytes


def _hiding(platform: str) -> Setting:
    reason = "overlaps collectives with compute"
    return Setting("--xla_gpu_enable_latency_hiding_scheduler", "true", platform, reason)


SETTINGS = (
    Setting(
        "--xla_cpu_experimental_ynn_fusion_type",
        "",
        "cpu",
        "its library fusions crash or give garbage on arrays of high rank (seen with jax 0.10.2 and 0.11.2), "
        "and leave bf16 weight gradients to plain loops (0.11.2: 11 times slower)",
    ),
    Setting("--xla_gpu_enable_command_buffer", "", "rocm", "HIP graphs segfault (openxla/xla#46952)"),
    # Collectives are asynchronous by default. XLA joins up to 30 MB of them, which of layers of some billion parameters
    # is one matrix at a time.
    _hiding("rocm"),
    Setting("--xla_gpu_enable_pipelined_all_gather", "true", "rocm", "fetches the next layer's weights meanwhile"),
    Setting("--xla_gpu_all_gather_combine_threshold_bytes", _COMBINED, "rocm", "a sublayer's weights in one gather"),
    Setting("--xla_gpu_reduce_scatter_combine_threshold_bytes", _COMBINED, "rocm", "a sublayer's gradients in one sum"),
    Setting("--xla_gpu_all_reduce_combine_threshold_bytes", _COMBINED, "rocm", "the same, of copies"),
    Setting("--xla_gpu_enable_triton_gemm", "false", "rocm", "matmuls by hipBLASLt, as AMD's training images do"),
    Setting("--xla_gpu_enable_cublaslt", "true", "rocm", "means hipBLASLt there"),
    Setting("--xla_gpu_autotune_level", "4", "rocm", "some images carry 0, which changes results (ROCm/jax#467)"),
    Setting("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9", "rocm", "jax takes 0.75; RCCL and hipBLASLt need the rest"),
    Setting("GPU_MAX_HW_QUEUES", "2", "rocm", "AMD's setting for compute beside collectives"),
    Setting("HIP_FORCE_DEV_KERNARG", "1", "rocm", "kernel arguments in device memory: shorter launches"),
    Setting("HSA_NO_SCRATCH_RECLAIM", "1", "rocm", "no stall to give scratch memory back", ("gfx942",)),
    Setting("RCCL_WARP_SPEED_AUTO", "0", "rocm", "on by default there, and gave NaN losses", ("gfx950",)),
    Setting("NCCL_IB_GID_INDEX", "3", "rocm", "RoCE v2 addresses, as AMD's clusters route them", several=True),
    *(
        Setting(f"--xla_gpu_first_collective_call_{name}_timeout_seconds", seconds, platform, reason, several=True)
        for platform in ("rocm", "cuda")
        for name, seconds, reason in (
            ("warn_stuck", "120", "the others may still compile, which is no reason to warn"),
            ("terminate", "1800", "nor to abort, as after 40 s; a process that died is found by its heartbeat"),
        )
    ),
    _hiding("cuda"),
    Setting("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9", "cuda", "jax takes 0.75; NCCL and cuBLAS need the rest"),
)


def environment(
    platform: str, user: Mapping[str, str], architecture: str = "", several: bool = False
) -> dict[str, str]:
    """The variables to set for `platform` ("cpu", "cuda" or "rocm") on top of the environment `user`.

    several: whether several processes make the run.
    """
    new: dict[str, str] = {}
    flags: list[str] = []
    user_flags = user.get("XLA_FLAGS", "").strip()
    taken = {token.split("=")[0] for token in user_flags.split()}
    for setting in SETTINGS:
        if setting.platform != platform or (setting.several and not several):
            continue
        if setting.architectures and architecture not in setting.architectures:
            continue
        if not setting.name.startswith("--"):
            if setting.name not in user:
                new[setting.name] = setting.value
        elif setting.name not in taken:
            flags.append(f"{setting.name}={setting.value}")
    # XLA_FLAGS that does not start with a dash names a file of flags; there is no adding to that.
    if flags and (not user_flags or user_flags.startswith("-")):
        new["XLA_FLAGS"] = " ".join([*flags, *([user_flags] if user_flags else [])])
    return new


_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def memory_fraction(platform: str, user: Mapping[str, str]) -> float:
    """The share of a GPU's memory that XLA takes on `platform`, where the environment is `user`.

    Raises UserError for a value that is none.
    """
    text = user.get(_FRACTION) or next(s.value for s in SETTINGS if (s.name, s.platform) == (_FRACTION, platform))
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise UserError(f"{_FRACTION}: {text!r} is no share of a GPU's memory; use a number up to 1, such as 0.9")
    return share


def installed_plugins() -> set[str]:
    """Of {"cuda", "rocm"}, those that the installed jax has a plugin for (found without importing jax)."""
    spec = importlib.util.find_spec("jax_plugins")
    names = [module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)] if spec else []
    return {platform for platform in ("cuda", "rocm") if any(platform in name for name in names)}


def visible_hardware() -> set[str]:
    """Of {"cuda", "rocm"}, the vendors whose GPU driver is there."""
    signs = {"rocm": ("/dev/kfd",), "cuda": ("/dev/nvidiactl", "/proc/driver/nvidia/version")}
    return {platform for platform, paths in signs.items() if any(map(os.path.exists, paths))}


def _amd_gpus(topology: Path) -> list[tuple[int, int]]:
    """(gfx_target_version, number of its /dev/dri/renderD node) of each AMD GPU that the kernel driver lists."""
    found = []
    for properties in sorted(topology.glob("*/properties")):
        try:
            values = dict(re.findall(r"^(\w+) (\d+)$", properties.read_text(), re.MULTILINE))
        except OSError:
            continue
        if int(values.get("gfx_target_version", 0)):
            found.append((int(values["gfx_target_version"]), int(values.get("drm_render_minor", 0))))
    return found


def amd_architecture(topology: Path = _TOPOLOGY) -> str:
    """The first AMD GPU's architecture, such as "gfx942", by the kernel driver; "" if there is none."""
    for version, _ in _amd_gpus(topology):  # 90402 means 9.4.2; the last digit is hexadecimal in the name
        return f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}"
    return ""


def visible_gpus(
    platform: str,
    environment: Mapping[str, str],
    topology: Path = _TOPOLOGY,
    dri: Path = _DRI,
    nvidia: Path = _NVIDIA_GPUS,
) -> tuple[str, int]:
    """(the variables that limit which GPUs this process sees, how many those are); 0 on the CPU or if none is seen.

    By the driver's lists, as jax would open them. A container sees all GPUs in AMD's, but has the device files of its
    own alone.
    """
    if platform == "rocm":
        count = sum(not dri.is_dir() or (dri / f"renderD{minor}").exists() for _, minor in _amd_gpus(topology))
    else:
        count = len(list(nvidia.glob("*"))) if platform == "cuda" else 0
    limits, counts = [], [count] if count else []
    for name in _VISIBLE.get(platform, ()):
        if name in environment:
            named = [part for part in environment[name].split(",") if part.strip() not in ("", "-1", "NoDevFiles")]
            limits.append(f"{name}={environment[name]}")
            counts.append(len(named))
    return " ".join(limits), min(counts, default=0)


def nvidia_model(folder: Path = _NVIDIA_GPUS) -> str:
    """The first NVIDIA GPU's model, such as "NVIDIA H200", by the kernel driver; "" if there is none."""
    for information in sorted(folder.glob("*/information")):
        try:
            match = re.search(r"^Model:\s*(.+?)\s*$", information.read_text(), re.MULTILINE)
        except OSError:
            continue
        if match:
            return match[1]
    return ""


def rocm_version(file: Path = _ROCM_VERSION) -> str:
    """Of the installed ROCm libraries, such as "7.2.0-81"; "" if they do not say."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def xla_libraries() -> list[Path]:
    """The installed shared libraries that may hold an XLA: jaxlib's and its plugins', each with flags of its own."""
    specs = [importlib.util.find_spec(name) for name in ("jaxlib", "jax_plugins")]
    folders = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    return [path for folder in folders for path in folder.rglob("*.so") if path.stat().st_size > 2**20]


def knows(flag: str, libraries: Iterable[Path] | None = None) -> bool:
    """Whether every installed XLA takes a flag such as "--xla_gpu_autotune_level", found without loading one: an
    unknown flag aborts the process."""
    name, seen = flag.lstrip("-").encode(), False
    for path in xla_libraries() if libraries is None else libraries:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
            if library.find(_FLAG_OF_ANY_XLA) >= 0:
                seen = True
                if library.find(name) < 0:
                    return False
    return seen


def choose(request: str, plugins: Iterable[str], hardware: Iterable[str]) -> str:
    """The platform ("cpu", "cuda" or "rocm") for a request out of REQUESTS or a JAX_PLATFORMS value.

    Raises UserError if a GPU is asked for by name or as "gpu" and jax has no plugin for it.
    """
    request, plugins = request.split(",")[0].strip().lower(), set(plugins)
    if request not in REQUESTS:
        raise UserError(f"--platform: {request!r} is not one of {', '.join(REQUESTS)}")
    if request == "cpu":
        return "cpu"
    usable = [platform for platform in ("rocm", "cuda") if platform in plugins]
    present = [platform for platform in usable if platform in set(hardware)]
    if request == "auto":
        return present[0] if present else "cpu"
    wanted = [request] if request != "gpu" else (present or usable)
    if not wanted or wanted[0] not in plugins:
        extra = request if request != "gpu" else "rocm] or hybrid_jax[cuda"
        raise UserError(
            f"--platform: {request} asked for, but the installed jax is without a plugin for it; "
            f"install hybrid_jax[{extra}], or run with --platform=cpu"
        )
    return wanted[0]


# The CPU's compiler then keeps optimization barriers until it has allotted memory, as that of GPUs does; with jax 0.11
# it does anyway.
BARRIERS = "--xla_disable_hlo_passes=cse_barrier_expander"


def prepare(request: str, several: bool = False, virtual_devices: int = 0) -> str:
    """Sets this process's environment for a request ("" = JAX_PLATFORMS, else auto) and returns the platform.

    several: whether several processes make the run. virtual_devices: so many CPU devices, to compile for and not to run
    on (0: those that are there). To be called before jax is imported. Raises UserError as `choose` does.
    """
    if virtual_devices:
        request = "cpu"
        # The last of two flags of one name counts. What is not run need not be fast.
        flags = os.environ.get("XLA_FLAGS", "").strip()
        if flags and not flags.startswith("-"):
            raise UserError(f"--virtual_devices: XLA_FLAGS={flags} names a file of flags; unset it")
        own = f"--xla_force_host_platform_device_count={virtual_devices} --xla_backend_optimization_level=0 {BARRIERS}"
        os.environ["XLA_FLAGS"] = f"{flags} {own}".strip()
    asked = request or os.environ.get("JAX_PLATFORMS", "") or "auto"
    platform = choose(asked, installed_plugins(), visible_hardware())
    architecture = amd_architecture() if platform == "rocm" else ""
    if platform != "cpu":
        memory_fraction(platform, os.environ)
    os.environ.update(environment(platform, os.environ, architecture, several))
    if request and request != "auto":
        os.environ["JAX_PLATFORMS"] = platform
    return platform


def unused_gpu(platform: str, plugins: Iterable[str], hardware: Iterable[str]) -> str:
    """A warning if the run goes to the CPU although there is a GPU, as jax has no plugin for it; else ""."""
    missing = sorted(set(hardware) - set(plugins))
    if platform != "cpu" or not missing:
        return ""
    return (
        f"this machine has a {'ROCm' if missing[0] == 'rocm' else 'CUDA'} GPU, but the installed jax is for "
        f"the CPU only; install hybrid_jax[{missing[0]}] (--platform=cpu silences this)"
    )


def check_backend(platform: str) -> None:
    """Imports jax, starts its backend and raises UserError unless the devices are of `platform`."""
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--platform: jax finds no {platform} device: {reason}") from None
    if platform != "cpu" and devices[0].platform != "gpu":
        raise UserError(
            f"--platform: {platform} asked for, but jax sees only {devices[0].device_kind} devices; "
            "check the driver and the container's device access, or run with --platform=cpu"
        )
