"""What is compiled: rows of instances.def that the environment selects, and what is next to attention."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include" / "flash_cute"
DEFAULT_ARCHITECTURES = "80+PTX;90;90a"


# A translation unit holds what is compiled of a pass, family and head dim: most of what a compiler does for
# one kernel, parsing and instantiating CuTe, serves the others. These are cut by more axes for their memory.
CUT = {("backward", "sm80", "256"): ("element",)}


@dataclass(frozen=True)
class Instance:
    """A row of instances.def for one element type. direction: its pass, forward or backward."""

    direction: str
    family: str
    element: str
    head_dim: str
    variant: str
    head_dim_v: str  # of v and out
    kinds_of_ptx = 1

    @property
    def is_pair(self) -> bool:
        return self.head_dim_v != self.head_dim

    @property
    def name(self) -> str:
        variant = "" if self.variant == "plain" else f"_{self.variant}"
        width = f"x{self.head_dim_v}" if self.is_pair else ""
        return f"{self.direction}_{self.family}_{self.element}_{self.head_dim}{width}{variant}"

    @property
    def unit(self) -> str:
        """The translation unit that it is compiled in."""
        axes = self.direction, self.family, self.head_dim
        return "_".join([*axes, *(getattr(self, axis) for axis in CUT.get(axes, ()))])

    @property
    def definition(self) -> str:
        axes = self.direction, self.family, self.element, self.head_dim, self.variant, self.head_dim_v
        return f"FLASH_CUTE_COMPILED({', '.join(axes)})\n"

    @property
    def register_flags(self) -> str:
        """The sm80 family needs all of its 255 registers. Whether ptxas spills fewer by default or by its
        highest level was looked up."""
        by_default = self.family == "sm90" or (self.direction == "forward" and int(self.head_dim) < 128)
        return "" if by_default else " -Xptxas=--register-usage-level=10"

    @property
    def header(self) -> str:
        return f"flash_cute/{self.direction}/{self.family}/launch.cuh"

    @property
    def instantiated(self) -> str:
        axes = f"Family::{self.family}, ElementType::{self.element}, {self.head_dim}, Variant::{self.variant}"
        axes += f", {self.head_dim_v}" if self.is_pair else ""
        return f"{self.direction.capitalize()}Launch<Instance<{axes}>>"

    @property
    def mangled(self) -> str:
        """A pattern of its Instance<...> in the names of kernels."""
        axes = (("Family", self.family), ("ElementType", self.element), ("Variant", self.variant))
        family, element, variant = (
            rf"\w*?{len(name)}{name}E{enumerators(name).index(x)}E" for name, x in axes
        )
        return rf"8InstanceIL{family}L{element}Li{self.head_dim}EL{variant}Li{self.head_dim_v}E"


@dataclass(frozen=True)
class OtherInstance:
    """What is next to attention, softmax by itself and append_kv, for an element type.

    The Ampere family's architectures serve all GPUs. On Hopper and newer these kernels wait for the kernel
    before them, an instruction that PTX for Ampere does not have.
    """

    folder: str  # of include/flash_cute
    launch: str
    element: str
    definition = register_flags = ""
    kinds_of_ptx = 2
    family = "sm80"

    @property
    def name(self) -> str:
        return f"{self.folder}_{self.element}"

    @property
    def unit(self) -> str:
        return f"{self.folder}_kernels"  # csrc has sources of the folders' names

    @property
    def header(self) -> str:
        return f"flash_cute/{self.folder}/launch.cuh"

    @property
    def instantiated(self) -> str:
        return f"{self.launch}<ElementType::{self.element}>"

    @property
    def mangled(self) -> str:
        type_name = {"fp16": "6__half", "bf16": "13__nv_bfloat16", "fp32": "If"}[self.element]
        return rf"ElementTypeE{enumerators('ElementType').index(self.element)}E|{type_name}"


@dataclass(frozen=True)
class PairInstance:
    """Values of pairs, of a family and an element type: the gradient of a bias, and weights."""

    family: str
    element: str
    register_flags = ""
    kinds_of_ptx = 1

    @property
    def name(self) -> str:
        return f"pairs_{self.family}_{self.element}"

    @property
    def unit(self) -> str:
        return f"pairs_{self.family}"

    @property
    def definition(self) -> str:
        return f"FLASH_CUTE_COMPILED_PAIRS({self.family}, {self.element})\n"

    @property
    def header(self) -> str:
        return f"flash_cute/pairs/{self.family}/launch.cuh"

    @property
    def instantiated(self) -> str:
        return f"PairLaunch<Family::{self.family}, ElementType::{self.element}>"

    @property
    def mangled(self) -> str:
        type_name = {"fp16": "half_t", "bf16": "bfloat16_t"}.get(self.element)
        of_enumerator = rf"ElementTypeE{enumerators('ElementType').index(self.element)}E"
        return rf"{of_enumerator}|{type_name}" if type_name else of_enumerator


def other_instances(selected: list[Instance]) -> list[OtherInstance | PairInstance]:
    """What is next to these: values of pairs where there are gradients of general calls."""
    others = [
        OtherInstance(folder, launch, element)
        for folder, launch in (("softmax", "RowSoftmaxLaunch"), ("append", "AppendLaunch"))
        for element in ("fp16", "bf16", "fp32")
    ]
    gradients = (x for x in selected if x.direction == "backward" and x.variant == "general")
    pairs = dict.fromkeys(PairInstance(x.family, x.element) for x in gradients)
    return [*pairs, *others]


_ENDS_OF_UNITS = "64", "96", "128", "192", "256", "fp16", "bf16", "fp32", "tf32", "sm80", "sm90"

# What `python -m flash_cute.build_report --check` lets pass, by the end of an instance's name.
# - Softmax spills where rows have edges and blocks share them: a thread has 64 registers, as with more
#   fewer rows would be on an SM (include/flash_cute/softmax/plan.hpp). Its plain rows spill
#   nothing on Hopper.
# - General kernels have the plain ones' tiles, whose registers are all taken; what they spill is for what a
#   call may ask: a bias that each thread loads, tanh that is kept for its derivative, the element test.
# - The backward of sm80 at head dim 64 spills one register on Ampere, none on Hopper.
# - float32 takes all registers for operands in two parts; what spills is addresses, some 20 loads of a
#   step's 1500 instructions.
TOLERATED = [
    {"kernel": kernel, "element": element, "spill_bytes": spill_bytes, "stack_bytes": stack_bytes}
    for kernel, element, spill_bytes, stack_bytes in (
        ("row_softmax", "bf16", 56, 16),
        ("row_softmax", "fp16", 56, 16),
        ("row_softmax", "fp32", 40, 16),
        ("row_softmax_backward", "bf16", 112, 40),
        ("row_softmax_backward", "fp16", 112, 40),
        ("row_softmax_backward", "fp32", 80, 24),
        ("forward_kernel_sm90", "split", 96, 32),  # of head dim 256: once a split of a tile that adds them up
        ("combine_kernel", "sm80_256", 56, 24),
        *(("fold_kernel", f"sm80_{head_dim}", 56, 24) for head_dim in (64, 128, 256)),  # on Ampere alone
        ("code_kernel_sm90", "split", 80, 24),  # of head dim 192
        ("code_kernel_sm90", "general", 400, 112),
        ("forward_kernel_sm80", "general", 1900, 800),
        ("forward_kernel_sm90", "general", 2400, 512),
        ("backward_kernel_sm80", "general", 800, 160),
        ("backward_dq_kernel_sm80", "general", 640, 160),
        ("backward_kernel_sm90", "general", 2100, 320),
        *(("pair_values_kernel_sm80", element, 900, 240) for element in ("fp16", "bf16", "fp32")),
        *(("pair_values_kernel_sm90", element, 520, 80) for element in ("fp16", "bf16")),
        ("backward_kernel_sm80", "64", 8, 8),
        *(("prepare_ranges_kernel", unit, 0, 32) for unit in _ENDS_OF_UNITS),  # a query's ranges are sorted
        *(
            ("backward_preprocess_sm80", f"{element}_256{variant}", spill_bytes, stack_bytes)
            for element in ("fp32", "tf32")
            for variant, spill_bytes, stack_bytes in (("", 96, 32), ("_general", 144, 48))
        ),
        *(("backward_preprocess_sm80", f"sm80_{element}", 432, 48) for element in ("fp32", "tf32")),
        *(
            (kernel, f"{element}_{head_dim}", spill_bytes, stack_bytes)
            for element in ("fp32", "tf32")
            for head_dim in (64, 128, 256)
            for kernel, spill_bytes, stack_bytes in (
                ("forward_kernel_sm80", 640, 128),
                ("backward_kernel_sm80", 640, 160),
                ("backward_dq_kernel_sm80", 640, 160),
            )
        ),
    )
]


def listed(variable: str, default: str = "") -> list[str]:
    """The entries of an environment variable that holds a list."""
    return re.findall(r"[^;,\s]+", os.environ.get(variable) or default)


def is_set(variable: str) -> bool:
    """Does a variable that is a switch say yes?"""
    value = os.environ.get(variable, "").strip().lower()
    if value not in ("", "0", "false", "no", "off", "1", "true", "yes", "on"):
        raise SystemExit(f"{variable} must be 0 or 1, got {value}")
    return value in ("1", "true", "yes", "on")


def chosen(variable: str, available: list[str]) -> list[str]:
    """The part of `available` that the environment selects; all of it when the variable is unset."""
    wanted = listed(variable) or available
    if unknown := sorted(set(wanted) - set(available)):
        raise SystemExit(f"{variable} must be of {', '.join(available)}, got {', '.join(unknown)}")
    return [value for value in available if value in wanted]


def architecture_flags(family: str, kinds_of_ptx: int = 1) -> str:
    """nvcc's flags for a family: an entry like 90a is for family sm90 alone, any other for family sm80.

    All machine code of a family comes from the PTX of its oldest architecture: making PTX takes nearly all of
    the compile time, and no kernel of attention asks for a newer one. With 2 kinds, what is for Hopper and
    newer comes from PTX of the oldest of these.
    """
    targets = []
    for entry in listed("FLASH_CUTE_ARCHS", DEFAULT_ARCHITECTURES):
        match = re.fullmatch(r"(\d+)(a?)(\+PTX)?", entry)
        number, exact, ptx = match.groups() if match else ("0", "", "")
        if int(number) < 80 or (exact and number != "90"):
            raise SystemExit(
                f"FLASH_CUTE_ARCHS must be of 80, 80+PTX, likewise higher ones, and 90a, got {entry}"
            )
        if family == (f"sm{number}" if exact else "sm80"):
            targets.append((int(number), exact, ptx))
    codes = []
    for number, exact, ptx in targets:
        alike = (other for other, _, _ in targets if kinds_of_ptx == 1 or (other >= 90) == (number >= 90))
        codes.append(f"compute_{min(alike)}{exact},code=sm_{number}{exact}")
        codes += [f"compute_{number}{exact},code=compute_{number}{exact}"] if ptx else []
    flags = [f"-gencode=arch={code}" for code in dict.fromkeys(codes)]
    return " ".join(flags)


def enumerators(name: str) -> list[str]:
    """Those of an enumeration of params.hpp, in order."""
    found = re.search(rf"enum class {name} {{ (.*?) }}", (INCLUDE / "params.hpp").read_text())
    return found[1].split(", ")


Compiled = Instance | OtherInstance | PairInstance


def units_of(instances: list[Compiled]) -> dict[str, list[Compiled]]:
    """Translation units by name, each with the instances that it compiles, in their order."""
    units: dict[str, list[Compiled]] = {}
    for instance in instances:
        units.setdefault(instance.unit, []).append(instance)
    return units


def source_of(unit: list[Compiled]) -> str:
    """The text of a translation unit."""
    return (
        "// Generated by setup.py.\n"
        f'#include "{unit[0].header}"\n'
        "namespace flash_cute {\n"
        + "".join(f"template struct {instance.instantiated};\n" for instance in unit)
        + "}\n"
    )


def flags_of(unit: list[Compiled]) -> str:
    """nvcc's flags, alike for a unit's instances; softmax and append_kv are also in a build of sm90 alone."""
    flags = architecture_flags(unit[0].family, unit[0].kinds_of_ptx) or architecture_flags("sm90")
    return flags + unit[0].register_flags


def listed_instances(table: str) -> list[Instance]:
    """The instances in the text of instances.def."""
    axis = re.findall(r"^FLASH_CUTE_ELEMENT\((\w+)\)", table, re.MULTILINE)
    rows = re.findall(
        r"^FLASH_CUTE_(?:INSTANCE|PAIR)\((\w+), (\w+), (\d+)(?:, (\d+))?, ([a-z]+)(.*)\)", table, re.MULTILINE
    )
    return [
        Instance(direction, family, element, head_dim, variant, head_dim_v or head_dim)
        for direction, family, head_dim, head_dim_v, variant, elements in rows
        for element in re.findall(r"\w+", elements) or axis
    ]


def visible_capabilities() -> list[int]:
    """Compute capabilities of the GPUs of this machine, 90 for 9.0; empty where there is none."""
    import torch

    if not torch.cuda.is_available():
        return []
    capabilities = (torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    return sorted({10 * major + minor for major, minor in capabilities})


def runs_on(capability: int, instance: Instance) -> bool:
    """Does a call on this GPU, which names no family, take an instance?

    As csrc/kernels/planned_call.cpp has it: Hopper has a family of its own, but for float32, and for
    gradients of general calls that are deterministic.
    """
    if capability != 90:
        return instance.family == "sm80"
    is_float32 = instance.element in ("fp32", "tf32")
    is_general = instance.direction == "backward" and instance.variant == "general"
    return instance.family == "sm90" or is_float32 or is_general


def built_for() -> list[int]:
    """The compute capabilities that the kernels are chosen for, or none: then all are built.

    As with the architectures of torch's extensions, those of the GPUs that are visible, unless the
    environment says what to build.
    """
    if listed("FLASH_CUTE_FAMILIES") or listed("FLASH_CUTE_ARCHS"):
        return []
    return [capability for capability in visible_capabilities() if capability >= 80]


def selected_instances() -> list[Instance]:
    """The instances of instances.def that the environment selects, those that compile longest first."""
    instances = listed_instances((INCLUDE / "instances.def").read_text())

    def axis(name: str, variable: str) -> list[str]:
        return chosen(variable, list(dict.fromkeys(getattr(instance, name) for instance in instances)))

    every_family = list(dict.fromkeys(instance.family for instance in instances))
    picked = chosen("FLASH_CUTE_FAMILIES", ["all", *every_family])
    families = every_family if "all" in picked else picked
    for family in () if "all" in picked else picked:
        if not architecture_flags(family):
            raise SystemExit(
                f"FLASH_CUTE_ARCHS must have one for {family}, got {os.environ['FLASH_CUTE_ARCHS']}"
            )
    elements = axis("element", "FLASH_CUTE_ELEMENTS")
    head_dims = axis("head_dim", "FLASH_CUTE_HEAD_DIMS")
    capabilities = built_for()
    selected = [
        instance
        for instance in instances
        if instance.family in families and architecture_flags(instance.family)
        if instance.element in elements and instance.head_dim in head_dims
        if not capabilities or any(runs_on(capability, instance) for capability in capabilities)
    ]
    return sorted(
        selected, key=lambda instance: (-int(instance.head_dim), instance.family, instance.direction)
    )
