"""Instruction sets that kernels are compiled for: this machine's, or one that object code is shipped for."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from dataclasses import dataclass

import llvmlite.binding
from numba import config

# Of bf16 dot products: `vdpbf16ps` and what the kernels use around it.
BF16_DOT_FEATURES = ("avx512f", "avx512vl", "avx512dq", "avx512bf16")
# Of int16 dot products, `vpdpwssd`; every CPU with AVX-512-BF16 has them.
INT16_DOT_FEATURES = ("avx512f", "avx512vnni")
# Of tiles: no CPU has one without the others. Object code for AVX-512-BF16 has them, too: it runs them
# only where the machine does.
TILE_FEATURES = ("amx-tile", "amx-int8", "amx-bf16")
_V3_FEATURES = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sse4.2")
_V4_FEATURES = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


@dataclass(frozen=True, slots=True)
class Target:
    """An instruction set that wheels carry object code for."""

    name: str
    cpu: str  # NUMBA_CPU_NAME
    features: str  # NUMBA_CPU_FEATURES
    required: tuple[str, ...]  # LLVM's names of what a machine must have

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables under which Numba and `simd` compile for this target."""
        return {"NUMBA_CPU_NAME": self.cpu, "NUMBA_CPU_FEATURES": self.features}


# From the best to the least. The features repeat what LLVM's name of the CPU implies where `simd`
# asks for them by name.
TARGETS = (
    Target(
        "avx512-bf16",
        "x86-64-v4",
        ",".join(f"+{feature}" for feature in (*BF16_DOT_FEATURES, "avx512vnni", *TILE_FEATURES)),
        (*_V3_FEATURES, *_V4_FEATURES, "avx512bf16", "avx512vnni"),
    ),
    Target("avx512", "x86-64-v4", "+avx512f", (*_V3_FEATURES, *_V4_FEATURES)),
    Target("avx2", "x86-64-v3", "+avx2", _V3_FEATURES),
)
IS_X86 = platform.machine() in ("x86_64", "AMD64")
IS_ARM64 = platform.machine() in ("aarch64", "arm64")
# of <asm/prctl.h> and <asm/unistd_64.h>
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
_HOST_FEATURES = llvmlite.binding.get_host_cpu_features()


def compiled_target() -> Target | None:
    """The target that Numba is configured to compile for instead of this machine, if it is ours."""
    setting = config.CPU_NAME, config.CPU_FEATURES
    return next((target for target in TARGETS if (target.cpu, target.features) == setting), None)


def shipped_target() -> Target | None:
    """The target whose object code this process can use: as Numba is configured, else the best."""
    if not IS_X86:
        return None
    if config.CPU_NAME in (None, "") and config.CPU_FEATURES is None:
        return next((target for target in TARGETS if _runs(target)), None)
    target = compiled_target()
    return target if target is not None and _runs(target) else None


def _runs(target: Target) -> bool:
    return all(_HOST_FEATURES.get(feature) for feature in target.required)


def has_avx512() -> bool:
    """Whether kernels are compiled for vectors of 512 bits."""
    target = compiled_target()
    if target is not None:
        return "avx512f" in target.required
    return bool(_HOST_FEATURES.get("avx512f"))


def has_bf16_dot() -> bool:
    """Whether kernels may use bf16 dot products, as Numba is configured to compile."""
    return _may_use(BF16_DOT_FEATURES)


@functools.cache
def has_fast_bf16_dot() -> bool:
    """Whether bf16 dot products are faster than FMA on this machine.

    AMD's compute twice as many products a cycle as FMA, Intel's of the generation with AMX half as
    many: those matter where the system keeps tiles from a process.
    """
    has_amx_generation = bool(_HOST_FEATURES.get("avx512fp16"))
    is_amd = llvmlite.binding.get_host_cpu_name().startswith("znver")
    return has_bf16_dot() and (is_amd or not has_amx_generation)


def has_int16_dot() -> bool:
    """Whether kernels may use AVX-512's dot products of int16, as Numba is configured to compile."""
    return _may_use(INT16_DOT_FEATURES)


def has_integer_vectors() -> bool:
    """Whether kernels may use x86's products and look-ups of integers, of whole vectors."""
    return _may_use(("avx512f", "avx512bw") if has_avx512() else ("avx2",))


def has_half_conversion() -> bool:
    """Whether instructions convert float16; LLVM would call a function that a process may not have."""
    return not IS_X86 or _may_use(("f16c",))


def compiles_tiles() -> bool:
    """Whether kernels are compiled with tiles of int8 and of bfloat16."""
    target = compiled_target()
    if target is not None:
        return "avx512bf16" in target.required
    return _may_use((*BF16_DOT_FEATURES, *TILE_FEATURES))


@functools.cache
def has_tiles() -> bool:
    """Whether kernels may use tiles in this process: asks the operating system for them, once."""
    has_instructions = all(_HOST_FEATURES.get(feature) for feature in TILE_FEATURES)
    return compiles_tiles() and has_instructions and _tile_state_is_permitted()


def _tile_state_is_permitted() -> bool:
    """Ask Linux for tile state, for all threads of the process; it may be too old, or refuse."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def _may_use(features: tuple[str, ...]) -> bool:
    target = compiled_target()
    if target is not None:
        return all(feature in target.required for feature in features)
    overrides = config.CPU_FEATURES
    if config.CPU_NAME not in (None, "", llvmlite.binding.get_host_cpu_name()):
        return False
    if overrides is not None:
        # the last mention of a feature counts
        flags = {feature[1:]: feature[:1] for feature in overrides.split(",")}
        if not all(flags.get(feature) == "+" for feature in features):
            return False
    return all(_HOST_FEATURES.get(feature) for feature in features)
