"""What this machine has, and what of torch_witcert it can run. Works without torch, transformers, torchao, Triton or a GPU."""

from __future__ import annotations

import platform
from importlib import metadata

#: Distributions that matter here, and the oldest version that `convert` accepts (None: any).
REQUIREMENTS = {
    "torch-witcert": None,
    "torch": (2, 11),
    "transformers": (5, 17),
    "torchao": None,
    "triton": (3, 6),
    "einops": None,
    "accelerate": None,
    "gguf": None,
}


def version_of(distribution: str) -> str | None:
    """Installed version of a distribution, or None. Reads its metadata and imports nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def _too_old(distribution: str) -> str | None:
    """Why `distribution` cannot be used, or None."""
    version, oldest = version_of(distribution), REQUIREMENTS[distribution]
    if version is None:
        return f"{distribution} is not installed"
    if oldest is not None and release(version) < oldest:
        return f"{distribution} {version} is older than {'.'.join(map(str, oldest))}"
    return None


def describe_devices() -> list[str]:
    """One line for each CUDA device, or one line that says why there is none."""
    try:
        import torch
    except ImportError as error:
        return [f"torch cannot be imported: {error}"]
    if not torch.cuda.is_available():
        return [f"no CUDA device that torch {torch.__version__} can use (built for CUDA: {torch.version.cuda or 'no'})"]
    lines = []
    for index in range(torch.cuda.device_count()):
        try:
            properties = torch.cuda.get_device_properties(index)
        except Exception as error:  # noqa: BLE001  setting up CUDA passes on whatever it meets
            return [f"CUDA cannot be used: {str(error).splitlines()[0]}"]
        lines.append(
            f"cuda:{index} {properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        )
    return lines


def _cuda_available() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def support() -> dict[str, str]:
    """What runs here: feature -> "yes", or "no: reason"."""

    def answer(*obstacles: str | None) -> str:
        reasons = [obstacle for obstacle in obstacles if obstacle]
        return f"no: {'; '.join(reasons)}" if reasons else "yes"

    torch_, transformers = _too_old("torch"), _too_old("transformers")
    kernels = None if _cuda_available() else "no CUDA device"
    return {
        "operators on the CPU (reference)": answer(torch_),
        "operators on the GPU (Triton kernels)": answer(torch_, _too_old("triton"), kernels),
        "convert() and generate()": answer(torch_, transformers),
        "torchao.quantization.quantize_()": answer(torch_, transformers, _too_old("torchao")),
        "SmolLM2 from a GGUF file": answer(torch_, transformers, _too_old("gguf"), _too_old("accelerate")),
    }


def environment_report() -> str:
    """The report that `python -m torch_witcert env` prints; paste it into a bug report."""
    lines = [f"Python {platform.python_version()} on {platform.platform()}"]
    lines += [f"{name} {version_of(name) or 'not installed'}" for name in REQUIREMENTS]
    lines += ["", "Devices", *(f"  {line}" for line in describe_devices()), "", "Supported here"]
    lines += [f"  {feature}: {verdict}" for feature, verdict in support().items()]
    return "\n".join(lines)
