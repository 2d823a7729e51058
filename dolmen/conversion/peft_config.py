"""Checks an adapter_config.json of PEFT's: that it is of LoRA or DoRA beside matrices, and that
PEFT puts an adapter on every module that has one in the file. What PEFT would compute otherwise
than as B A beside a matrix is refused; so are tensors that it would ignore, as those of a module
that `target_modules` does not match.
"""

import re
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dolmen.files import gate
from dolmen.files.tokenizer_files import OVER_TIME, run_limited

OTHER_BASES = ("pissa", "olora", "corda", "loftq")
"""Values of init_lora_weights that change the base weights, so that the adapter does not fit the
base it names.
"""
OTHERWISE = (
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "use_qalora",
    "alora_invocation_tokens",
    "megatron_config",
    "layer_replication",
)
"""Fields that change what is computed from B A, where they are not empty."""
FORMS = ("arrow_config", "kasa_config", "monteclora_config", "use_bdlora", "velora_config")
"""Fields that select another form of adapter, also where they are {}: that form with its
defaults.
"""
HARMLESS = (
    "corda_config",
    "eva_config",
    "loftq_config",
    "lora_ga_config",
    "runtime_config",
    "use_dora",
    "use_rslora",
)
"""Fields that are accepted: how A and B were initialized, which does not concern the base as it is.
"""

SECONDS = 5  # of one core, to match one expression with all modules: those in use take milliseconds
MEMORY = 1 << 30
INVALID = 88
MATCH = """
import re
limit()
try:
    expression = re.compile(inputs["expression"])
    print(*(int(bool(expression.fullmatch(module))) for module in inputs["modules"]))
except (re.error, RecursionError, OverflowError) as error:
    print(error)
    sys.exit(INVALID)
""".replace("INVALID", str(INVALID))


def check(file: Path, config: Mapping[str, Any]) -> None:
    """Raise Refused for an adapter_config.json that is not plain LoRA or DoRA: another method,
    trained biases, or options that change what is computed.
    """
    if config["peft_type"] != "LORA":
        raise gate.refuse(file, f"has peft_type {config['peft_type']}: only LORA is supported")
    if config.get("bias", "none") != "none":
        raise gate.refuse(file, f"has bias {config['bias']}: only none is supported")
    for name, value in config.items():
        # options of later PEFT releases are refused too, by the form of their name
        unknown = name.endswith("_config") or name.startswith("use_")
        # False, None and empty values mean "not used"
        other = name in OTHERWISE or (unknown and name not in (*HARMLESS, *FORMS))
        if (other and value) or (name in FORMS and value is not None and value is not False):
            raise gate.refuse(
                file,
                f"has {name}, which is not supported: train without it, or merge the adapter with "
                "PEFT and give the merged model",
            )
    # PiSSA and others subtract B A from the base on loading
    init = str(config.get("init_lora_weights")).lower()
    if init.startswith(OTHER_BASES):
        raise gate.refuse(
            file,
            f"has init_lora_weights {init}, with which PEFT changes the base model on loading: "
            "merge the adapter with PEFT, or save it as plain LoRA",
        )


@dataclass(frozen=True)
class Reach:
    """Decides which modules PEFT puts an adapter on, as its `check_target_module_exists` does:
    those that a list names in full or by their ending, or that a regular expression matches in
    full.
    """

    file: Path
    config: Mapping[str, Any]

    def check(self, modules: Sequence[str], heads: Container[str] = ()) -> None:
        """Raise Refused where PEFT would not put an adapter on one of `modules`, which have
        adapter tensors in the file: it would ignore them silently. `heads`: output embeddings,
        which "all-linear" leaves out.
        """
        # PEFT looks at exclude_modules first
        excluded = self._match_field("exclude_modules", modules)
        targets = self._find_targets(modules, heads)
        for module in modules:
            if module in excluded:
                raise gate.refuse(
                    self.file,
                    f"exclude_modules matches {module}, whose adapter PEFT would ignore: remove "
                    "it from exclude_modules, or its tensors from the other file",
                )
            if module not in targets:
                raise gate.refuse(
                    self.file,
                    f"target_modules does not match {module}, whose adapter PEFT would ignore: "
                    f"add {module.rpartition('.')[2]} to target_modules, or remove its tensors "
                    "from the other file",
                )
            self._check_layer(module)

    def _check_layer(self, module: str) -> None:
        """Raise Refused where layers_to_transform leaves out the layer of a module that has an
        adapter.
        """
        if not self._layers or module in self.config["target_modules"]:  # in full: of any layer
            return
        layer = self._layer(module)
        if layer not in self._layers:
            raise gate.refuse(
                self.file,
                f"layers_to_transform does not have the layer of {module}, which has an "
                f"adapter that PEFT leaves out: "
                f"{'take' if layer is None else f'add {layer} to it, or take'} "
                "its tensors from the other file",
            )

    def _find_targets(self, modules: Sequence[str], heads: Container[str]) -> frozenset[str]:
        """Return those of `modules` that target_modules selects. Raises Refused where it is null,
        since the default depends on the release of PEFT.
        """
        value = self.config.get("target_modules")
        if value is None:
            raise gate.refuse(
                self.file,
                "target_modules is null, whose meaning depends on the version of PEFT: list the "
                "modules there",
            )
        if isinstance(value, str) and value.lower() == "all-linear":
            return frozenset(module for module in modules if module not in heads)
        return self._match_field("target_modules", modules)

    def _match_field(self, field: str, modules: Sequence[str]) -> frozenset[str]:
        """Return those of `modules` that the config's `field` selects: by a list of names, or by a
        regular expression.
        """
        value = self.config.get(field)
        if isinstance(value, str) and value:
            return _match_expression(self.file, field, value, modules)
        names = frozenset(value or ())
        return frozenset(module for module in modules if _has_name(module, names))

    @cached_property
    def _layers(self) -> frozenset[int]:
        """Layer numbers in layers_to_transform; empty means all. Raises Refused where
        target_modules is a regular expression, which PEFT does not accept together.
        """
        value = self.config.get("layers_to_transform")
        layers = frozenset([value] if isinstance(value, int) else value or ())
        if layers and isinstance(self.config.get("target_modules"), str):
            raise gate.refuse(
                self.file,
                "has layers_to_transform with a target_modules that is a string, which PEFT "
                "rejects: make target_modules a list",
            )
        return layers

    @cached_property
    def _lists(self) -> tuple[str, ...]:
        """Names of the module lists in layers_pattern whose layers are counted; empty means any.
        Raises Refused for anything but plain names.
        """
        value = self.config.get("layers_pattern") or ()
        names = (value,) if isinstance(value, str) else tuple(value)
        for name in names:
            if re.fullmatch(r"\w+", name) is None:
                raise gate.refuse(
                    self.file,
                    f"layers_pattern is {name}: it must be the name of a list of layers, such as "
                    "layers",
                )
        return names

    def _layer(self, module: str) -> int | None:
        """Return the layer number of a module as PEFT counts it: the number behind the first list
        that the module is in; None where there is none.
        """
        parts = module.split(".")
        # parts that are numbers, neither first nor last
        numbered = [i for i in range(1, len(parts) - 1) if parts[i].isdecimal()]
        if not self._lists:  # PEFT has one name at least before that of the list
            return next((int(parts[i]) for i in numbered if i > 1), None)
        numbers = (int(parts[i]) for name in self._lists for i in numbered if parts[i - 1] == name)
        return next(numbers, None)


def _has_name(module: str, names: frozenset[str]) -> bool:
    """Return whether one of the names is the module's full name, or its ending after a dot."""
    parts = module.split(".")
    return any(".".join(parts[i:]) in names for i in range(len(parts)))


def _match_expression(
    file: Path, field: str, expression: str, modules: Sequence[str]
) -> frozenset[str]:
    """Return those of `modules` that a regular expression matches in full. Matched in a child
    process with limits, as the expression may be someone else's. Raises Refused where it is
    invalid, or takes too much time or memory.
    """
    request = {"expression": expression, "modules": list(modules)}
    # Python's re backtracks: "(a+)+b" takes 2^n steps
    ended = run_limited(MATCH, request, seconds=SECONDS, memory=MEMORY)
    if ended.returncode == INVALID:
        raise gate.refuse(
            file,
            (
                f"{field} is not a regular expression ({ended.stdout.strip()}): "
                f"{ascii(expression)[:200]}"
            ),
        )
    if ended.returncode in OVER_TIME or "MemoryError" in ended.stderr:
        raise gate.refuse(
            file,
            f"{field} is a regular expression that takes over {SECONDS} s, or {MEMORY >> 30} GiB, "
            f"to match: {ascii(expression)[:200]}",
        )
    if ended.returncode:
        raise gate.refuse(
            file,
            f"{field} is a regular expression that could not be matched: the process that does so, "
            f"{sys.executable}, ended with code {ended.returncode}: {ended.stderr[-600:]}",
        )
    return frozenset(m for m, bit in zip(modules, ended.stdout.split(), strict=True) if bit == "1")
