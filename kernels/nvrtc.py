"""Compile CUDA C++ when it is needed (NVRTC, through NVIDIA's cuda-bindings) and launch it.

No compiler on the user's machine: NVRTC is a library that torch's CUDA builds bring along. Machine
code is kept in `$XDG_CACHE_HOME/speculative-drafting` (by default `~/.cache/…`), named by a hash
over the source, the options and NVRTC's version, and written atomically.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from artifacts import ArtifactError, write_atomic


def cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "speculative-drafting"


def bindings() -> tuple[Any, Any]:
    """(driver, nvrtc) of cuda-bindings; ArtifactError where they are missing."""
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise ArtifactError(
            f"cuda-bindings can't be imported ({error}); install requirements.txt on a GPU machine"
        ) from None
    return driver, nvrtc


def checked(result: tuple, what: str) -> Any:
    """The values of a call of cuda-bindings; ArtifactError where it failed."""
    status, *values = result
    if int(status) != 0:
        raise ArtifactError(f"{what} failed: {status.name if hasattr(status, 'name') else status}")
    return values[0] if len(values) == 1 else values


def architecture(device: torch.device) -> str:
    """sm_90a for a Hopper GPU: its own instructions need the `a`."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def compile_source(source: Path, defines: dict[str, object], arch: str) -> bytes:
    """A file's machine code for `arch`, from the cache or fresh.

    Raises ArtifactError with the compiler's log where it does not compile.
    """
    _, nvrtc = bindings()
    text = source.read_bytes()
    options = [f"--gpu-architecture={arch}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    version = checked(nvrtc.nvrtcVersion(), "nvrtcVersion")
    key = hashlib.blake2b(
        repr((text, options, tuple(version))).encode(), digest_size=16
    ).hexdigest()
    path = cache_directory() / f"{source.stem}-{key}.cubin"
    if path.is_file():
        return path.read_bytes()
    program = checked(
        nvrtc.nvrtcCreateProgram(text, source.name.encode(), 0, [], []), "nvrtcCreateProgram"
    )
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if int(status) != 0:
            log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program), "the log's size"))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise ArtifactError(f"{source} does not compile for {arch}:\n{bytes(log).decode()}")
        code = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize"))
        checked(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    write_atomic(path, bytes(code))
    return bytes(code)


class Module:
    """Loaded machine code on the current device."""

    def __init__(self, code: bytes):
        self.driver, _ = bindings()
        torch.cuda.current_stream().synchronize()  # torch's context is the current one from here on
        self._code = code
        self._module = checked(self.driver.cuModuleLoadData(code), "cuModuleLoadData")

    def kernel(self, name: str, shared_bytes: int = 0) -> Kernel:
        """A kernel by name; shared_bytes: of dynamic shared memory."""
        function = checked(
            self.driver.cuModuleGetFunction(self._module, name.encode()), f"kernel {name}"
        )
        if shared_bytes:
            attribute = self.driver.CUfunction_attribute
            limit = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(
                self.driver.cuFuncSetAttribute(function, limit, shared_bytes),
                f"{shared_bytes} bytes of shared memory for {name}",
            )
        return Kernel(self, function, shared_bytes)


class Kernel:
    def __init__(self, module: Module, function: Any, shared_bytes: int):
        self.module, self.function, self.shared_bytes = module, function, shared_bytes

    def launch(
        self, blocks: int, threads: int, arguments: Sequence[Any], together: bool = False
    ) -> None:
        """On torch's current stream. arguments: ctypes values; together: all blocks at once, or it
        is an error (a cooperative launch)."""
        driver = self.module.driver
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        stream = torch.cuda.current_stream().cuda_stream
        shape = (self.function, blocks, 1, 1, threads, 1, 1, self.shared_bytes, stream)
        pointer = ctypes.addressof(addresses)
        if together:
            checked(driver.cuLaunchCooperativeKernel(*shape, pointer), "a cooperative launch")
        else:
            checked(driver.cuLaunchKernel(*shape, pointer, 0), "a launch")
