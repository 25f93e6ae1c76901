"""`m3jit doctor`: what this installation is made of, what it can use, and what is missing or slow."""
from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import click

NAMES = ("numpy", "llvmlite", "gguf", "tokenizers", "jinja2", "xxhash", "click")
EXTRAS = {"numba": "backend numba: pip install 'm3jit[numba]'",
          "pyopencl": "OpenCL kernels: pip install 'm3jit[opencl]'",
          "cuda-core": "CUDA devices: pip install 'm3jit[cuda]'",
          "starlette": "m3jit serve: pip install 'm3jit[serve]'", "uvicorn": "m3jit serve: pip install 'm3jit[serve]'",
          "llguidance": "grammars and JSON schemas: pip install 'm3jit[grammar]'"}
Row = tuple[str, str]


@click.command()
def doctor() -> int:
    """Report versions, the CPU, threads, caches, devices and models, and what is missing or slow. Always exits 0."""
    advice: list[str] = []
    for title, part in (("versions", versions), ("processor", processor), ("cache", cache), ("OpenCL", opencl),
                        ("CUDA", cuda), ("models", models)):
        click.echo(title)
        try:
            for name, value in part(advice):
                click.echo(f"  {name.ljust(18)}{value}")
        except Exception as error:                     # a broken driver is what doctor is there to show
            click.echo(f"  failed: {type(error).__name__}: {error}")
            advice.append(f"{title}: {type(error).__name__}: {error}")
    click.echo("advice")
    click.echo("\n".join(f"  - {line}" for line in advice) or "  nothing is missing")
    return 0


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(advice: list[str]) -> Iterator[Row]:
    import m3jit
    yield "m3jit", f"{m3jit.__version__} in {Path(m3jit.__file__).parent}"
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform != "linux":
        advice.append(f"m3jit is tested on Linux; {platform.system()} may work and is untested")
    for name in NAMES:
        found = _version(name)
        yield name, found or "missing"
        if found is None:
            advice.append(f"{name} is missing: pip install {name}")
    import llvmlite.binding as llvm
    yield "LLVM", ".".join(map(str, llvm.llvm_version_info))
    for name, use in EXTRAS.items():
        found = _version(name)
        yield name, found or f"not installed ({use})"


def processor(advice: list[str]) -> Iterator[Row]:
    from m3jit.backends.cpu.target import CpuTarget, available_levels, host
    _, name, features = host()
    yield "name", f"{_cpu_model() or name} (LLVM: {name})"
    chosen = os.environ.get("M3JIT_CPU", "native")
    yield "level", f"{chosen} of {', '.join(available_levels())}"
    interesting = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vnni", "neon", "dotprod")
    yield "features", ", ".join(f for f in interesting if f in features) or "none of those the kernels look for"
    yield "vectors", f"{CpuTarget.for_level(chosen).vector_bits} bits"
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield "threads", f"{threads} may be used, the machine has {os.cpu_count()}"
    if platform.machine() in ("x86_64", "AMD64") and "avx2" not in features:
        advice.append("the CPU has no AVX2: everything runs, with narrow vectors")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    yield "load", f"{load:.1f}"
    if load > threads:
        advice.append(f"the machine is busy (load {load:.1f} on {threads} threads): timings will be poor")
    if hasattr(os, "sysconf"):
        yield "memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2 ** 30:.1f} GiB"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:                                    # not Linux: the name is left out
        pass
    return ""


def cache(advice: list[str]) -> Iterator[Row]:
    from m3jit.paths import cache_root
    root = cache_root()
    if root is None:
        yield "folder", "off (M3JIT_CACHE_DIR is empty)"
        advice.append("the cache is off: every run compiles and repacks anew; unset M3JIT_CACHE_DIR")
        return
    why = _not_writable(root)
    yield "folder", f"{root} ({'writable' if not why else why})"
    if why:
        advice.append(f"the cache cannot be written ({why}): every run compiles and repacks anew, and repacked weights "
                      "take memory; set M3JIT_CACHE_DIR to a folder you own")
    for name, what in (("cpu", "compiled code"), ("weights", "repacked weights"), ("tokenizers", "tokeniser tables"),
                       ("models", "models")):
        count, size = _folder_size(root / name)
        yield what, f"{count} files, {size / 1e6:.1f} MB"
    existing = next(p for p in (root, *root.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    yield "free space", f"{free / 1e9:.1f} GB"
    if free < 500e6:
        advice.append(f"{existing}: only {free / 1e6:.0f} MB are free; repacked weights need as much as the model")


def _not_writable(root: Path) -> str:
    """Why files cannot be made below a folder, or ""."""
    existing = next((p for p in (root, *root.parents) if p.exists()), root)
    if not existing.is_dir():
        return f"{existing} is not a folder"
    return "" if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is not writable"


def _folder_size(folder: Path) -> tuple[int, int]:
    count = size = 0
    for top, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.stat(os.path.join(top, name)).st_size
                count += 1
            except OSError:                            # removed meanwhile, by another process's trimming
                pass
    return count, size


def opencl(advice: list[str]) -> Iterator[Row]:
    if _version("pyopencl") is None:
        yield "devices", f"pyopencl is not installed ({EXTRAS['pyopencl']})"
        return
    from m3jit.backends.opencl.engine import compiler_refusal, device_refusal, devices
    found = devices()
    if not found:
        yield "devices", "none: no OpenCL driver (for the CPU: pip install 'pyopencl[pocl]', or the system's PoCL)"
    for device in found:
        why = device_refusal(device) or compiler_refusal(device)
        verdict = "usable" if why is None else f"refused: {why}"
        yield device.name.strip()[:17], f"{device.platform.name.strip()}: {verdict}"
        if why is not None:
            advice.append(f"OpenCL: {why}")


def cuda(advice: list[str]) -> Iterator[Row]:
    import ctypes.util
    library = ctypes.util.find_library("cuda")
    yield "driver", library or "none (libcuda is not in the linker's path)"
    yield "programs", "PTX is generated for inspection and not run by this version; nothing was tested on a GPU"
    ptxas = shutil.which("ptxas") or next((p for p in ("/usr/local/cuda/bin/ptxas",) if os.path.exists(p)), None)
    yield "ptxas", f"{ptxas} ({_ptxas_version(ptxas)})" if ptxas else "not found (only checks PTX; not needed to run)"


def _ptxas_version(path: str) -> str:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"does not run: {error}"
    return next((line.strip() for line in said.splitlines() if "release" in line), "unknown version")


def models(advice: list[str]) -> Iterator[Row]:
    from m3jit.models import store
    from m3jit.models.provider import DEFAULT_MODEL
    whole = DEFAULT_MODEL.is_file()
    yield "default", f"{DEFAULT_MODEL}" if whole else "missing: reinstall m3jit"
    if not whole:
        advice.append("the embedded default model is missing: reinstall m3jit")
    for row in store.list_models():
        yield row.source.name, str(row.path) if row.path else f"not obtained (m3jit model get {row.source.name})"
